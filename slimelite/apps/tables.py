"""Tables of runs in a terminal, for `slimelite compare` and `slimelite eval`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slimelite.tracking.console import one_line

Row = tuple[str, list[str]]  # a title, and a text for each run


def print_table(names: Sequence[str], blocks: Iterable[Iterable[Row]], notes: Sequence[str]) -> None:
    """Print rows with a column for each of ``names``, and the notes below the table. An empty line separates blocks.

    The table fits the width of the terminal. If the output is not a terminal, the width of the table is not limited.
    """
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 10**4
    table = Table(box=box.SIMPLE, show_edge=False)
    table.add_column("", overflow="fold", min_width=26)
    for name in names:
        table.add_column(Text(name), overflow="fold")
    for rows in blocks:
        table.add_section()
        for title, cells in rows:
            table.add_row(Text(title, "bold"), *map(Text, cells))
    console.print(table)
    for note in notes:
        console.print(Text(note, "dim"))


def score_text(value: float, standard_error: float | None) -> str:
    """``0.412 ±0.014``."""
    return f"{value:.3f}{plus_minus(standard_error)}"


def plus_minus(standard_error: float | None) -> str:
    """`` ±0.014``, or "" without a standard error."""
    return "" if standard_error is None else f" ±{standard_error:.3f}"


def plain(value: object) -> str:
    """A flag's value as a user would write it; "-" for None."""
    return "-" if value is None else one_line(value) if isinstance(value, str) else json.dumps(value)
