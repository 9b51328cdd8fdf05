"""Write the table of faults in docs/reliability.md from what the tests of deaths and hangs have seen.

    SLIMELITE_FAULTS=faults.jsonl python -m pytest -m chaos
    SLIMELITE_FAULTS=faults.jsonl python -m pytest -m "chaos and slow"
    python scripts/dev/fault_table.py faults.jsonl

Each test appends a line to the file. The last line of a test counts, and the script stops if that test has failed. Rows
of the page about faults that are not in the file stay as they are.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from slimelite.base.version import answer_version  # noqa: E402

PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- faults -->", "<!-- end of faults -->"
HEAD = ["| fault | what happens | seconds | test | seen on |", "|---|---|---|---|---|"]


def row(line: dict[str, str]) -> str:
    """A row of the table."""
    test = f"`{line['test']}`" + ", slow" * bool(line["slow"])
    return f"| {line['fault']} | {line['happens']} | {line['seconds']} | {test} | {line['date']} |"


def main() -> None:
    """The command line."""
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        sys.exit("write the file of SLIMELITE_FAULTS: python scripts/dev/fault_table.py faults.jsonl")
    lines = [json.loads(text) for text in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()]
    newest = {line["id"]: line for line in lines}
    if failed := [name for name, line in newest.items() if not line["passed"]]:
        sys.exit(f"these tests failed: {', '.join(failed)}")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    table, _, after = rest.partition(END)
    old = {text.split(" | ")[0].removeprefix("| "): text for text in table.strip().splitlines()[2:]}
    rows = old | {line["fault"]: row(line) for line in newest.values()}
    text = "\n".join([BEGIN, "", *HEAD, *rows.values(), "", END])
    PAGE.write_text(before + text + after, encoding="utf-8")


if __name__ == "__main__":
    answer_version()
    main()
