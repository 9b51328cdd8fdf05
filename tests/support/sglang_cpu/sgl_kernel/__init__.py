"""Stand-in for SGLang's compiled kernels: imported when the device is a CPU, called only with AMX (see ../README.md)."""

from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"sgl_kernel.{name} is not here: tests/support/sglang_cpu holds only what SGLang imports")

    return missing
