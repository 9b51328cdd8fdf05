"""The alarms of the runs of scripts/lab/planted_faults.sh.

    python scripts/lab/planted_faults_table.py FAULTS [HEALTHY]

``FAULTS`` has a folder NAME/grpo for each fault. ``HEALTHY`` has the folders grpo/seed-N of quickstart_seeds.sh. The
exit status is 1 if a fault lacks its alarm, a healthy run has one, or the alarms in a run's alarms.jsonl differ from
those found in its metrics. ``--csv FILE`` writes the values that the alarms read of every run, for
tests/tracking/test_alarms.py.
"""

from __future__ import annotations

import argparse
import csv
import json
from dataclasses import asdict
from pathlib import Path

from slimelite.base.version import add_version
from slimelite.tracking.alarms import Alarm, replay
from slimelite.tracking.history import EQUAL, METRICS
from slimelite.tracking.metrics_file import Record, eval_metrics, read_metrics

COUNTS = (
    "rollout/submitted_groups",
    "rollout/dropped_groups",
    "rollout/weight_staleness/mean",
    "rollout/engine_deaths",
)
EXPECTED = {
    "length": "reward_without_eval",
    "label": "all_wrong",
    "lr": "reward_collapse",
    "filter": "filtered",
    "stale": "stale",
}


def written(run: Path) -> list[Alarm]:
    """The alarms that the run wrote."""
    path = run / "alarms.jsonl"
    return [Alarm(**json.loads(line)) for line in path.read_text().splitlines()] if path.is_file() else []


def facts(run: str, records: list[Record]) -> list[dict[str, float | str]]:
    """A row for each rollout, and for the evaluation before them, with the values that alarms read, except times."""
    read = {*METRICS.values(), *eval_metrics(records), "rollout/zero_variance_groups", "rollout/step"} - {"", *COUNTS}
    rows: list[dict[str, float | str]] = [{}]
    for record in records:
        if record["kind"] == "rollout" or (record["kind"] == "eval" and len(rows) == 1):
            rows.append({"run": run})
        rows[-1] |= {n: v for n, v in record.items() if n in read or n.startswith(EQUAL)}
        rows[-1] |= {n: v for n, v in record.items() if n in COUNTS and v}
    return rows[1:]


def main() -> int:
    """Print the table. Returns the exit status."""
    parser = argparse.ArgumentParser()
    add_version(parser)
    parser.add_argument("faults", type=Path)
    parser.add_argument("healthy", type=Path, nargs="?")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    wrong, rows = [], list[dict[str, float | str]]()
    print("| fault | alarms, each with the rollout it began | what the first one says |")
    print("|---|---|---|")
    for fault, kind in EXPECTED.items():
        run = options.faults / fault / "grpo"
        records = read_metrics(run)
        alarms = replay(records)
        rows += facts(fault, records)
        if kind not in {alarm.kind for alarm in alarms}:
            wrong.append(f"{fault}: no alarm {kind}")
        if list(map(asdict, alarms)) != list(map(asdict, written(run))):
            wrong.append(f"{fault}: alarms.jsonl differs from the metrics")
        names = ", ".join(f"`{alarm.kind}` {alarm.rollout_id}" for alarm in alarms)
        print(f"| {fault} | {names} | {alarms[0].says.replace('|', chr(92) + '|') if alarms else ''} |")
    healthy = sorted((options.healthy / "grpo").glob("seed-*")) if options.healthy else []
    for run in healthy:
        records = read_metrics(run)
        rows += facts(run.name, records)
        wrong += [f"{run.name}: {alarm.kind} in rollout {alarm.rollout_id}: {alarm.says}" for alarm in replay(records)]
    print(f"\n{len(healthy)} healthy runs were checked" if healthy else "\nno healthy runs were found")
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(n for row in rows for n in row)), lineterminator="\n")
            writer.writeheader()
            writer.writerows({n: f"{v:.3g}" if isinstance(v, float) else v for n, v in row.items()} for row in rows)
    print("\n".join(wrong) or "every fault was found, and nothing else")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
