"""The output of a run: console, run folder, metrics, plots."""

from slimelite.tracking.tracker import Tracker

__all__ = ["Tracker"]
