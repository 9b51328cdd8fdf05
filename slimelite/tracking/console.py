"""Console output of a run: plain aligned text, with colour on a terminal, and the progress of the current phase; all
lines go to the log as well."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TextIO

import rich.console
from rich.text import Text

from slimelite.tracking.phases import duration

logger = logging.getLogger("slimelite.console")

HEADER_EVERY = 20  # rows
FILE_WIDTH = 120  # characters of a table where there is no terminal
BAR_AFTER = 0.5  # seconds; shorter phases draw nothing
REDRAW_EVERY = 0.2
LINE_EVERY = 30.0


def small(value: float) -> str:
    """A loss or KL with four decimals; with an exponent if four decimals would show only zeros."""
    if abs(value) >= 100:
        return f"{value:.4g}"
    return f"{value:.0e}" if 0 < abs(value) < 1e-3 else f"{value:.4f}"


def count(value: float) -> str:
    """A size or speed: ``7.3``, ``188``, ``12.3k``."""
    if value < 100:
        return f"{value:.1f}"
    return f"{value:.0f}" if value < 10_000 else f"{value / 1000:.1f}k"


def speed(value: float) -> str:
    """Tokens per second; ``-`` if none were generated."""
    return count(value) if value else "-"


def times(seconds: float, phases: Mapping[str, float], room: int) -> str:
    """``4.5s: gen 3.0s, train 1.5s`` in at most ``room`` characters, without phases below 1 % of ``seconds``."""
    kept = {label: s for label, s in phases.items() if s >= 0.01 * seconds}
    while kept:
        text = f"{duration(seconds)}: " + ", ".join(f"{label} {duration(s)}" for label, s in kept.items())
        if len(text) <= room:
            return text
        kept.pop(min(kept, key=kept.__getitem__))
    return duration(seconds)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the rollout table; ``metrics``: the first that exists is shown; ``keep``: a narrow terminal drops
    the columns with the lowest values first."""

    title: str
    width: int
    metrics: tuple[str, ...]
    show: Callable[[float], str]
    keep: int


COLUMNS = (
    Column("errors", 6, ("errors",), "{:.0f}".format, 10),
    Column("reward", 6, ("rollout/raw_reward",), "{:.3f}".format, 9),
    Column("eval", 5, ("eval",), "{:.3f}".format, 8),
    Column("±", 5, ("eval-stderr",), "{:.3f}".format, 0),
    Column("length", 6, ("rollout/response_len/mean",), count, 7),
    Column("loss", 7, ("train/loss",), small, 5),
    Column("kl", 6, ("train/kl_loss", "rollout/kl"), small, 4),
    Column("entropy", 7, ("train/entropy_loss", "rollout/entropy"), "{:.3f}".format, 2),
    Column("grad", 6, ("train/grad_norm",), small, 1),
    Column("tok/s", 5, ("tokens_per_sec", "perf/actor_train_tok_per_s"), speed, 3),
    Column("eta", 5, ("eta",), duration, 6),
)
POSITION = 9  # characters of the first column
TIMES = 28  # characters kept free for the times of the phases


class Console:
    """Prints lines, rows of the rollout table and warnings.

    ``file``: standard output unless given; ``always``: titles of columns that are shown from the first row on. Other
    columns are added when they first have a value.
    """

    def __init__(self, file: TextIO | None = None, always: Iterable[str] = ()) -> None:
        self.rich = rich.console.Console(file=file, highlight=False, soft_wrap=True, markup=False, emoji=False)
        self.live = self.rich.is_terminal and not self.rich.is_dumb_terminal
        if not self.live:
            self.rich.width = FILE_WIDTH
        self._titles = set(always)
        self._header = ""
        self._rows_since_header = 0

    def line(self, text: str, style: str = "") -> None:
        """Print a line, and log it."""
        self.rich.print(Text(text, style))
        logger.info(text)

    @contextmanager
    def warnings(self) -> Iterator[None]:
        """Print the warnings and errors that slimelite logs inside this context."""
        handler = _WarningHandler(self)
        ours = logging.getLogger("slimelite")
        ours.addHandler(handler)
        try:
            yield
        finally:
            ours.removeHandler(handler)

    def facts(self, facts: Mapping[str, str]) -> None:
        """Print ``name  value`` lines, aligned, and log them."""
        width = max(map(len, facts))
        for name, value in facts.items():
            self.rich.print(Text.assemble((f"  {name:<{width}}  ", "dim"), value))
            logger.info("%s: %s", name, value)

    def block(self, renderable: rich.console.RenderableType) -> None:
        """Print a block of several lines; the next row of the table then gets a new header."""
        self.rich.print(renderable, soft_wrap=isinstance(renderable, Text) and not self.live)
        self._header = ""

    def row(
        self,
        position: str,
        metrics: Mapping[str, float],
        seconds: float,
        phases: Mapping[str, float],
        *,
        best: bool = False,
    ) -> None:
        """Print a line of the rollout table, and log it.

        ``position``: such as "3/40"; ``metrics``: by the names in ``COLUMNS``; ``phases``: label -> its part of
        ``seconds``; ``best``: whether the eval score is the best so far.
        """
        cells = {c.title: c.show(v) for c in COLUMNS if (v := _first(metrics, c.metrics)) is not None}
        self._titles |= cells.keys()
        columns, room = self._fit()
        self._print_header(columns)
        text = Text(f"{position:>{POSITION}}")
        for column in columns:
            style = "bold green" if best and column.title == "eval" else ""
            text.append("  ").append(f"{cells.get(column.title, ''):>{column.width}}", style)
        text.append("  " + times(seconds, phases, room), "dim")
        self.rich.print(text)
        logger.info(text.plain.strip())

    def _fit(self) -> tuple[list[Column], int]:
        """The columns that fit this terminal, and the number of characters left for the times."""
        columns = [c for c in COLUMNS if c.title in self._titles]
        room = self.rich.width if self.live else 10**6
        while True:
            left = room - POSITION - sum(2 + c.width for c in columns) - 2
            if left >= TIMES or not columns:
                return columns, left
            columns.remove(min(columns, key=lambda c: c.keep))

    def _print_header(self, columns: Sequence[Column]) -> None:
        header = "  ".join([f"{'rollout':>{POSITION}}", *(f"{c.title:>{c.width}}" for c in columns), "time"])
        if header != self._header or self._rows_since_header == HEADER_EVERY:
            self.rich.print(Text("\n" + header, "dim"))
            logger.info(header)
            self._header, self._rows_since_header = header, 0
        self._rows_since_header += 1


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


class _WarningHandler(logging.Handler):
    """Shows the messages of log records on a console, without tracebacks, which only the log file has."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        style = "bold red" if record.levelno >= logging.ERROR else "bold yellow"
        self._console.block(Text.assemble((f"{record.levelname.lower()}: ", style), record.getMessage()))


def _first(metrics: Mapping[str, float], names: Sequence[str]) -> float | None:
    return next((metrics[name] for name in names if name in metrics), None)
