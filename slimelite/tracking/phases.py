"""Phases of the loop: how long each took, and how far the current one is."""

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
# the loop's name of a phase, where slime has another for its seconds: perf/rollout_time
PERF_NAMES = {"generate": "rollout"}
# perf/{name}_time -> what console and plots call it
LABELS = {"rollout": "gen", "train": "train", "update_weights": "sync", "save_model": "save", "eval": "eval"}


def duration(seconds: float) -> str:
    """``0.35s``, ``7.1s``, ``42s``, ``3m05s``, ``2h07m``."""
    if seconds < 10:
        return f"{seconds:.2f}s" if seconds < 1 else f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


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


class Phase:
    """A phase that is going on. Its own thread draws, so that `update` costs nothing and silence never means a hang."""

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
        """``done`` of ``total`` (None: as before) units are finished. May be called from any thread.

        ``note``: what the units are, or how fast it goes.
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
        """``12/64 groups, 37s, about 2m40s left``."""
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
        # standard error is a file by now (noise.py): leave it alone
        bar = Progress(*columns, console=self._console.rich, transient=True, auto_refresh=False, redirect_stderr=False)
        with bar:
            task = bar.add_task(self._name, total=self._total, text="")
            while not self._over.wait(REDRAW_EVERY):
                bar.update(task, completed=self._done, total=self._total, text=self.describe(), refresh=True)
