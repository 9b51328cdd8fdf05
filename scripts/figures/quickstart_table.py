"""The ten-seed table and curves from the metrics that scripts/lab/quickstart_seeds.sh collected.

python scripts/figures/quickstart_table.py runs/quickstart-seeds docs/quickstart/curves.png
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

from slimelite.apps.plot import main as plot
from slimelite.base.version import answer_version
from slimelite.tracking.metrics_file import read_metrics

RUN = 40  # rollouts of the quickstart; the seeds run twice that
TARGET_START, TARGET, TARGET_DROP = 0.40, 0.90, 0.03


def cpu_seconds(run: Path, rollouts: int | None = None) -> float:
    """CPU-seconds of all processes of a run, to its end or to the end of ``rollouts`` rollouts."""
    spent = [r["perf/cpu_seconds"] for r in read_metrics(run) if "perf/cpu_seconds" in r]
    return spent[-1 if rollouts is None else rollouts - 1]


def evaluations(run: Path) -> dict[int, float]:
    """Rollouts trained -> greedy accuracy on the held-out prompts."""
    return {int(r["eval/step"]) + 1: r["eval/heldout"] for r in read_metrics(run) if "eval/heldout" in r}


def main(folder: Path, curves: Path) -> None:
    """Print the table of the runs in ``folder``; draw ``curves``."""
    runs = sorted((folder / "grpo").glob("seed-*"), key=lambda run: int(run.name.split("-")[1]))
    print("| seed | SFT model | 10 rollouts | 40 rollouts | best to 80 | 80 rollouts | met | CPU-seconds to 40 |")
    print("|---|---|---|---|---|---|---|---|")
    rows, met, seconds = [], 0, []
    for run in runs:
        scores = evaluations(run)
        last = max(scores)
        best = max(score for step, score in scores.items() if step)
        ok = scores[0] <= TARGET_START and scores[RUN] >= TARGET and best - scores[last] <= TARGET_DROP
        met += ok
        seconds.append(cpu_seconds(folder / "sft" / run.name) + cpu_seconds(run, RUN))
        row = [scores[0], scores[10], scores[RUN], best, scores[last]]
        rows.append(row)
        cells = " | ".join(f"{value:.3f}" for value in row)
        print(f"| {run.name.split('-')[1]} | {cells} | {'yes' if ok else 'no'} | {seconds[-1]:.0f} |")
    middle = " | ".join(f"{median(column):.3f}" for column in zip(*rows, strict=True))
    print(f"| median | {middle} | {met} of {len(runs)} | {median(seconds):.0f} |")
    band = ["--band", f"{len(runs)} seeds", *map(str, runs)]
    shown = ["eval/heldout", "rollout/raw_reward", "rollout/response_len/mean", "train/entropy_loss"]
    plot([*band, *(word for name in shown for word in ("--metric", name)), "--out", str(curves)])


if __name__ == "__main__":
    answer_version()
    main(*map(Path, sys.argv[1:3]))
