"""Name what became slower between two reports of `run.py` by more than the noise. Exit with status 1 if anything did.

    python scripts/benchmarks/compare.py docs/benchmarks/0.1.0.json now.json

Answers are compared. Most of them are ratios to a rival or a limit of the same run, because seconds of two days cannot
be compared. The noise of an answer is the sum of both spreads, but at least ``--least`` (5 %) of the old median. A
spread is half the distance between the lowest and the highest round. A missing answer counts as slower. A new answer is
named.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from slimelite.base.version import add_version

Key = tuple[str, str]


def answers(report: dict[str, Any]) -> dict[Key, dict[str, Any]]:
    """(question, title) to the answer."""
    return {(name, a["title"]): a for name, entry in report["questions"].items() for a in entry["answers"]}


def compare(old: dict[str, Any], new: dict[str, Any], least: float = 0.05) -> tuple[list[str], list[str]]:
    """The answers that became slower, and those that became faster, one line each."""
    before, after = answers(old), answers(new)
    slower, faster = [], []
    for key, a in before.items():
        name = f"{key[0]}: {key[1]}"
        b = after.get(key)
        if b is None:
            if key[0] in new["questions"]:
                slower.append(f"{name}: was {a['median']:.4g}, and has no figure now")
            continue
        noise = max((a["high"] - a["low"]) / 2 + (b["high"] - b["low"]) / 2, least * abs(a["median"]))
        gain = b["median"] - a["median"] if a["higher_is_better"] else a["median"] - b["median"]
        line = f"{name}: {a['median']:.4g} to {b['median']:.4g} (noise {noise:.2g})"
        if gain < -noise:
            slower.append(line)
        elif gain > noise:
            faster.append(line)
    return slower, faster


def main() -> int:
    """Compare two files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_version(parser)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--least", type=float, default=0.05, help="changes below this share are noise (default: 0.05)")
    given = parser.parse_args()
    old, new = (json.loads(path.read_text()) for path in (given.old, given.new))
    slower, faster = compare(old, new, given.least)
    for title, lines in (("faster", faster), ("slower", slower)):
        print(f"{title}: {len(lines)}", *(f"  {line}" for line in lines), sep="\n")
    left = old["questions"].keys() - new["questions"].keys()
    if left:
        print(f"not measured again: {', '.join(sorted(left))}")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
