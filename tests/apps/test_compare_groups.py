"""``slimelite compare --group``: groups of seeds, and the test of their means."""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimelite.apps.command import main
from slimelite.apps.compare import comparison
from slimelite.apps.permutations import DRAWS, paired_test, unpaired_test
from slimelite.apps.runs import Run, same_notes
from slimelite.tracking.metrics_file import MetricsFile
from slimelite.tracking.run_folder import RunFolder
from tests.tracking.fake_run import make_args

QUARTERS = st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=2, max_size=5)


def write(
    folder: Path,
    score: float,
    *,
    reward: float | None = None,
    seed: int = 0,
    rollout_seed: int | None = None,
    lr: float = 1e-3,
    shuffle: bool = False,
) -> str:
    """A run with one evaluation of ``d``, and 12 rollouts with rewards that rise to ``reward``, each of two steps."""
    flags = {"seed": seed, "rollout_seed": seed if rollout_seed is None else rollout_seed, "lr": lr}
    flags |= {"rollout_shuffle": shuffle, "num_steps_per_rollout": 2}
    RunFolder(folder).save_config(make_args(folder, **flags))
    file = MetricsFile(folder)
    file.write("start", {"rollout/step": 0, "eval/step": -1})
    for i in range(12):
        file.write("rollout", {"rollout/step": i, "rollout/raw_reward": (score if reward is None else reward) - 11 + i})
        for step in range(2):
            file.write("train", {"rollout/step": i, "train/step": 2 * i + step, "train/own": score * i / 10_000})
    file.write("eval", {"eval/step": 11, "eval/d": score, "eval/d-pass@4": 1 - score})
    file.close(False)
    return str(folder)


@given(QUARTERS, QUARTERS)
def test_p_is_the_share_of_deals_that_differ_as_much(first: list[float], other: list[float]) -> None:
    values, count = [*first, *other], len(first)
    differences = []
    for chosen in itertools.combinations(range(len(values)), count):
        rest = [values[i] for i in range(len(values)) if i not in chosen]
        differences.append(abs(statistics.fmean(rest) - statistics.fmean(values[i] for i in chosen)))
    observed = abs(statistics.fmean(other) - statistics.fmean(first))
    expected = sum(difference >= observed - 1e-9 for difference in differences) / len(differences)
    found = unpaired_test(first, other)
    assert found.p == pytest.approx(expected, abs=1e-12)
    assert found.p >= found.least_p - 1e-12
    assert found.difference == pytest.approx(statistics.fmean(other) - statistics.fmean(first))


@pytest.mark.parametrize(
    ("first", "other", "difference", "p"),
    # of scipy 1.17.1: stats.permutation_test of the difference of means, n_resamples=inf
    [
        ([0.61, 0.64, 0.58, 0.66, 0.60], [0.69, 0.63, 0.72, 0.70, 0.67], 0.064, 0.031746031746031744),
        ([1.0, 2.5, 0.5, 3.0], [2.0, 2.75, 3.5, 2.5], 0.9375, 0.2857142857142857),
    ],
)
def test_p_is_scipys(first: list[float], other: list[float], difference: float, p: float) -> None:
    found = unpaired_test(first, other)
    assert found.p == pytest.approx(p, rel=1e-12)
    assert found.difference == pytest.approx(difference)
    spread = statistics.variance(first) / len(first) + statistics.variance(other) / len(other)
    assert found.standard_error == pytest.approx(spread**0.5)


def test_many_runs_are_dealt_at_random_and_p_is_never_zero() -> None:
    generator = np.random.default_rng(0)
    first, other = generator.normal(0, 1, 20), generator.normal(0.5, 1, 20)
    assert unpaired_test(first, other) == unpaired_test(first, other)
    assert unpaired_test(first, first + 100).p == 1 / (DRAWS + 1)
    assert unpaired_test(first, first).p == 1.0


