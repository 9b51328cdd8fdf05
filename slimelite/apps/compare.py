"""``slimelite compare``: a table of runs side by side, for a terminal or as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from slimelite.apps.permutations import EXACT_SIGNS, SIGN_DRAWS, paired_test
from slimelite.apps.runs import LAST, Run, differing_flags, read_runs, same_notes
from slimelite.apps.tables import Row, plain, plus_minus, print_table, score_text
from slimelite.arguments.conditions import gpus_of
from slimelite.samples.sample import ROW, label_text
from slimelite.samples.table import SampleTable
from slimelite.tracking.console import MEASURES, PLURALS, duration, one_line, small
from slimelite.tracking.panels import LABELS

TEST = (
    f"two-sided sign-flip permutation test of the differences per prompt; exact for up to {EXACT_SIGNS} prompts that "
    f"differ, and from {SIGN_DRAWS:,} random sign patterns for more prompts"
)

Facts = dict[str, Any]


def comparison(runs: Sequence[Run]) -> Facts:
    """Everything that ``slimelite compare --json`` prints.

    ``flags``: name -> its value in each run, for flags that differ. ``test``: the meaning of the p-values. ``runs``: a
    dict for each run, with ``name``, ``folder``, ``status``, ``unit`` (see `Run.unit`), ``rollouts``, ``alarms``
    (see `Run.alarms`), ``evals``, ``reward``, ``loss``, ``accuracy``, ``margin``, ``tokens_generated``,
    ``tokens_trained``, ``seconds``, ``wall_seconds``, ``cpu_hours`` and ``gpu_hours``. A value that a run did not
    measure is None. ``evals``: dataset -> ``best`` and ``last``; from the second run on, also ``against_first``.
    ``same``: see `same_notes`.
    """
    summaries = [_facts(run) for run in runs]
    for run, facts in zip(runs[1:], summaries[1:], strict=True):
        for name, scores in facts["evals"].items():
            if name in summaries[0]["evals"]:
                scores["against_first"] = against(runs[0], run, name)
    return {"flags": differing_flags(runs), "test": TEST, "runs": summaries, "same": same_notes(runs)}


def against(first: Run, other: Run, dataset: str) -> Facts:
    """Compare the last evaluations of ``other`` and ``first`` prompt by prompt; see `Paired`.

    If the evaluations cannot be compared, the result has only ``why_not``.
    """
    scores = [_prompt_scores(run, dataset) for run in (first, other)]
    if missing := [run.name for run, rewards in zip((first, other), scores, strict=True) if not rewards]:
        return {"why_not": f"{missing[0]} has no saved answers of its last evaluation"}
    common = [key for key in scores[0] if key in scores[1]]
    if not common:
        return {"why_not": "the prompts are not the same"}
    differences = np.array([scores[1][key] - scores[0][key] for key in common])
    if not np.isfinite(differences).all():
        return {"why_not": "some rewards of answers are not numbers"}
    return paired_test(differences)._asdict() | {"of_prompts": max(map(len, scores))}


def _prompt_scores(run: Run, dataset: str) -> dict[tuple[str, str, int], float]:
    """Prompt -> the mean reward of its answers in the last evaluation; empty if the answers were not saved.

    A prompt is identified by its text, its label, and how many equal prompts come before it in the file. For a task,
    the number of the data row replaces the text: models with different chat templates get different texts for the
    same row.
    """
    path = run.evals.get(dataset.replace("/", "_"), {}).get(int(run.series[f"eval/{dataset}"][0][-1]))
    if path is None:
        return {}
    table = SampleTable.from_parquet(path)
    rows: dict[int, list[int]] = {}
    for row, group in enumerate(table.group_id.tolist()):
        rows.setdefault(group, []).append(row)
    means: dict[tuple[str, str, int], float] = {}
    seen: dict[tuple[str, str], int] = {}
    for _, of_prompt in sorted(rows.items()):
        first = of_prompt[0]
        question = json.loads(table.metadata[first] or "{}").get(ROW, table.prompt[first])
        prompt = (question, label_text(table.label[first]))
        means[*prompt, seen.get(prompt, 0)] = float(table.reward[of_prompt].mean())
        seen[prompt] = seen.get(prompt, 0) + 1
    return means


def _facts(run: Run) -> Facts:
    wall = wall_seconds(run)
    gpus = gpus_of(run.config)
    return {
        "name": run.name,
        "folder": str(run.folder),
        "status": run.status.get("status"),
        "message": run.status.get("message"),
        "unit": run.unit,
        "rollouts": len({r["rollout/step"] for r in run.records if r["kind"] == "perf"}),
        "of_rollouts": run.status.get("num_rollout"),
        "alarms": run.alarms,
        "evals": {name.removeprefix("eval/"): _best_and_last(run, name) for name in run.scores},
        **{title: run.last(run.measures[title]) if title in run.measures else None for title in MEASURES.values()},
        "tokens_generated": _total(run, "perf/generated_tokens"),
        "tokens_trained": _total(run, "perf/actor_train_tok_per_s", "perf/actor_train_time"),
        "seconds": {label: _total(run, f"perf/{phase}_time") for phase, label in LABELS.items()},
        "wall_seconds": wall,
        "cpu_hours": _cpu_hours(run),
        "gpu_hours": wall * gpus / 3600 if gpus else None,
    }


def _best_and_last(run: Run, name: str) -> Facts:
    """The ``best`` and ``last`` score of an eval dataset. Each of these scores has ``value``, ``standard_error``, and
    ``at``, the eval/step of its evaluation."""
    steps, values = run.series[name]
    errors = dict(zip(*run.series.get(f"{name}-stderr", ((), ())), strict=True))

    def at(index: int) -> Facts:
        step = steps[index]
        return {"value": float(values[index]), "standard_error": errors.get(step), "at": int(step)}

    # a score that is not a number is never the best
    return {"best": at(int(np.argmax(np.where(np.isnan(values), -np.inf, values)))), "last": at(-1)}


def _total(run: Run, *metrics: str) -> float | None:
    """The sum over all rollouts of a metric, or of the product of several metrics; None if the run lacks one of the
    metrics."""
    if not all(metric in run.series for metric in metrics):
        return None
    columns = [dict(zip(*run.series[metric], strict=True)) for metric in metrics]
    return float(sum(np.prod([column.get(step, 0.0) for column in columns]) for step in columns[0]))


def _segments(run: Run) -> list[list[Mapping[str, Any]]]:
    """The records of each process of the run: of the first process, and of each process that resumed the run."""
    segments: list[list[Mapping[str, Any]]] = [[]]
    for record in run.records:
        if record["kind"] == "start" and segments[-1]:
            segments.append([])
        segments[-1].append(record)
    return segments


def wall_seconds(run: Run) -> float:
    """How long the processes of the run lasted, all together [s]. A process lasts from its start record to its last
    valid record."""
    return sum(segment[-1]["time"] - segment[0]["time"] for segment in _segments(run) if segment)


def _cpu_hours(run: Run) -> float | None:
    """The CPU hours of the run. Each process counts its CPU time from its own start, so the last values of all
    processes are added."""
    spent = [[r["perf/cpu_seconds"] for r in segment if "perf/cpu_seconds" in r] for segment in _segments(run)]
    return sum(seconds[-1] for seconds in spent if seconds) / 3600 if any(spent) else None


EXAMPLES = """examples:
  slimelite compare runs/lr-1e-6 runs/lr-1e-5
  slimelite compare --group 1e-6 runs/lr-1e-6-seed-* --group 1e-5 runs/lr-1e-5-seed-*
  slimelite compare --group a runs/a-* --group b runs/b-* --metric rollout/digits
