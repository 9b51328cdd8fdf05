"""The sandboxes that the tests run in."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SANDBOXES_HERE = ["process", pytest.param("bwrap", marks=pytest.mark.bwrap)]


def is_running(word: str) -> bool:
    """Whether a process has ``word`` in its command line."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in path.read_bytes():
                return True
        except OSError:
            continue
    return False
