"""What this machine has, asked without importing torch."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """How many GPUs this process may use, and whether SGLang is installed."""

    gpus: int
    sglang: bool = False


def this_machine() -> Machine:
    """The machine under our feet; whether CUDA really works is seen when the run starts."""
    return Machine(gpus=_count_gpus(), sglang=importlib.util.find_spec("sglang") is not None)


def _count_gpus() -> int:
    devices = len(list(Path("/dev").glob("nvidia[0-9]*"))) or int(Path("/dev/dxg").exists())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return devices
    return min(devices, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))
