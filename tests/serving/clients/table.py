"""The table of clients in docs/serving.md, from what the recordings say that each did.

``python -m tests.serving.clients.table`` writes it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "serving.md"
RECORDED = sorted((Path(__file__).parents[1] / "recorded").glob("*.json"))
BEGIN, END = "<!-- clients: scripts/test_clients.sh writes this table -->\n", "<!-- end of clients -->\n"


def recording(file: Path) -> dict[str, Any]:
    """What a client did, and its ``requests``."""
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def table() -> str:
    """The rows, in the order of the clients' names."""
    rows = "| client | version | what it does there | works | calls of the embedded engine | seen on |\n"
    rows += "|---|---|---|---|---|---|\n"
    for one in sorted(map(recording, RECORDED), key=lambda one: one["client"].lower()):
        works = f"but not: {one['not']}" if "not" in one else "yes"
        cells = [one["client"], one["version"], one["does"], works, str(one.get("embedded", "not run")), one["date"]]
        rows += f"| {' | '.join(cells)} |\n"
    return rows


def written() -> str:
    """The rows that the page has."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])
