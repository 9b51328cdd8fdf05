"""The figures of runs as one small table for docs/: python scripts/figures/figures.py runs/a runs/b > docs/figures.csv

There is a row for every evaluation of a run, or for every rollout if there are no evaluations. It has the number of
trained rollouts, the scores, the mean reward and response length of the last rollout before it, and the CPU-seconds so
far.
"""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path

from slimelite.base.version import answer_version
from slimelite.tracking.metrics_file import Record, eval_metrics, read_metrics

MEASURED = ("rollout/raw_reward", "rollout/response_len/mean", "train/loss", "perf/cpu_seconds")


def rows(run: str, records: list[Record]) -> list[dict[str, float | str]]:
    """The table's rows of one run, from its records."""
    scores, seen, found = eval_metrics(records), dict[str, float](), list[dict[str, float | str]]()
    kind, axis = ("eval", "eval/step") if scores else ("perf", "rollout/step")
    for record in records:
        seen |= {name: record[name] for name in MEASURED if name in record}
        if record["kind"] != kind:
            continue
        done = record[axis] + 1
        row = {"run": run, "rollouts": done, **{name: record[name] for name in scores if name in record}, **seen}
        if found and found[-1]["rollouts"] == done:
            found[-1] |= row
        else:
            found.append(row)
    return found


def main(runs: list[str]) -> None:
    """Print the table of ``runs``. Each name is the part of the path that differs from the others."""
    shared = os.path.commonpath(runs) if len(runs) > 1 else str(Path(runs[0]).parent)
    table = [row for run in runs for row in rows(os.path.relpath(run, shared), read_metrics(run))]
    columns = list(dict.fromkeys(name for row in table for name in row))
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(columns)
    for row in table:
        writer.writerow([f"{v:.6g}" if isinstance(v := row.get(name, ""), float) else v for name in columns])


if __name__ == "__main__":
    answer_version()
    main(sys.argv[1:])
