"""The sandboxes that the tests run in."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from slimelite.sandbox.registry import SANDBOXES, SandboxSettings

ROOT = Path(__file__).parents[2]
SANDBOXES_HERE = [
    "process",
    pytest.param("bwrap", marks=pytest.mark.bwrap),
    pytest.param("podman", marks=pytest.mark.podman),
]
CONTAINERS = [name for name, kind in SANDBOXES.items() if kind.container]
# what `tests.sandbox.images` makes
IMAGE = "localhost/slimelite-test:1"


def settings(sandbox: str, network: str = "loopback", **limits: Any) -> SandboxSettings:
    """Those of a sandbox of the tests."""
    return SandboxSettings(sandbox, network, image=IMAGE if sandbox in CONTAINERS else None, **limits)


def python(sandbox: str) -> str:
    """The interpreter that programs have there."""
    return "python3" if sandbox in CONTAINERS else os.path.realpath(sys.executable)


def is_running(word: str) -> bool:
    """Whether a process has ``word`` in its command line."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in path.read_bytes():
                return True
        except OSError:
            continue
    return False
