"""What this run ran on: packages, commit and hardware, found without importing any of the packages."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import slimelite

PACKAGES = ("torch", "transformers", "ray", "sglang", "numpy", "pyarrow", "safetensors", "math-verify", "wandb")


def versions(device: str) -> dict[str, Any]:
    """Versions of slimelite, Python and ``PACKAGES`` (None: not installed), the commit, and this machine.

    ``device``: GPUs are looked for when it is ``cuda``.
    """
    return {
        "slimelite": slimelite.__version__,
        "commit": commit(Path(slimelite.__file__).resolve().parents[1]),
        "python": platform.python_version(),
        **{name: _installed(name) for name in PACKAGES},
        "machine": {
            "platform": platform.platform(),
            "cpu": _first_value("/proc/cpuinfo", "model name") or platform.processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory": _first_value("/proc/meminfo", "MemTotal"),
            "gpus": gpus() if device == "cuda" else [],
        },
    }


def commit(checkout: Path) -> str | None:
    """The commit of a git checkout, with ``-dirty`` when files were changed; None if ``checkout`` is not one."""
    if not (checkout / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or None


def gpus() -> list[str]:
    """Name, memory and driver of each GPU of this machine, as nvidia-smi tells them."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _first_value(path: str, key: str) -> str | None:
    """The value of the first ``key: value`` line of a file in /proc."""
    if not Path(path).is_file():
        return None
    lines = Path(path).read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)
