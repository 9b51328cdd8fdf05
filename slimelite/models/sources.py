"""Finds where each weight of a model is in the safetensors files. So a rank needs to read only the rows of its own
shard.

transformers joins some weights of the files, such as the experts of a layer. So the loader of transformers runs once on
tensors without data, and its operations are recorded: rename, view, stack and concatenate.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# names of the recorded operators that join or copy tensors
STACK, CAT, COPIES = "aten::stack", "aten::cat", ("aten::clone", "aten::contiguous", "aten::_to_copy")
# dtype in a safetensors file -> torch's. transformers reads files with other dtypes
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Source(Protocol):
    """A tensor that is read only when it is needed."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        ...

    def rows(self, begin: int, end: int) -> Tensor:
        """Rows ``begin`` to ``end`` in the dtype of the file. For a 0-d tensor, the result is the whole tensor."""
        ...


@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file. ``begin``: the position of the tensor's first byte in the file."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int

    def rows(self, begin: int, end: int) -> Tensor:
        """See `Source.rows`."""
        shape = (end - begin, *self.shape[1:]) if self.shape else ()
        part = torch.empty(shape, dtype=self.dtype)
        if part.numel() == 0:
            return part
        buffer = part.reshape(-1).view(torch.uint8).numpy().data
        with self.file.open("rb", buffering=0) as file:
            file.seek(self.begin + (begin * math.prod(self.shape[1:]) * part.element_size() if self.shape else 0))
            while buffer:
                if not (count := file.readinto(buffer)):
                    raise OSError(f"{self.file}: is cut short")
                buffer = buffer[count:]
        return part


@dataclass(frozen=True)
class Joined:
    """Tensors stacked or concatenated along ``dim``. ``stacked``: whether they are stacked."""

    parts: Sequence[Source]
    shape: tuple[int, ...]
    dim: int
    stacked: bool

    def rows(self, begin: int, end: int) -> Tensor:
        """See `Source.rows`."""
        join = torch.stack if self.stacked else torch.cat
        if self.dim:
            return join([part.rows(begin, end) for part in self.parts], self.dim)
        if self.stacked:
            chosen = [everything(part) for part in self.parts[begin:end]]
            return torch.stack(chosen) if chosen else everything(self.parts[0]).new_empty(0, *self.shape[1:])
        tensors, at = list[Tensor](), 0
        for part in self.parts:
            tensors.append(part.rows(min(max(begin - at, 0), part.shape[0]), min(max(end - at, 0), part.shape[0])))
            at += part.shape[0]
        return torch.cat(tensors)


@dataclass(frozen=True)
class View:
    """A view of ``base``. ``shape``, ``stride`` and ``offset`` are as in torch. ``laid``: the stride of ``base``."""

    base: Source
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    laid: tuple[int, ...]

    def rows(self, begin: int, end: int) -> Tensor:
        """See `Source.rows`."""
        row = math.prod(self.shape[1:])
        same = self.base.shape[1:] == self.shape[1:] and self.stride == _dense(self.shape)
        same = same and self.laid == _dense(self.base.shape)
        if self.shape and row and same and self.offset % row == 0:
            return self.base.rows(self.offset // row + begin, self.offset // row + end)
        values = everything(self.base)
        storage = torch.empty_strided(self.base.shape, self.laid, dtype=values.dtype).copy_(values)
        whole = storage.as_strided(self.shape, self.stride, self.offset)
        return whole[begin:end] if self.shape else whole


def everything(source: Source) -> Tensor:
    """The whole tensor, in the dtype of the file."""
    return source.rows(0, source.shape[0] if source.shape else 1)


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this shape."""
    return tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))


def stored(files: Sequence[Path]) -> dict[str, Stored]:
    """Every tensor of safetensors files, by its name in the file. Only the headers are read.

    Raises:
        KeyError: a dtype is not in `DTYPES`.
    """
    tensors = dict[str, Stored]()
    for path in files:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(size))
        for name, entry in header.items():
            if name != "__metadata__":
                begin = 8 + size + int(entry["data_offsets"][0])
                tensors[name] = Stored(path, tuple(entry["shape"]), DTYPES[entry["dtype"]], begin)
    return tensors


class Recorder(TorchDispatchMode):
    """A context that records how tensors without data are computed from the tensors of ``weights``."""

    def __init__(self, weights: Mapping[str, Stored]) -> None:
        super().__init__()
        self._weights = weights
        self._known: dict[int, tuple[Source, tuple[int, ...]]] = {}  # storage -> its tensor's source and stride
        # keeps the tensors of known storages alive. If one were freed, a new storage could get the same address
        self._kept: list[Tensor] = []

    def tensors(self) -> dict[str, Tensor]:
        """A tensor without data for each weight. Floating-point tensors are fp32, the dtype that `files._match` asks
        for. So transformers does not cast them."""
        empty = dict[str, Tensor]()
        for name, weight in self._weights.items():
            dtype = torch.float32 if weight.dtype.is_floating_point else weight.dtype
            empty[name] = torch.empty(weight.shape, dtype=dtype, device="meta")
            self._note(empty[name], weight)
        return empty

    def source(self, tensor: Tensor) -> Source | None:
        """The source of ``tensor``; None if ``tensor`` does not come only from the weights."""
        if (known := self._known.get(_storage(tensor))) is None:
            return None
        base, laid = known
        shape, stride, offset = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        same = base.shape == shape and stride == laid and not offset
        return base if same else View(base, shape, stride, offset, laid)

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator, and record the source of its result."""
        result, name = func(*args, **(kwargs or {})), func._schema.name
        if name in (STACK, CAT):
            parts = [self.source(part) for part in args[0]]
            dim = (args[1] if len(args) > 1 else (kwargs or {}).get("dim", 0)) % result.dim()
            known = [part for part in parts if part is not None]
            if len(known) == len(parts):
                self._note(result, Joined(known, tuple(result.shape), dim, stacked=name == STACK))
        elif name in COPIES and _storage(result) != _storage(args[0]) and (source := self.source(args[0])) is not None:
            self._note(result, source)
        elif func._schema.is_mutable and args and isinstance(args[0], Tensor):
            self._known.pop(_storage(args[0]), None)  # such as a new weight that gets random values
        return result

    def _note(self, tensor: Tensor, source: Source) -> None:
        self._known[_storage(tensor)] = source, tensor.stride()
        self._kept.append(tensor)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
