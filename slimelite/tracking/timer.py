"""Wall-clock seconds by phase of the loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# the loop's name of a phase, where slime has another for its seconds: perf/rollout_time
PERF_NAMES = {"generate": "rollout"}
# perf/{name}_time -> what console and plots call it
LABELS = {"rollout": "gen", "train": "train", "update_weights": "sync", "save_model": "save", "eval": "eval"}


class Timer:
    """Adds up the seconds of named phases within a step; a step is one turn of the loop.

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
        """Time a phase; a name that comes again adds up. Phases may overlap or nest: each counts its own seconds."""
        began = self._clock()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self._clock() - began

    def restart(self) -> None:
        """Begin a step now, and forget what was timed before it."""
        self.seconds: dict[str, float] = {}
        self._step_began = self._clock()

    def finish_step(self) -> dict[str, float]:
        """Seconds of the step that ends now; the next one begins.

        Returns:
            ``perf/{phase}_time`` of every phase, ``perf/step_time`` (wall clock of the step), and when there was a
            phase ``train``: ``perf/train_wait_time`` (all the rest) and ``perf/wait_time_ratio`` (its share).
        """
        step = self._clock() - self._step_began
        times = {f"perf/{name}_time": seconds for name, seconds in self.seconds.items()} | {"perf/step_time": step}
        if "train" in self.seconds:
            wait = max(step - self.seconds["train"], 0.0)
            times |= {"perf/train_wait_time": wait, "perf/wait_time_ratio": wait / step if step else 0.0}
        self.restart()
        return times
