"""``slimelite compare --group``: groups of runs with several seeds next to each other, and a test of their means."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from slimelite.apps.permutations import DRAWS, EXACT, SIGN_DRAWS, paired_test, unpaired_test
from slimelite.apps.runs import LAST, Run, differing_flags, read_runs, same_notes, same_runs
from slimelite.apps.tables import Row, plain, print_table
from slimelite.tracking.console import MEASURES
from slimelite.tracking.metrics_file import axis_of, unknown_metrics

SEEDS = ("--seed", "--rollout-seed")
TEST = (
    "unpaired two-sided permutation test of the difference of means, over all ways to divide the runs into the two "
    f"groups, or {DRAWS:,} random ways if there are more than {EXACT:,}"
)
PAIRED_TEST = "two-sided sign-flip permutation test of the differences between runs with the same seed"

Facts = dict[str, Any]
Groups = Mapping[str, Sequence[Run]]


def read_groups(words: Sequence[Sequence[str]]) -> dict[str, list[Run]]:
    """The runs of each ``--group NAME RUN...``.

    Raises:
        ValueError: a run cannot be read; a run is in two groups; two groups have the same name; or a group has no run.
    """
    folders: dict[str, list[str]] = {}
    for name, *several in words:
        if not several:
            raise ValueError(f"--group {name}: no run folder given")
        if name in folders:
            raise ValueError(f"--group {name} is given twice: name all its runs after one --group")
        folders[name] = several
    runs = iter(read_runs([*itertools.chain.from_iterable(folders.values())]))
    return {name: list(itertools.islice(runs, len(own))) for name, own in folders.items()}


def grouped(groups: Groups, metrics: Sequence[str] = ()) -> Facts:
    """Everything that ``slimelite compare --group --json`` prints.

    ``flags``: name -> its value in each group, for flags that differ only between groups. ``test``, ``paired_test``:
    the meaning of the p-values. ``groups``: a dict for each group, with ``name``, ``runs``, ``seeds`` and ``measures``.
    ``same``: see `same_notes`. ``order``: a sentence about groups whose runs saw the same prompts in the same order.

    By default, a measure is the last score of a dataset, or the mean of one of `Run.measures` over the last rollouts.
    With ``metrics``, each of these metrics gives one measure. For a metric of evaluations, the measure is the last
    value. For any other metric, it is the mean over the last rollouts. A measure has ``values`` (one for each run),
    ``mean``, ``standard_error`` and ``at`` (the last steps of the runs). In every group but the first, a measure also
    has ``against_first``: the fields of `Unpaired`, or only ``why_not``. If a group has the same seeds as the first
    group, its measures also have ``paired``, a dict with ``pairs``, ``difference``, ``standard_error``, ``p`` and
    ``least_p``.

    Raises:
        ValueError: a run has no value of one of ``metrics``.
    """
    everything = [run for runs in groups.values() for run in runs]
    same = same_notes(everything)
    for metric in metrics:
        if not any(metric in run.series for run in everything):
            raise ValueError(unknown_metrics([metric], [run.records for run in everything]))
        if lacking := [run.name for run in everything if metric not in run.series]:
            raise ValueError(f"--metric {metric}: these runs have no such values: {', '.join(lacking)}")
    summaries: list[Facts] = [
        {
            "name": name,
            "runs": [run.name for run in runs],
            "seeds": [run.config.get("seed") for run in runs],
            "measures": _measures(runs, metrics),
        }
        for name, runs in groups.items()
    ]
    reference, *others = groups.values()
    for runs, summary in zip(others, summaries[1:], strict=True):
        repeated = bool(same_runs([*reference, *runs]))
        for name, measure in summary["measures"].items():
            if (first := summaries[0]["measures"].get(name)) is not None:
                measure["against_first"] = test = _against(first["values"], measure["values"], repeated)
                if "p" in test and (pairs := _pairs(reference, runs)):
                    measure |= _paired(first["values"], measure["values"], pairs)
    tests = {"test": TEST, "paired_test": PAIRED_TEST}
    return {"flags": _flags(groups), **tests, "groups": summaries, "same": same, "order": _order(groups)}


def _pairs(first: Sequence[Run], other: Sequence[Run]) -> list[tuple[int, int]]:
    """For each seed, the positions of the seed's runs in the two groups. The result is empty if the groups have
    different seeds, or if a group has a seed twice."""
    seeds = [[(run.config.get("seed"), run.config.get("rollout_seed")) for run in runs] for runs in (first, other)]
    known = all(None not in pair for of_group in seeds for pair in of_group)
    matching = set(seeds[0]) == set(seeds[1]) and len(set(seeds[0])) == len(seeds[0]) == len(seeds[1])
    return [(i, seeds[1].index(pair)) for i, pair in enumerate(seeds[0])] if known and matching else []


def _paired(first: Sequence[float], other: Sequence[float], pairs: Sequence[tuple[int, int]]) -> Facts:
    if not len(first) == len(other) == len(pairs):  # a run lacks a value
        return {}
    facts = paired_test(np.array([other[j] - first[i] for i, j in pairs]))._asdict()
    least = max(2.0 ** (1 - len(pairs)), 1 / (SIGN_DRAWS + 1))
    return {"paired": {"pairs": facts.pop("prompts"), **facts, "least_p": least}}


def _order(groups: Groups) -> list[str]:
    def alike(runs: Sequence[Run]) -> bool:
        configs = [run.config for run in runs]
        files = {str(config.get("prompt_data") or None) for config in configs}
        unshuffled = all(config.get("rollout_shuffle") is False for config in configs)
        own = any(config.get("data_source_path") for config in configs)
        return len(runs) > 1 and len(files) == 1 and files != {"None"} and unshuffled and not own

    names = [name for name, runs in groups.items() if alike(runs)]
    if not names:
        return []
    return [
        f"Within {' and '.join(names)}, all runs read the same prompts in the same order, because "
        "--rollout-shuffle is off. With other prompts, the results may differ more than ± and p suggest."
    ]


def _flags(groups: Groups) -> dict[str, list[object]]:
    everything = [run for runs in groups.values() for run in runs]
    ends = list(itertools.accumulate(map(len, groups.values())))
    differing: dict[str, list[object]] = {}
    for name, values in differing_flags(everything).items():
        parts = [values[end - len(runs) : end] for end, runs in zip(ends, groups.values(), strict=True)]
        if all(part.count(part[0]) == len(part) for part in parts):
            differing[name] = [part[0] for part in parts]
    return differing


def _measures(runs: Sequence[Run], metrics: Sequence[str]) -> dict[str, Facts]:
    """Name of a measure -> the values of the runs that have this measure, their mean, and the standard error of the
    mean, s / sqrt(n), where s² divides by n − 1."""
    names = dict.fromkeys(name for run in runs for name in run.scores)
    named = {name.removeprefix("eval/"): name for name in names}
    named |= {title: metric for run in runs for title, metric in run.measures.items()}
    measures = {}
    for title, metric in ({metric: metric for metric in metrics} or named).items():
        having = [run for run in runs if metric in run.series]
        values = [run.last(metric) for run in having]
        if not values:
            continue
        error = float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
        steps = sorted({int(run.series[metric][0][-1]) for run in having})
        measures[title] = {"values": values, "mean": float(np.mean(values)), "standard_error": error, "at": steps}
    return measures


def _against(first: Sequence[float], other: Sequence[float], repeated: bool) -> Facts:
    if repeated:
        return {"why_not": "identical runs cannot count as different seeds"}
    if min(len(first), len(other)) < 2:
        return {"why_not": "a group of one run has no spread"}
    if not np.isfinite([*first, *other]).all():
        return {"why_not": "values are not numbers"}
    return unpaired_test(first, other)._asdict()


def show_groups(facts: Facts) -> None:
    """Print the table of `grouped`."""
    groups = facts["groups"]
    paired = any("paired" in measure for group in groups for measure in group["measures"].values())
    tests = f"p: {facts['test']}" + (f"; paired by seed: {facts['paired_test']}" if paired else "")
    notes = [f"±: standard error over runs. {tests}.", *facts["same"], *facts["order"]]
    late = {len(measure["at"]) > 1 for group in groups for measure in group["measures"].values()}
    if True in late:
        notes.append("Some runs ended earlier than others; the last value of each run is compared.")
    if len(groups) > 1 and not paired and any(group["seeds"] != groups[0]["seeds"] for group in groups):
        notes.append("The runs are not paired by seed, because the groups have different seeds.")
    print_table([group["name"] for group in groups], [_head(facts), list(_rows(groups))], notes)


def _head(facts: Facts) -> list[Row]:
    groups = facts["groups"]
    flags: list[Row] = [(name, [plain(value) for value in values]) for name, values in facts["flags"].items()]
    return [
        *flags,
        ("runs", [str(len(group["runs"])) for group in groups]),
        ("seeds", [", ".join(map(str, group["seeds"])) for group in groups]),
    ]


def _rows(groups: Sequence[Facts]) -> Iterator[Row]:
    for title in dict.fromkeys(name for group in groups for name in group["measures"]):
        of_groups = [group["measures"].get(title) for group in groups]
        over_rollouts = title in MEASURES.values() or ("/" in title and axis_of(title) != "eval/step")
        shown = f"{title}, mean of the last {LAST}" if over_rollouts else f"{title}, last"
        digits = _digits([m["mean"] for m in of_groups if m])
        yield shown, [_plus_minus(m["mean"], m["standard_error"], digits) if m else "" for m in of_groups]
        for key, words in (("against_first", ""), ("paired", ", paired by seed")):
            tests = [_test_text(m[key], digits) if m and key in m else "" for m in of_groups]
            if any(tests):
                yield f"{title}, less {groups[0]['name']}{words}", tests


def _digits(values: Sequence[float]) -> int:
    """The number of decimals: three, or more if the largest value needs more to show four digits.

    >>> _digits([0.61, 0.64]), _digits([0.00012, 0.0002])
    (3, 7)
    """
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    return 3 if largest >= 0.1 or largest == 0 else 3 - math.floor(math.log10(largest))


def _plus_minus(value: float, error: float | None, digits: int, sign: str = "") -> str:
    return f"{value:{sign}.{digits}f}" + ("" if error is None else f" ±{error:.{digits}f}")


def _test_text(test: Facts, digits: int) -> str:
    if "why_not" in test:
        return f"unknown: {test['why_not']}"
    few = "pairs" if "pairs" in test else "runs"
    least = f" (with so few {few}, p cannot be below {test['least_p']:.2g})" if test["least_p"] > 0.05 else ""
    return f"{_plus_minus(test['difference'], test['standard_error'], digits, '+')}, p {test['p']:.2g}{least}"