"""


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Raises:
        ValueError: a run cannot be read.
    """
    parser = argparse.ArgumentParser(
        prog="slimelite compare",
        description="Compare runs: flags that differ, scores with standard errors and a paired test against the first "
        "run, rewards, tokens, seconds and hours.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run folders; each run is tested against the first one")
    parser.add_argument(
        "--group",
        nargs="+",
        action="append",
        default=[],
        metavar=("NAME", "RUN"),
        help="runs of several seeds under one name; each group is tested against the first one",
    )
    parser.add_argument(
        "--metric",
        action="append",
        default=[],
        help=f"compare groups by this metric: its mean over the last {LAST} rollouts, or its value in the last "
        "evaluation; may be given several times",
    )
    parser.add_argument("--json", action="store_true", help="print every number as JSON")
    args = parser.parse_args(argv)
    if bool(args.runs) == bool(args.group):
        parser.error("name run folders, or groups of runs with --group NAME RUN...")
    if args.metric and not args.group:
        parser.error("--metric needs --group; `slimelite plot --metric` draws the metrics of single runs")
    if args.group:
        from slimelite.apps.groups import grouped, read_groups, show_groups

        facts, shown = grouped(read_groups(args.group), args.metric), show_groups
    else:
        facts, shown = comparison(read_runs(args.runs)), show
    if args.json:
        # JSON has no NaN and no infinity: they become null
        print(json.dumps(json.loads(json.dumps(facts), parse_constant=lambda _: None), indent=1))
    else:
        shown(facts)
    return 0


