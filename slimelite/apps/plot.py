"""``slimelite plot``: the curves of runs as a PNG."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from slimelite.apps.runs import Run, read_runs, same_notes, short_names
from slimelite.tracking.plot import BANDS, draw_run, draw_runs

MANY = "draw this metric; may be given several times. With more than four runs, each metric gets its own panel"
EXAMPLES = """examples:
  slimelite plot runs/a runs/b -o curves.png                     a line for each run
  slimelite plot --band "10 seeds" runs/seed-* -o curves.png     the median, with a band from minimum to maximum
  slimelite plot --band mean-se --band a runs/a-* --band b runs/b-*   two groups: mean ± standard error
  slimelite plot runs/a --metric eval/gsm8k --metric train/loss  two panels
"""


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Raises:
        ValueError: a run cannot be read, or has nothing to draw.
    """
    parser = argparse.ArgumentParser(
        prog="slimelite plot",
        description="Draw the curves of runs as a PNG.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run folders; each run is one line")
    parser.add_argument(
        "--band",
        nargs="+",
        action="append",
        default=[],
        metavar=("NAME", "RUN"),
        help="several runs under one name, drawn as their median with a band from minimum to maximum. To choose "
        "how all bands are drawn, give --band once more with only one word: mean-se (mean ± standard error), minmax "
        "(median and extremes) or quantiles (median and quartiles)",
    )
    parser.add_argument("--metric", action="append", default=[], help=MANY)
    parser.add_argument("-o", "--out", default="curves.png", metavar="FILE", help="PNG to write (default: %(default)s)")
    args = parser.parse_args(argv)
    kinds = [name for name, *folders in args.band if name in BANDS and not folders]
    if wrong := next((name for name, *folders in args.band if name in BANDS and folders), None):
        parser.error(
            f"--band {wrong} chooses the kind of bands and takes no run folders: write --band {wrong} --band NAME "
            "RUN..."
        )
    args.band = [words for words in args.band if words[1:] or words[0] not in BANDS]
    if len(kinds) > 1:
        parser.error(f"--band {kinds[0]} and --band {kinds[1]}: choose one kind of band")
    if not args.runs and not args.band:
        parser.error("name a run folder, or --band NAME RUN...")
    if alone := [name for name, *folders in args.band if not folders]:
        parser.error(f"--band {alone[0]}: add run folders, or name a kind of band ({', '.join(BANDS)})")
    if twice := {name for name, *_ in args.band if [other for other, *_ in args.band].count(name) > 1}:
        parser.error(f"--band {min(twice)} is given twice: name all its runs after one --band")
    if len(args.runs) == 1 and not args.band and not args.metric:
        run = Run.read(args.runs[0])
        if not run.series:
            raise ValueError(f"{run.folder} has nothing to draw: it has no metrics yet")
        draw_run(run.records, args.out)
    else:
        single, bands = read_runs(args.runs), {name: read_runs(folders) for name, *folders in args.band}
        runs = {run.name: [run.records] for run in single}
        runs |= {name: [run.records for run in of_band] for name, of_band in bands.items()}
        draw_runs(runs, args.out, args.metric, *kinds)
        # a run may be drawn alone and within a band
        places = {run.folder.resolve(): run for run in chain(single, *bands.values())}
        named = [replace(run, name=name) for run, name in zip(places.values(), short_names(places), strict=True)]
        for note in same_notes(named):
            print(f"slimelite plot: {note}", file=sys.stderr)
    print(args.out)
    return 0
