"""The output of a run: console, run folder, metrics, plots."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slimelite.tracking.tracker import Tracker

__all__ = ["Tracker"]


def __getattr__(name: str) -> object:
    """`Tracker`, imported when it is first used: drawing curves and reading metrics do without it."""
    if name != "Tracker":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from slimelite.tracking.tracker import Tracker

    return Tracker
