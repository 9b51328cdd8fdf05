"""``slimelite view``: one HTML file that shows runs. The file contains its data, styles and scripts, and needs no
network."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import slimelite
from slimelite.apps.compare import wall_seconds
from slimelite.apps.html import document
from slimelite.apps.runs import Run, Series, differing_flags, flag_names, read_runs
from slimelite.apps.view_samples import BUDGET, samples
from slimelite.base.files import write_text
from slimelite.tracking.metrics_file import DEFAULT_AXIS
from slimelite.tracking.panels import GROUPS, unit

# the scripts of the page, in slimelite/apps/page/view, in the order of their tabs
SAMPLES = tuple(f"samples{part}.js" for part in ("_data", "_text", "_tokens", "_episode", "_sample", "_rows", ""))
SCRIPTS = ("core.js", "chart.js", "overview.js", "curves.js", *SAMPLES, "agents.js", "time.js", "flags.js")
STYLES = ("page.css", "charts.css", "samples.css")
COLORS = 8  # number of run colours in page.css; each has a light and a dark version
FOLLOW_EVERY = 10  # least time between two reads of a run that is still running [s]

EXAMPLES = """examples:
  slimelite view runs/a                       writes runs/a/view.html
  slimelite view runs/a runs/b -o two.html    both runs in the same panels
  slimelite view runs/a --follow              writes the file again while the run continues
"""


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Raises:
        ValueError: a run cannot be read.
    """
    parser = argparse.ArgumentParser(
        prog="slimelite view",
        description="Write one HTML file that shows runs: curves, samples, times, flags. It opens without a server.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder")
    parser.add_argument(
        "-o", "--out", metavar="FILE", help="file to write (default: view.html in the first run folder)"
    )
    parser.add_argument(
        "--follow", action="store_true", help=f"write the file again every {FOLLOW_EVERY} s until the runs end"
    )
    args = parser.parse_args(argv)
    out = Path(args.out or Path(args.runs[0]) / "view.html")
    with suppress(KeyboardInterrupt):
        runs = read_runs(args.runs)
        began = time.monotonic()
        unread = write_page(runs, out, live=args.follow)
        print(out)
        if not args.follow:  # a run that is still running may remove a file while it is read
            for note in unread:
                print(f"slimelite view: {note}", file=sys.stderr)
        took = time.monotonic() - began
        while args.follow and any(run.status.get("status") == "running" for run in runs):
            # the run itself may need the processor, so writing takes at most a twentieth of one core
            time.sleep(max(FOLLOW_EVERY, 20 * took))
            fresh = read_runs(args.runs)
            ended = all(run.status.get("status") != "running" for run in fresh)
            if ended or [len(run.records) for run in fresh] != [len(run.records) for run in runs]:
                write_page(fresh, out, live=not ended)
            runs = fresh
    return 0


def write_page(runs: Sequence[Run], out: Path, *, live: bool = False) -> list[str]:
    """Write the page about ``runs``, completely or not at all. ``live``: whether the page offers to reload itself.

    Returns a line for each file of samples that could not be read. The page shows these lines too.
    """
    data: dict[str, Any] = {
        "slimelite": slimelite.__version__,
        "written": time.time(),
        "live": FOLLOW_EVERY if live else 0,
        "flags": flag_names(runs),
        "differing": list(differing_flags(runs)),
        "groups": {title: [panel._asdict() for panel in panels] for title, panels in GROUPS.items()},
        "units": {name: unit(name) for run in runs for name in run.series},
        "runs": [_run(run, _color(i), BUDGET // len(runs)) for i, run in enumerate(runs)],
    }
    # an escaped "<" cannot begin a tag, so no text in the data can end the script element
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    folder = files("slimelite.apps") / "page" / "view"
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, document([folder / name for name in SCRIPTS], [folder / name for name in STYLES], text))
    return [note for run in data["runs"] for note in run["samples"]["notes"] if "could not be read: " in note]


def _color(i: int) -> str:
    """The colour of run ``i`` in CSS. After the colours of page.css come lighter colours. Their hues are a
    golden angle apart."""
    hue = (95 + i * 137.508) % 360
    return f"var(--run-{i})" if i < COLORS else f"light-dark(oklch(0.68 0.15 {hue:.0f}), oklch(0.88 0.1 {hue:.0f}))"


def _run(run: Run, color: str, budget: int) -> dict[str, object]:
    """The page's data about a run. ``series``: metric -> [index into ``axes``, values]. ``budget``: bytes for
    samples."""
    axes: dict[tuple[float, ...], int] = {}
    placed = _in_rollouts(run)
    series = {name: [axes.setdefault(tuple(x.tolist()), len(axes)), _numbers(y)] for name, (x, y) in placed.items()}
    return {
        "name": run.name,
        "folder": str(run.folder),
        "color": color,
        "unit": run.unit,
        "status": run.status,
        "seconds": wall_seconds(run),
        "versions": run.versions,
        # NaN and Infinity are not valid JSON, although Python writes and reads them
        "config": json.loads(json.dumps(run.config), parse_constant=str),
        "derivations": run.derivations,
        "scores": run.scores,
        "alarms": run.alarms,
        "axes": [_numbers(np.array(x)) for x in axes],
        "series": series,
        "samples": samples(run, budget),
    }


def _in_rollouts(run: Run) -> dict[str, Series]:
    """The series of a run with the rollout as x. Optimizer step i of the n steps of rollout r is at r + i / n."""
    of_step = {r["train/step"]: r[DEFAULT_AXIS] for r in run.records if "train/step" in r}
    steps = sorted(of_step)
    starts = [i for i, step in enumerate(steps) if i == 0 or of_step[step] != of_step[steps[i - 1]]]
    place = {
        steps[i]: of_step[steps[i]] + (i - first) / (after - first)
        for first, after in pairwise([*starts, len(steps)])
        for i in range(first, after)
    }
    by_rollout = {}
    for name, (x, y) in run.series.items():
        by_rollout[name] = (np.array([place[step] for step in x]), y) if name.startswith("train/") else (x, y)
    return by_rollout


def _numbers(values: np.ndarray) -> list[float | str]:
    """Each number with six digits. NaN and infinities, which JSON lacks, become strings, as in metrics.jsonl."""
    numbers: list[float | str] = []
    for value in values.tolist():
        short = float(f"{value:.6g}")
        if short.is_integer() and abs(short) < 1e6:
            numbers.append(int(short))
        elif np.isfinite(short):
            numbers.append(short)
        else:
            numbers.append("NaN" if np.isnan(short) else "Infinity" if short > 0 else "-Infinity")
    return numbers
