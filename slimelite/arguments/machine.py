"""GPUs of this machine, counted without importing torch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from slimelite.plan.devices import Device, planned, recognized


@dataclass(frozen=True)
class Machine:
    """How many GPUs this process may use, whether SGLang is installed; memory and kind of the smallest, if known; the
    lowest compute ``capability``, and the version of the ``driver``.
    """

    gpus: int
    sglang: bool = False
    gpu_bytes: int | None = None
    device: Device | None = None
    capability: tuple[int, int] | None = None
    driver: str | None = None


def this_machine(plan_gpu: str | None = None) -> Machine:
    """The machine of this process, or one with SGLang and the GPUs of ``--plan-gpu``; only the start of the run shows
    whether CUDA works on its GPUs.

    Raises:
        ValueError: ``plan_gpu`` names no GPU.
    """
    sglang = importlib.util.find_spec("sglang") is not None
    if plan_gpu:
        device, count = planned(plan_gpu)
        return Machine(count, True, device.bytes, device, device.capability)
    gpus = _count_gpus()
    return replace(_nvidia_smi(), gpus=gpus, sglang=sglang) if gpus else Machine(0, sglang)


def _count_gpus() -> int:
    devices = len(list(Path("/dev").glob("nvidia[0-9]*"))) or int(Path("/dev/dxg").exists())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return devices
    return min(devices, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))


@cache
def _nvidia_smi() -> Machine:
    """What nvidia-smi says of the GPUs; drivers before 510 do not tell the compute capability."""
    for fields in (
        ["memory.total", "driver_version", "compute_cap", "name"],
        ["memory.total", "driver_version", "name"],
    ):
        # without persistence mode nvidia-smi takes seconds
        command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
            lines = [line.split(",", len(fields) - 1) for line in answer.splitlines() if line.strip()]
            rows = [dict(zip(fields, map(str.strip, cells), strict=True)) for cells in lines]
            smallest = min(rows, key=lambda row: int(row["memory.total"]))
            device = recognized(smallest["name"])
            lowest = min((_capability(row["compute_cap"]) for row in rows if "compute_cap" in row), default=None)
        except (OSError, subprocess.SubprocessError, ValueError):
            continue
        capability = lowest or (device.capability if device else None)
        return Machine(0, False, int(smallest["memory.total"]) * 2**20, device, capability, smallest["driver_version"])
    return Machine(0)


def _capability(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)
