"""Phases of the training loop: their names, and the time each one took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# phase name -> slime's name in the metric: the seconds of "generate" are perf/rollout_time
PERF_NAMES = {"generate": "rollout"}
# name in perf/{name}_time -> label on the console and in plots
LABELS = {"rollout": "gen", "train": "train", "update_weights": "sync", "save_model": "save", "eval": "eval"}


def duration(seconds: float) -> str:
    """A duration as text, such as ``0.35s``, ``7.1s``, ``42s``, ``3m05s`` or ``2h07m``."""
    if seconds < 10:
        return f"{seconds:.2f}s" if seconds < 1 else f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


class Timer:
    """Adds up the seconds of named phases within a step, which is one turn of the training loop.

    ::

        with timer("train"):
            ...
        timer.finish_step()  # {"perf/train_time": ..., "perf/step_time": ..., ...}
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.restart()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a phase; the seconds of a repeated name add up. Phases may overlap or nest: each counts in full."""
        began = self._clock()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self._clock() - began

    def restart(self) -> None:
        """Begin a step now, and discard all times before it."""
        self.seconds: dict[str, float] = {}
        self._step_began = self._clock()

    def finish_step(self) -> dict[str, float]:
        """End the step, return its times and begin the next one.

        Returns:
            ``perf/{phase}_time`` of every phase, ``perf/step_time`` (wall clock of the step), and if there was a
            phase ``train``: ``perf/train_wait_time`` (the step without it) and ``perf/wait_time_ratio`` (the share).
        """
        step = self._clock() - self._step_began
        times = {f"perf/{name}_time": seconds for name, seconds in self.seconds.items()} | {"perf/step_time": step}
        if "train" in self.seconds:
            wait = max(step - self.seconds["train"], 0.0)
            times |= {"perf/train_wait_time": wait, "perf/wait_time_ratio": wait / step if step else 0.0}
        self.restart()
        return times