def test_groups_stand_side_by_side_with_their_means_and_p(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    low = [write(tmp_path / f"low-{i}", s, seed=i) for i, s in enumerate([0.61, 0.64, 0.58, 0.66, 0.60])]
    high = [write(tmp_path / f"high-{i}", s, seed=i, lr=2e-3) for i, s in enumerate([0.69, 0.63, 0.72, 0.70, 0.67])]
    groups = ["--group", "1e-3", *low, "--group", "2e-3", *high]
    assert main(["compare", *groups, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["flags"] == {"--lr": [1e-3, 2e-3]}, "seeds differ within a group"
    first, second = facts["groups"]
    assert (first["seeds"], first["runs"][1]) == ([0, 1, 2, 3, 4], "low-1")
    assert first["measures"]["d"]["mean"] == pytest.approx(0.618)
    assert first["measures"]["d"]["standard_error"] == pytest.approx(
        statistics.stdev([0.61, 0.64, 0.58, 0.66, 0.6]) / 5**0.5
    )
    assert second["measures"]["d"]["against_first"]["p"] == pytest.approx(0.031746031746031744)
    # the mean of the last ten rollouts, of which the last has the score
    assert first["measures"]["reward"]["values"][1] == pytest.approx(0.64 - 4.5)

    assert main(["compare", *groups]) == 0
    shown = capsys.readouterr().out
    assert "0.618 ±0.014" in shown
    assert "+0.064 ±0.021, p 0.032" in shown
    assert "0, 1, 2, 3, 4" in shown
    assert "two-sided permutation test of the difference of means" in shown


def metrics_of(capsys: pytest.CaptureFixture[str], words: list[str]) -> list[dict[str, dict[str, Any]]]:
    """The measures of each group."""
    assert main(["compare", *words, "--json"]) == 0
    return [group["measures"] for group in json.loads(capsys.readouterr().out)["groups"]]


def test_a_metric_of_ones_own_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    low = [write(tmp_path / f"low-{i}", s, seed=i) for i, s in enumerate([0.61, 0.64, 0.58, 0.66, 0.60])]
    high = [write(tmp_path / f"high-{i}", s, seed=i) for i, s in enumerate([0.69, 0.63, 0.72, 0.70, 0.67])]
    words = ["--group", "low", *low, "--group", "high", *high, "--metric", "train/own", "--metric", "eval/d-pass@4"]
    first, second = metrics_of(capsys, words)
    assert list(first) == ["train/own", "eval/d-pass@4"]
    # rollouts 2 to 11, which are 20 optimizer steps
    assert first["train/own"]["values"] == pytest.approx([s * 6.5e-4 for s in (0.61, 0.64, 0.58, 0.66, 0.60)])
    assert second["train/own"]["against_first"]["p"] == pytest.approx(0.031746031746031744)
    assert second["eval/d-pass@4"]["values"] == pytest.approx([0.31, 0.37, 0.28, 0.3, 0.33])
    assert main(["compare", *words]) == 0
    shown = capsys.readouterr().out
    assert "train/own, mean of the last 10 0.0004017 ±0.0000093" in " ".join(shown.split())
    assert "eval/d-pass@4, last" in shown
    assert main(["compare", *words, "--metric", "train/ownn"]) == 1
    assert "no run has train/ownn; did you mean train/own? other metrics are: eval/d, " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["compare", *low, "--metric", "train/own"])
    assert "--metric needs --group" in capsys.readouterr().err


@given(st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=2, max_size=7))
def test_the_paired_p_is_the_share_of_sign_patterns(differences: list[float]) -> None:
    sums = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in itertools.product((-1, 1), repeat=len(differences))
    ]
    expected = sum(each >= abs(sum(differences)) - 1e-9 for each in sums) / len(sums)
    assert paired_test(np.array(differences)).p == pytest.approx(expected, abs=1e-12)


