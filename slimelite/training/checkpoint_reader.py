"""Reads torch's distributed checkpoints without trusting them: no code runs, and what is wrong is said in one line."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from slimelite.arguments.checksums import REMEDY

METADATA = ".metadata"
DO_NOT = "do not load it, and ask where it came from"
# every class that torch's writer puts into it, by module; none of them does anything when it is made
ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}


class _ForeignClass(Exception):
    """A pickle names a class that is not on the list."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in ALLOWED.get(module, ()):
            raise _ForeignClass(f"asks for {module}.{name}")
        return super().find_class(module, name)


class CheckpointReader(dcp.FileSystemReader):
    """Torch's reader, with a ``.metadata`` that is read once and with an allow-list, for torch unpickles what it finds.

    Raises:
        ValueError: ``.metadata`` is missing, damaged, or holds what torch's writer does not write.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.directory = directory
        file = directory / METADATA
        try:
            found = _Unpickler(BytesIO(file.read_bytes())).load()
            self.tensors = {p: e for p, e in found.state_dict_metadata.items() if isinstance(e, TensorStorageMetadata)}
            others = found.state_dict_metadata.keys() - self.tensors.keys()
            self._ends: dict[str, dict[str, int]] = {path: {} for path in self.tensors}
            for key, info in found.storage_data.items():
                ends = self._ends.setdefault(key.fqn, {})
                ends[info.relative_path] = max(info.offset + info.length, ends.get(info.relative_path, 0))
            odd = not isinstance(found, Metadata) or any(i.transform_descriptors for i in found.storage_data.values())
        except FileNotFoundError:
            raise _damaged(file, "is missing") from None
        except _ForeignClass as error:
            raise ValueError(
                f"{file}: {error}, which no checkpoint of slimelite does and which could run a program: {DO_NOT}"
            ) from error
        except Exception as error:  # whatever a pickle that was cut short leads to
            raise _damaged(file, f"is damaged or cut short ({type(error).__name__}: {error})") from error
        if others or odd:
            what = f"{min(others)} is bytes instead of a tensor" if others else "it is of another kind"
            raise ValueError(
                f"{file}: {what}. No checkpoint of slimelite is like that, and bytes could run a program: {DO_NOT}"
            )
        self.metadata = found

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        """What was read when the reader was made."""
        self.metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self.metadata

    def load(self, state: dict[str, Any]) -> None:
        """Fill the tensors of ``state``, {"part": {"name": tensor}} (collective).

        Raises:
            ValueError: a file is missing or damaged, or a tensor has another shape.
        """
        tensors = {f"{part}.{name}": tensor for part, names in state.items() for name, tensor in names.items()}
        self._check(tensors)
        try:
            dcp.load(state, storage_reader=self)
        except (CheckpointException, Exception) as error:
            cause = failure(error) if isinstance(error, CheckpointException) else error
            reason = " ".join(str(cause).split())[:200]
            raise _damaged(self.directory, f"a part is damaged ({type(cause).__name__}: {reason})") from error

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        for path, tensor in tensors.items():
            entry = self.tensors[path]
            if entry.size != tensor.shape:
                here, there = (" x ".join(map(str, shape)) or "one number" for shape in (tensor.shape, entry.size))
                raise ValueError(
                    f"{self.directory} is a checkpoint of another model: {path} is {there} in it, and {here} in this "
                    "run's; name its model with --hf-checkpoint"
                )
            if sum(chunk.sizes.numel() for chunk in entry.chunks) != entry.size.numel():
                raise _damaged(self.directory / METADATA, f"is damaged: parts of {path} are not in it")
            for name, end in self._ends[path].items():
                file = self.directory / name
                if file.parent != self.directory:
                    raise ValueError(f"{self.directory / METADATA}: names {name}, a file outside the checkpoint")
                if not file.is_file():
                    raise _damaged(file, "is missing")
                if file.stat().st_size < end:
                    raise _damaged(file, f"is cut short: {file.stat().st_size:,} bytes of at least {end:,}")


def failure(error: CheckpointException) -> BaseException:
    """What failed on a rank.

    Raises:
        KeyboardInterrupt: the run is being ended (Ctrl-C, SIGTERM), which torch takes for a failure like any other.
    """
    causes = [cause for cause, _ in error.failures.values()]
    for cause in causes:
        if isinstance(cause, KeyboardInterrupt):
            raise cause from None
    return causes[0]


def _damaged(place: Path, what: str) -> ValueError:
    return ValueError(f"{place}: {what}; {REMEDY}")
