"""What this machine has, asked without importing torch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """How many GPUs this process may use, whether SGLang is installed, and the memory of the smallest GPU, if known."""

    gpus: int
    sglang: bool = False
    gpu_bytes: int | None = None


def this_machine() -> Machine:
    """The machine under our feet; whether CUDA really works is seen when the run starts."""
    gpus = _count_gpus()
    sglang = importlib.util.find_spec("sglang") is not None
    return Machine(gpus=gpus, sglang=sglang, gpu_bytes=_gpu_bytes() if gpus else None)


def _count_gpus() -> int:
    devices = len(list(Path("/dev").glob("nvidia[0-9]*"))) or int(Path("/dev/dxg").exists())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return devices
    return min(devices, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))


@cache
def _gpu_bytes() -> int | None:
    # without persistence mode nvidia-smi takes seconds
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        return min(int(line) for line in answer.split()) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
