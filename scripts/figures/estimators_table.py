"""The table of estimators and their curves from the metrics that scripts/lab/estimators.sh collected.

python scripts/figures/estimators_table.py runs/estimators-table docs/estimators/curves.png
"""

from __future__ import annotations

import sys
from pathlib import Path

from slimelite.apps.plot import main as plot
from slimelite.base.version import answer_version
from slimelite.tracking.metrics_file import read_metrics

GOOD = 0.90  # greedy accuracy that counts as having learnt the task


def main(folder: Path, curves: Path) -> None:
    """Print the table of the runs in ``folder``; draw ``curves``."""
    print(f"| estimator | before | 10 rollouts | 40 rollouts, each seed | rollouts to {GOOD} | CPU-seconds |")
    print("|---|---|---|---|---|---|")
    bands: list[str] = []
    for estimator in sorted(path for path in folder.iterdir() if path.is_dir()):
        runs = sorted(estimator.glob("seed-*"))
        scores = [
            {int(r["eval/step"]) + 1: r["eval/heldout"] for r in read_metrics(run) if "eval/heldout" in r}
            for run in runs
        ]
        spent = [max(r["perf/cpu_seconds"] for r in read_metrics(run) if "perf/cpu_seconds" in r) for run in runs]
        reached = [next((str(step) for step, score in of.items() if score >= GOOD), "never") for of in scores]
        first, ten = (" ".join(f"{of[step]:.2f}" for of in scores) for step in (0, 10))
        last = " ".join(f"{of[max(of)]:.3f}" for of in scores)
        seconds = " ".join(f"{value:.0f}" for value in spent)
        print(f"| {estimator.name} | {first} | {ten} | {last} | {' '.join(reached)} | {seconds} |")
        bands += ["--band", estimator.name, *map(str, runs)]
    plot([*bands, "--metric", "rollout/raw_reward", "--out", str(curves)])


if __name__ == "__main__":
    answer_version()
    main(*map(Path, sys.argv[1:3]))
