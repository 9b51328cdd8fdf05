"""One CUDA device that is not there: torch.cuda as far as training asks for it, and a meter of what training does.

Tensors are torch's fake ones: they have a shape, a dtype and a device, and no content. So every line of a training
step runs, on a machine without a GPU and for models of any size, and an operator whose tensors are on different devices
fails as it would on a GPU. What an operator's result *is* cannot be seen this way.
"""

from __future__ import annotations

import contextlib
import functools
import subprocess
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("cuda", 0)
MATRIX_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_varlen_attn", "_varlen_attn_backward"}
# what a number that a fake tensor is asked for becomes: norms are finite, counts are 1
ANSWERS: dict[type, Any] = {bool: True, int: 1, float: 1.0}
_swap = torch.utils.swap_tensors


# Qwen2.5's and, at 4B, Qwen3's: vocabulary, hidden size, inner size, heads, key/value heads, tied embeddings
SHAPES = {
    "0.5B": (151936, 896, 4864, 14, 2, True),
    "4B": (151936, 2560, 9728, 32, 8, True),
    "7B": (152064, 3584, 18944, 28, 4, False),
    "32B": (152064, 5120, 27648, 40, 8, False),
}
NAMES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


def model_config(shape: str, layers: int) -> dict[str, Any]:
    """The config.json of a model of that shape with so many layers."""
    *sizes, tied = SHAPES[shape]
    family = {"model_type": "qwen3", "head_dim": 128} if shape == "4B" else {"model_type": "qwen2"}
    sized = dict(zip(NAMES, sizes, strict=True))
    return {**family, **sized, "num_hidden_layers": layers, "tie_word_embeddings": tied, "bos_token_id": 1}


def build(folder: Path) -> Path:
    """Compile guard.cpp with the machine's compiler."""
    root, library = Path(torch.__file__).parent, folder / "guard.so"
    include = [f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include"]
    link = [f"-L{root}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{root}/lib"]
    source = str(Path(__file__).with_name("guard.cpp"))
    command = ["g++", "-shared", "-fPIC", "-O0", "-std=c++20", *include, source, "-o", str(library), *link]
    subprocess.run(command, check=True)
    return library


class _Event:
    """A stream or an event: everything has happened."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name not in ("record", "wait", "synchronize", "wait_event", "wait_stream", "record_event"):
            raise AttributeError(name)
        return lambda *_: self

    def query(self) -> bool:
        return True


def install() -> None:
    """From here on this process, which has loaded the guard, has a CUDA device."""
    stream = _Event()
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "current_stream": stream,
        "get_device_capability": (9, 0),
        "get_device_name": "NVIDIA H100 80GB HBM3",
        "is_current_stream_capturing": False,
        "mem_get_info": (80 * 10**9, 80 * 10**9),
        "_lazy_init": None,
        "set_device": None,
        "synchronize": None,
        "empty_cache": None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, _answer=answer, **__: _answer)
    torch.cuda.Event = torch.cuda.Stream = _Event  # type: ignore[misc]
    torch.cuda.stream = lambda _: contextlib.nullcontext()  # type: ignore[assignment]
    torch.cuda.get_rng_state = lambda *_: torch.zeros(16, dtype=torch.uint8)  # type: ignore[assignment]
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]
    _fsdp_init._move_states_to_device = _move_states_to_device
    torch.utils.swap_tensors = _become  # what Module.to does with fake parameters
    # DTensor finds the shape of a result with tensors of global size, that no device holds
    ShardingPropagator._propagate_tensor_meta_non_cached = outside(ShardingPropagator._propagate_tensor_meta_non_cached)


def outside(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, run on real tensors and unseen by the meter."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return run


def _become(old: Tensor, new: Tensor) -> None:
    """``old`` is from now on what ``new`` is; a fake tensor's device is an attribute, which ``.data =`` leaves."""
    if not isinstance(old, FakeTensor):
        _swap(old, new)
        return
    old.data = new.data
    old.fake_device = new.device


def _move_states_to_device(params: list[Tensor], buffers: list[Tensor], device: torch.device) -> None:
    for tensor in [*params, *buffers]:
        if not tensor.is_meta:
            _become(tensor, tensor.data.to(device))


class Meter(TorchDispatchMode):
    """What is on the device, and in which dtypes it is computed and sent.

    Memory is that of storages on this rank: DTensors are passed on to be taken apart, so that shards count, not the
    tensors that they are shards of. ``now`` and ``peak`` are in bytes, each storage rounded up as torch's allocator
    does; ``pinned``: bytes of host memory that were pinned. ``products``: how often each matrix product, with the
    dtypes of operands and result; ``sent``: bytes by collective and dtype.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.pinned = 0
        self.products: dict[str, int] = defaultdict(int)
        self.sent: dict[str, int] = defaultdict(int)
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if name == "_local_scalar_dense":
            dtype = args[0].dtype
            return ANSWERS[bool if dtype == torch.bool else float if dtype.is_floating_point else int]
        out = func(*args, **kwargs)
        if kwargs.get("pin_memory"):
            self.pinned += out.nbytes
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor) and x.device.type == "cuda"]
        for tensor in tensors:
            self.see(tensor)
        if name in MATRIX_PRODUCTS and tensors:
            floats = [x for x in tensors if x.dtype.is_floating_point]
            operands = {str(x.dtype)[6:] for x in floats[:2]}
            self.products[f"{name} {'+'.join(sorted(operands))} -> {str(floats[-1].dtype)[6:]}"] += 1
        if func.namespace in ("c10d", "_c10d_functional") and tensors and "wait" not in name:
            largest = max(tensors, key=lambda x: x.nbytes)
            self.sent[f"{name.strip('_')} {str(largest.dtype)[6:]}"] += largest.nbytes
        return out

    def see(self, tensor: Tensor) -> None:
        """Count the storage of ``tensor``, in its present size, until it is gone."""
        storage = tensor.untyped_storage()
        self.resized(storage, new=True)

    def resized(self, storage: torch.UntypedStorage, *, new: bool = False) -> None:
        """``storage`` may have changed its size; ``new``: it may be one that was not seen yet."""
        key, size = storage._cdata, -(-storage.nbytes() // 512) * 512
        known = self._live.get(key)
        if known is None and not new:
            return
        if known is None or known[0]() is None:

            def gone(ref: weakref.ref[Any]) -> None:
                if self._live.get(key, (None,))[0] is ref:
                    self._add(-self._live.pop(key)[1])

            self._add(-known[1] if known else 0)
            known = (weakref.ref(storage, gone), 0)
        self._live[key] = (known[0], size)
        self._add(size - known[1])

    def _add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)


@contextlib.contextmanager
def simulation() -> Iterator[Meter]:
    """Fake tensors, and the meter of what is on the device."""
    meter, resize = Meter(), torch.UntypedStorage.resize_

    def watched(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        meter.resized(storage)
        return result

    torch.UntypedStorage.resize_ = watched  # type: ignore[method-assign]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), meter:
            yield meter
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
