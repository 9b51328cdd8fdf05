"""``slimelite compare --group``: groups of runs with several seeds next to each other, and a test of their means."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from slimelite.apps.runs import LAST, Run, differing_flags, read_runs, same_notes, same_runs
from slimelite.apps.tables import Row, plain, print_table, score_text

# up to so many ways to deal the runs to two groups, each is tried
EXACT = 20_000
DRAWS = 20_000
SEEDS = ("--seed", "--rollout-seed")
TEST = (
    "two-sided permutation test of the difference of means, over all ways to divide the runs into the two groups, "
    f"or {DRAWS:,} random ones if there are more than {EXACT:,}"
)

Facts = dict[str, Any]
Groups = Mapping[str, Sequence[Run]]


def read_groups(words: Sequence[Sequence[str]]) -> dict[str, list[Run]]:
    """The runs of each ``--group NAME RUN...``.

    Raises:
        ValueError: a run cannot be read, or is in two groups; or a group's name is repeated, or has no run.
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


def grouped(groups: Groups) -> Facts:
    """Everything that ``slimelite compare --group --json`` prints.

    ``flags``: name -> its value in each group, for flags that differ between groups but not within one. ``test``: the
    meaning of p. ``groups``: a dict for each group, with ``name``, ``runs``, ``seeds`` and ``measures``. A measure is
    each run's last score of a dataset, or the mean ``reward`` or ``loss`` of its last rollouts. It has ``values``,
    ``mean``, ``standard_error``, ``at`` and, from the second group on, ``against_first`` (see `Unpaired`) or
    ``why_not``. ``same``: see `same_notes`.
    """
    everything = [run for runs in groups.values() for run in runs]
    same = same_notes(everything)
    summaries: list[Facts] = [
        {
            "name": name,
            "runs": [run.name for run in runs],
            "seeds": [run.config.get("seed") for run in runs],
            "measures": _measures(runs),
        }
        for name, runs in groups.items()
    ]
    reference, *others = groups.values()
    for runs, summary in zip(others, summaries[1:], strict=True):
        repeated = bool(same_runs([*reference, *runs]))
        for name, measure in summary["measures"].items():
            if (first := summaries[0]["measures"].get(name)) is not None:
                measure["against_first"] = _against(first["values"], measure["values"], repeated)
    return {"flags": _flags(groups), "test": TEST, "groups": summaries, "same": same}


def _flags(groups: Groups) -> dict[str, list[object]]:
    everything = [run for runs in groups.values() for run in runs]
    ends = list(itertools.accumulate(map(len, groups.values())))
    differing: dict[str, list[object]] = {}
    for name, values in differing_flags(everything).items():
        parts = [values[end - len(runs) : end] for end, runs in zip(ends, groups.values(), strict=True)]
        if all(part.count(part[0]) == len(part) for part in parts):
            differing[name] = [part[0] for part in parts]
    return differing


def _measures(runs: Sequence[Run]) -> dict[str, Facts]:
    """Name -> the value of each run that has it, their mean, and its standard error, s / sqrt(n) with s² over n − 1."""
    names = dict.fromkeys(name for run in runs for name in run.scores)
    named = {name.removeprefix("eval/"): (name, 1) for name in names}
    rewarded = any("rollout/raw_reward" in run.series for run in runs)
    named |= {"reward": ("rollout/raw_reward", LAST)} if rewarded else {"loss": ("train/loss", LAST)}
    measures = {}
    for title, (metric, count) in named.items():
        having = [run.series[metric] for run in runs if metric in run.series]
        values = [float(series[1][-count:].mean()) for series in having]
        if not values:
            continue
        error = float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
        steps = sorted({int(series[0][-1]) for series in having})
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


class Unpaired(NamedTuple):
    """The difference between the means of a second group and the first.

    ``standard_error``: of ``difference``, sqrt(s₁²/n₁ + s₂²/n₂). ``p``: of the permutation test. ``least_p``: the
    smallest p that so few runs can give.
    """

    difference: float
    standard_error: float
    p: float
    least_p: float


def unpaired_test(first: Sequence[float], other: Sequence[float]) -> Unpaired:
    """Test whether two groups of runs have the same mean: Fisher's randomization test (Design of Experiments, 1935).

    If the groups were alike, each run could be in the other group just as well. ``p`` is the share of all ways to split
    the n₁ + n₂ values into groups of n₁ and n₂ whose means differ at least as much, in either direction, as the
    observed means. The test needs no normal distribution. It needs at least seven runs, such as 3 + 4, to reach a p
    below 0.05. If there are more than `EXACT` ways, `DRAWS` random ones are used, and the observed one counts too
    (Phipson and Smyth, 2010, doi:10.2202/1544-6115.1585).
    """
    values, count = np.array([*first, *other], np.float64), len(other)
    difference = values[-count:].mean() - values[:-count].mean()
    error = math.sqrt(sum(np.var(group, ddof=1) / len(group) for group in (first, other)))
    # sums that differ by rounding alone are equal
    observed = abs(difference) * (1 - 1e-9) - 1e-12 * np.abs(values).max(initial=0.0)

    def distances(chosen: np.ndarray) -> np.ndarray:
        """|difference of means| of each row of ``chosen``, [ways, count] indices of the second group."""
        sums = values[chosen].sum(axis=1)
        means: np.ndarray = sums / count - (values.sum() - sums) / (len(values) - count)
        return np.abs(means)

    ways = math.comb(len(values), count)
    if ways <= EXACT:
        chosen = np.array(list(itertools.combinations(range(len(values)), count)))
        p = float((distances(chosen) >= observed).mean())
    else:
        generator = np.random.default_rng(0)
        chosen = generator.permuted(np.tile(np.arange(len(values)), (DRAWS, 1)), axis=1)[:, :count]
        p = (1 + int((distances(chosen) >= observed).sum())) / (DRAWS + 1)
    least = (2 if 2 * count == len(values) else 1) / ways
    return Unpaired(float(difference), error, p, max(least, 1 / (DRAWS + 1)))


def show_groups(facts: Facts) -> None:
    """Print the table of `grouped`."""
    groups = facts["groups"]
    notes = [f"±: standard error over runs. p: {facts['test']}.", *facts["same"]]
    late = {len(measure["at"]) > 1 for group in groups for measure in group["measures"].values()}
    if True in late:
        notes.append("Some runs ended earlier than others; the last value of each run is compared.")
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
        shown = f"{title}, mean of the last {LAST}" if title in ("reward", "loss") else f"{title}, last"
        yield shown, [score_text(m["mean"], m["standard_error"]) if m else "" for m in of_groups]
        tests = [_test_text(m["against_first"]) if m and "against_first" in m else "" for m in of_groups]
        if any(tests):
            yield f"{title}, less {groups[0]['name']}", tests


def _test_text(test: Facts) -> str:
    if "why_not" in test:
        return f"unknown: {test['why_not']}"
    least = f" (with so few runs, p cannot be below {test['least_p']:.2g})" if test["least_p"] > 0.05 else ""
    return f"{test['difference']:+.3f} ±{test['standard_error']:.3f}, p {test['p']:.2g}{least}"
