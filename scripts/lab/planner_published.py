"""Seconds of published GRPO steps and of their plans, as in docs/planner.md.

python scripts/lab/planner_published.py
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from slimelite.arguments import make_args
from slimelite.base.version import answer_version
from slimelite.plan.devices import this_machine
from slimelite.plan.run import Plan

ROOT = Path(__file__).resolve().parents[2]
ROWS: dict[str, Any] = tomllib.loads((ROOT / "tests" / "plan" / "published.toml").read_text())
COMMON = (
    "--colocate --tokenizer t --prompt-data p --num-rollout 9 --dry-run --rollout-backend sglang "
    "--use-dynamic-batch-size --max-tokens-per-gpu 16384 --no-share-prefixes"
)


def planned(row: dict[str, Any]) -> dict[str, float]:
    """Seconds of each phase of a row, planned from its flags."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(row["model"]))
        args = make_args([*shlex.split(f"{COMMON} {row['flags']}"), "--hf-checkpoint", folder])
        plan = Plan.of(args, this_machine(args.plan_gpu))
    assert isinstance(plan, Plan)
    longest = plan.work.response
    return replace(plan, work=replace(plan.work, response=row["mean"], longest=longest)).seconds()


def beside(known: float | None) -> str:
    """A published value, shown after the planned one."""
    return "" if known is None else f" ({known:.1f})"


def table() -> Iterator[str]:
    """The lines of the table."""
    yield "| step | used | published s | planned s | ratio | planned (published) seconds of the phases | source |"
    yield "|---|---|---:|---:|---:|---|---|"
    for row in ROWS.values():
        found, known = planned(row), row.get("phases", {})
        parts = ", ".join(f"{name} {value:.1f}{beside(known.get(name))}" for name, value in found.items())
        total, used = sum(found.values()), "fitted" if row.get("fitted") else "held out"
        cells = (f"{row['seconds']:.1f}", f"{total:.1f}", f"{total / row['seconds']:.2f}", parts, row["source"])
        yield f"| {row['title']} | {used} | {' | '.join(cells)} |"


if __name__ == "__main__":
    answer_version()
    print("\n".join(table()))
