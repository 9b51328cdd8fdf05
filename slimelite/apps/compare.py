"""``slimelite compare``: a table of runs side by side, for a terminal or as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slimelite.apps.comparison import LAST, Facts, comparison
from slimelite.apps.runs import read_runs
from slimelite.tracking.phases import duration
from slimelite.tracking.report import one_line

Row = tuple[str, list[str]]  # what it is, and its text for each run


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Raises:
        ValueError: a run cannot be read.
    """
    parser = argparse.ArgumentParser(
        prog="slimelite compare",
        description="Compare runs: flags that differ, scores with standard errors and a paired test against the first "
        "run, rewards, tokens, seconds and hours.",
        epilog="example: slimelite compare runs/lr-1e-6 runs/lr-1e-5",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder; the others are tested against the first")
    parser.add_argument("--json", action="store_true", help="every number as JSON")
    args = parser.parse_args(argv)
    facts = comparison(read_runs(args.runs))
    if args.json:
        # JSON has no NaN and no infinity: they become null
        print(json.dumps(json.loads(json.dumps(facts), parse_constant=lambda _: None), indent=1))
    else:
        show(facts)
    return 0


def show(facts: Facts) -> None:
    """Print the table of `comparison`."""
    print_table([run["name"] for run in facts["runs"]], _blocks(facts), [_footnote(facts)])


def print_table(names: Sequence[str], blocks: Iterable[Iterable[Row]], notes: Sequence[str]) -> None:
    """Print rows with a column for each of ``names``, and notes below; blocks stand apart.

    The table is as wide as the terminal, or as wide as it needs to be where there is none.
    """
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 10**4
    table = Table(box=box.SIMPLE, show_edge=False)
    table.add_column("", overflow="fold", min_width=26)
    for name in names:
        table.add_column(Text(name), overflow="fold")
    for rows in blocks:
        table.add_section()
        for title, cells in rows:
            table.add_row(Text(title, "bold"), *map(Text, cells))
    console.print(table)
    for note in notes:
        console.print(Text(note, "dim"))


def _footnote(facts: Facts) -> str:
    if not any(run["evals"] for run in facts["runs"]):
        return ""
    after = "after: the rollout that the evaluation followed, with start for none"
    return f"±: standard error. {after}. p: {facts['test']}."


def _blocks(facts: Facts) -> Iterator[list[Row]]:
    """The rows in blocks that belong together; rows without any value are left out."""
    runs = facts["runs"]
    yield [(name, [_plain(value) for value in values]) for name, values in facts["flags"].items()]
    how = {"status": _status, "rollouts": _rollouts, "alarms": _alarms}
    yield _filled([(title, [text(run) for run in runs]) for title, text in how.items()])
    yield _filled(list(_scores(runs)))
    yield _filled([(title, [_shown(run, key, text) for run in runs]) for title, key, text in NUMBERS])
    phases = dict.fromkeys(phase for run in runs for phase in run["seconds"])
    seconds = [(f"  of that {phase}", [_shown(run["seconds"], phase, duration) for run in runs]) for phase in phases]
    yield _filled([("time", [_shown(run, "wall_seconds", duration) for run in runs]), *seconds])
    hours = [("CPU-hours", "cpu_hours"), ("GPU-hours", "gpu_hours")]
    yield _filled([(title, [_shown(run, key, "{:.3g}".format) for run in runs]) for title, key in hours])


NUMBERS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    (f"reward, mean of the last {LAST} rollouts", "reward", "{:.3f}".format),
    ("tokens generated", "tokens_generated", "{:,.0f}".format),
    ("tokens trained, with prompts", "tokens_trained", "{:,.0f}".format),
)


def _filled(rows: list[Row]) -> list[Row]:
    return [(title, cells) for title, cells in rows if any(cells)]


def _scores(runs: Sequence[Facts]) -> Iterator[Row]:
    for name in dict.fromkeys(name for run in runs for name in run["evals"]):
        of_runs = [run["evals"].get(name, {}) for run in runs]
        for which in ("best", "last"):
            yield f"{name}, {which}", [_score(scores[which]) if scores else "" for scores in of_runs]
        tests = [test_text(scores["against_first"]) if "against_first" in scores else "" for scores in of_runs]
        yield f"{name}, last − last of {runs[0]['name']}", tests


def _score(score: Facts) -> str:
    after = "start" if score["at"] < 0 else score["at"]
    return f"{score_text(score['value'], score['standard_error'])} after {after}"


def score_text(value: float, standard_error: float | None) -> str:
    """``0.412 ±0.014``."""
    return f"{value:.3f}{_error(standard_error)}"


def test_text(test: Facts) -> str:
    """``+0.013 ±0.004, p 0.012, 500 prompts``, or why it is unknown."""
    if "why_not" in test:
        return f"unknown: {test['why_not']}"
    prompts = f"{test['prompts']:,}" + (f" of {test['of_prompts']:,}" if test["prompts"] < test["of_prompts"] else "")
    return f"{test['difference']:+.3f}{_error(test['standard_error'])}, p {test['p']:.2g}, {prompts} prompts"


def _error(standard_error: float | None) -> str:
    return "" if standard_error is None else f" ±{standard_error:.3f}"


def _status(run: Facts) -> str:
    status = run["status"] or ""
    return status if status in ("", "finished", "running") else one_line(f"{status}: {run['message']}")[:80]


def _rollouts(run: Facts) -> str:
    of = f" of {run['of_rollouts']}" if run["of_rollouts"] not in (None, run["rollouts"]) else ""
    return f"{run['rollouts']}{of}"


def _alarms(run: Facts) -> str:
    """Such as ``stall in 3, mismatch since 12``, with the rollout each began."""
    when = {True: "since", False: "in"}
    return ", ".join(f"{each['kind']} {when[each['ended'] is None]} {each['rollout_id']}" for each in run["alarms"])


def _shown(values: Facts, key: str, text: Callable[[float], str]) -> str:
    return "" if values[key] is None else text(values[key])


def _plain(value: object) -> str:
    """A flag's value as one writes it; "-" for none."""
    return "-" if value is None else one_line(value) if isinstance(value, str) else json.dumps(value)