def test_runs_with_the_same_seeds_are_paired(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, gains = [0.1, 0.5, 0.9, 0.3, 0.7], [0.02, 0.01, 0.03, 0.02, 0.01]
    first = [write(tmp_path / f"a-{i}", s, seed=i) for i, s in enumerate(base)]
    other = [write(tmp_path / f"b-{i}", base[i] + gains[i], seed=i) for i in (3, 1, 4, 0, 2)]
    words = ["--group", "a", *first, "--group", "b", *other]
    measure = metrics_of(capsys, words)[1]["d"]
    assert measure["against_first"]["p"] > 0.8
    paired = measure["paired"]
    assert (paired["pairs"], paired["p"], paired["least_p"]) == (5, 2 / 32, 2 / 32), "all five signs agree"
    assert paired["difference"] == pytest.approx(statistics.fmean(gains))
    assert main(["compare", *words]) == 0
    shown = capsys.readouterr().out
    assert "d, less a, paired by seed" in shown
    assert "+0.018 ±0.004, p 0.062 (with so few pairs, p cannot be below 0.062)" in shown
    assert "p: unpaired two-sided permutation test" in shown
    for name, seeds in (("c", {"seed": 9}), ("d", {"seed": 2, "rollout_seed": 9})):
        unlike = write(tmp_path / name, 0.4, **seeds)
        assert "paired" not in metrics_of(capsys, [*words[:-1], unlike])[1]["d"]


def test_runs_with_the_same_prompts_in_the_same_order_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = [write(tmp_path / f"a-{i}", i / 4, seed=i) for i in range(2)]
    shuffled = [write(tmp_path / f"b-{i}", i / 8, seed=i, shuffle=True) for i in range(2)]
    assert main(["compare", "--group", "a", *same, "--group", "b", *shuffled]) == 0
    shown = capsys.readouterr().out
    assert "Within a, all runs read the same prompts in the same order, because --rollout-shuffle is off" in shown
    assert main(["compare", "--group", "b", *shuffled]) == 0
    assert "the same order" not in capsys.readouterr().out


def test_seeds_that_are_one_run_are_named_and_give_no_p(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write(tmp_path / name, score) for name, score in (("a", 0.5), ("b", 0.5), ("c", 0.25), ("d", 0.75))]
    note = "runs a and b are the same to the last digit: same seeds (--rollout-seed 0). Count them as one run, not 2."
    assert comparison([Run.read(run) for run in runs])["same"] == [note]
    assert main(["compare", *runs]) == 0
    assert note in capsys.readouterr().out
    assert main(["compare", "--group", "x", *runs[:2], "--group", "y", *runs[2:]]) == 0
    shown = capsys.readouterr().out
    assert note in shown
    assert "unknown: identical runs cannot count as different seeds" in shown
    assert same_notes([Run.read(run) for run in runs[1:]]) == []
    more = [write(tmp_path / name, score) for name, score in (("e", 0.5), ("f", 0.625))]
    assert main(["compare", "--group", "y", *runs[2:], "--group", "z", *more, "--group", "x", *runs[:2], "--json"]) == 0
    _, clean, repeated = json.loads(capsys.readouterr().out)["groups"]
    assert clean["measures"]["d"]["against_first"]["p"] == 1, "runs of another group that are one say nothing of these"
    assert "why_not" in repeated["measures"]["d"]["against_first"]


def test_so_few_runs_that_nothing_can_be_shown_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write(tmp_path / name, score) for name, score in zip("abcdef", (0.1, 0.2, 0.3, 0.7, 0.8, 0.9), strict=True)]
    assert main(["compare", "--group", "x", *runs[:3], "--group", "y", *runs[3:]]) == 0
    assert "p 0.1 (with so few runs, p cannot be below 0.1)" in capsys.readouterr().out
    assert main(["compare", "--group", "x", runs[0], "--group", "y", *runs[3:]]) == 0
    assert "unknown: a group of one run has no spread" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--group", "x"], "--group x: no run folder given"),
        (["--group", "x", "A", "--group", "x", "B"], "--group x is given twice"),
        (["--group", "x", "A", "--group", "y", "A"], "is given twice"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = {name: write(tmp_path / name, 0.5) for name in "AB"}
    assert main(["compare", *(folders.get(word, word) for word in words)]) == 1
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


def test_runs_or_groups_are_named_and_not_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path / "a", 0.5)
    for words in ([], [run, "--group", "x", run]):
        with pytest.raises(SystemExit):
            main(["compare", *words])
        assert "name run folders, or groups of runs with --group NAME RUN..." in capsys.readouterr().err