def show(facts: Facts) -> None:
    """Print the table of `comparison`."""
    print_table([run["name"] for run in facts["runs"]], _blocks(facts), [_footnote(facts), *facts["same"]])


def _footnote(facts: Facts) -> str:
    runs = facts["runs"]
    after = f"after: the {' or '.join(_units(runs))} after which the evaluation ran; start: before training"
    notes = [f"±: standard error. {after}. p: {facts['test']}."] if any(run["evals"] for run in runs) else []
    if any(run["evals"] or run["alarms"] for run in runs):
        notes.append(f"{_turns(runs).capitalize()} are numbered from 0, as in files.")
    return " ".join(notes)


def _units(runs: Sequence[Facts]) -> list[str]:
    return list(dict.fromkeys(run["unit"] for run in runs))


def _turns(runs: Sequence[Facts]) -> str:
    return " or ".join(PLURALS[unit] for unit in _units(runs))


def _blocks(facts: Facts) -> Iterator[list[Row]]:
    """The rows of the table, in blocks. Rows without any value are left out."""
    runs = facts["runs"]
    yield [(name, [plain(value) for value in values]) for name, values in facts["flags"].items()]
    how = {"status": _status, _turns(runs): _rollouts, "alarms": _alarms}
    yield _filled([(title, [text(run) for run in runs]) for title, text in how.items()])
    yield _filled(list(_scores(runs)))
    yield _filled([(title, [_shown(run, key, text) for run in runs]) for title, key, text in _numbers(runs)])
    phases = dict.fromkeys(phase for run in runs for phase in run["seconds"])
    seconds = [(f"  of that {phase}", [_shown(run["seconds"], phase, duration) for run in runs]) for phase in phases]
    yield _filled([("time", [_shown(run, "wall_seconds", duration) for run in runs]), *seconds])
    hours = [("CPU-hours", "cpu_hours"), ("GPU-hours", "gpu_hours")]
    yield _filled([(title, [_shown(run, key, "{:.3g}".format) for run in runs]) for title, key in hours])


def _numbers(runs: Sequence[Facts]) -> Iterator[tuple[str, str, Callable[[float], str]]]:
    for title in MEASURES.values():
        having = [run for run in runs if run[title] is not None]
        yield f"{title}, mean of the last {LAST} {_turns(having)}", title, small if title == "loss" else "{:.3f}".format
    yield "tokens generated", "tokens_generated", "{:,.0f}".format
    yield "tokens trained, with prompts", "tokens_trained", "{:,.0f}".format


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


def test_text(test: Facts) -> str:
    """``+0.013 ±0.004, p 0.012, 500 prompts``, or the reason why there is no test."""
    if "why_not" in test:
        return f"unknown: {test['why_not']}"
    prompts = f"{test['prompts']:,}" + (f" of {test['of_prompts']:,}" if test["prompts"] < test["of_prompts"] else "")
    return f"{test['difference']:+.3f}{plus_minus(test['standard_error'])}, p {test['p']:.2g}, {prompts} prompts"


def _status(run: Facts) -> str:
    status = run["status"] or ""
    return status if status in ("", "finished", "running") else one_line(f"{status}: {run['message']}")[:80]


def _rollouts(run: Facts) -> str:
    of = f" of {run['of_rollouts']}" if run["of_rollouts"] not in (None, run["rollouts"]) else ""
    return f"{run['rollouts']}{of}"


def _alarms(run: Facts) -> str:
    """Alarms such as ``stall in 3, mismatch since 12``, with the rollout in which each alarm began."""
    when = {True: "since", False: "in"}
    return ", ".join(f"{each['kind']} {when[each['ended'] is None]} {each['rollout_id']}" for each in run["alarms"])


def _shown(values: Facts, key: str, text: Callable[[float], str]) -> str:
    return "" if values[key] is None else text(values[key])
