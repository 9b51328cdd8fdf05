"""How far a long phase has come: a bar on a terminal, a plain line every half minute elsewhere."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from slimelite.tracking.console import Console, duration

BAR_AFTER = 0.5  # seconds; shorter phases draw nothing
REDRAW_EVERY = 0.2
LINE_EVERY = 30.0


class Phase:
    """A phase that is going on. Its own thread draws, so that `update` costs nothing and silence never means a hang."""

    def __init__(self, console: Console, name: str, total: int | None = None, line_every: float = LINE_EVERY) -> None:
        self._console = console
        self._name = name
        self._done, self._total, self._note = 0, total, ""
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
