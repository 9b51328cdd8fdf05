"""The results of the stages of `speedrun-cpu.sh`, compared with their aims: RUN/results.md.

    python scripts/speedrun_results.py runs/speedrun-full/seed-0 --data data/speedrun-full

The exit status is 1 if a stage missed its aim.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from slimelite.apps.runs import Run
from slimelite.base.version import add_version
from slimelite.samples.sample import Status
from slimelite.samples.table import SampleTable

sys.path.insert(0, str(Path(__file__).resolve().parent))
from offline_texts import baselines

CHANCE = 0.25
# of a whole reply, before the token that ends it
FORM = {
    "questions": re.compile(r".+\n(.+\n)?.+ -> [A-D]\nAnswer: [A-D]"),
    "sums": re.compile(r"(\d+\+\d+=\d+[ \n])*#### \d+"),
}
END = "<|im_end|>"
SFT_FORM, ERRORS, RL_GAIN = 0.95, 3, 0.3

Line = tuple[str, str, str]  # what was measured, the value, what it has to be


def base(run: Run, data: Path) -> Iterator[tuple[Line, bool]]:
    """Lines about the base model, and whether each reaches its aim."""
    own = run.series["eval/bpb"][1][-1]
    yield ("base: bits per byte of the held-out packages", f"{own:.3f}", ""), True
    for number, (name, value) in enumerate(baselines(data).items()):
        needed = number < 3
        yield (f"  {name}", f"{value:.3f}", "above the base model's" if needed else ""), own < value or not needed


def answers(run: Run) -> Iterator[tuple[Line, bool]]:
    """Lines about the evaluations before and after RL."""
    for name, form in FORM.items():
        files = sorted(run.evals[name].items())
        scores, errors = (run.series[f"eval/{name}{kind}"][1] for kind in ("", "-stderr"))
        shares = [formed(SampleTable.from_parquet(file), form) for _, file in files]
        text = f"sft: {name} well-formed"
        yield (text, f"{shares[0]:.1%}", f"at least {SFT_FORM:.0%}"), shares[0] >= SFT_FORM
        values = [f"{score:.3f} ± {error:.3f}" for score, error in zip(scores, errors, strict=True)]
        if name == "questions":
            least = CHANCE + ERRORS * errors[0]
            yield (f"sft: {name} right", values[0], f"above {least:.3f}: chance and 3 errors"), scores[0] > least
            yield (f"rl: {name} right", values[-1], ""), True
        else:
            yield (f"sft: {name} right", values[0], ""), True
            gain = scores[-1] - scores[0]
            yield (f"rl: {name} right", values[-1], f"up by at least {RL_GAIN}"), gain >= RL_GAIN
        yield (f"rl: {name} well-formed", f"{shares[-1]:.1%}", ""), True


def formed(table: SampleTable, form: re.Pattern[str]) -> float:
    """The share of responses that ended by themselves and have the right form."""
    ended = [status == Status.COMPLETED for status in table.status]
    good = [end and form.fullmatch(text.removesuffix(END)) for end, text in zip(ended, table.response, strict=True)]
    return sum(map(bool, good)) / max(len(good), 1)


def main() -> int:
    """The program of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_version(parser)
    parser.add_argument("run", type=Path, help="the --run-dir of the stages")
    parser.add_argument("--data", type=Path, required=True, help="the folder of the texts")
    parser.add_argument("--only-print", action="store_true", help="end with status 0 even if an aim was missed")
    args = parser.parse_args()
    found = [*base(Run.read(args.run / "0-base"), args.data), *answers(Run.read(args.run / "2-rl"))]
    lines = ["| | measured | has to be | |", "|---|---:|---|---|"]
    lines += [f"| {' | '.join(line)} | {'' if good else 'missed'} |" for line, good in found]
    page = "\n".join(lines)
    (args.run / "results.md").write_text(page + "\n")
    print(page)
    return 0 if args.only_print or all(good for _, good in found) else 1


if __name__ == "__main__":
    sys.exit(main())
