"""Phases of the training loop: the time each one took, and the progress of the current one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slimelite.tracking.console import Console


BAR_AFTER = 0.5  # seconds; shorter phases draw nothing
REDRAW_EVERY = 0.2
LINE_EVERY = 30.0
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


class Phase:
    """A running phase. A separate thread draws its progress, so that `update` is cheap and the display never stops."""

    def __init__(self, console: Console, name: str, line_every: float = LINE_EVERY) -> None:
        self._console = console
        self._name = name
        self._done, self._note = 0, ""
        self._total: int | None = None
        self._line_every = line_every
        self._began = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._draw, name=f"progress-{name}", daemon=True)

    def update(self, done: int, total: int | None = None, note: str = "") -> None:
        """Report that ``done`` of ``total`` (None: as before) units are finished. Any thread may call this.

        ``note``: the name of the units, or the speed.
        """
        self._done, self._note = done, note
        self._total = self._total if total is None else total

    def __enter__(self) -> Phase:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def describe(self) -> str:
        """The progress as text, such as ``12/64 groups, 37s, about 2m40s left``."""
        elapsed = time.monotonic() - self._began
        counted = f"{self._done}/{self._total}" if self._total else ""
        parts = [" ".join(filter(None, (counted, self._note))), duration(elapsed)]
        if self._total and self._done:
            parts.append(f"about {duration(elapsed / self._done * max(self._total - self._done, 0))} left")
        return ", ".join(filter(None, parts))

    def _draw(self) -> None:
        if not self._console.live:
            while not self._over.wait(self._line_every):
                self._console.line(f"  {self._name}: {self.describe()}")
        elif not self._over.wait(BAR_AFTER):
            self._draw_bar()

    def _draw_bar(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (TextColumn("{task.description:>9}"), BarColumn(30), TextColumn("{task.fields[text]}", style="dim"))
        # rich must not redirect standard error, which goes to a file (noise.py)
        bar = Progress(*columns, console=self._console.rich, transient=True, auto_refresh=False, redirect_stderr=False)
        with bar:
            task = bar.add_task(self._name, total=self._total, text="")
            while not self._over.wait(REDRAW_EVERY):
                bar.update(task, completed=self._done, total=self._total, text=self.describe(), refresh=True)
