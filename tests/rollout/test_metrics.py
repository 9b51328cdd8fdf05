"""Numbers that users plot."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimelite.environments.registry import FACTS
from slimelite.rollout import metrics
from slimelite.samples.sample import Generated, Sample, Status
from slimelite.samples.table import SampleTable

from .conftest import MakeArgs


def sample(index: int, length: int, reward: float | dict[str, float], **fields: object) -> Sample:
    made = Sample(index=index, group_index=index // 2, tokens=[1], reward=reward, status=Status.COMPLETED)
    made.append_response_tokens([5] * length, [-1.0] * length, weight_version=0)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=6), st.integers(1, 7))
def test_pass_at_k_is_the_share_of_draws_with_a_success(rewards: list[float], k: int) -> None:
    got = metrics.pass_at_k([rewards], [k])
    if k > len(rewards):
        assert f"pass@{k}" not in got
        return
    draws = [max(d) == 1 for d in itertools.combinations(rewards, k)]
    assert got[f"pass@{k}"] == pytest.approx(sum(draws) / len(draws))


def test_pass_at_k_of_uneven_groups() -> None:
    uneven = [[1, 0, 0, 0], [0, 0], [1, 1]]
    got = metrics.pass_at_k(uneven)
    assert {name for name in got if name.startswith("pass@") and "-" not in name} == {"pass@1", "pass@2", "pass@4"}
    assert got["pass@4"] == 1
    assert "pass@4-stderr" not in got, "one prompt alone has four responses"
    assert got["pass@2"] == pytest.approx(statistics.fmean([1 / 2, 0, 1]))
    assert got["pass@2-stderr"] == pytest.approx(statistics.stdev([1 / 2, 0, 1]) / 3**0.5)
    assert metrics.pass_at_k(uneven, [3])["pass@3"] == 3 / 4
    assert metrics.pass_at_k([[1], [0]]) == {}
    assert metrics.pass_at_k([[1], [0]], [1, 2]) == {"pass@1": 0.5, "pass@1-stderr": 0.5}


@given(st.lists(st.lists(st.floats(-2, 2), min_size=1, max_size=4), min_size=2, max_size=5))
def test_a_standard_error_is_clustered_by_prompt(rewards: list[list[float]]) -> None:
    """Every pair of responses to one prompt counts, as in eq. 4 of Miller (arXiv:2411.00640), over N²."""
    flat = [r for of_prompt in rewards for r in of_prompt]
    mean = sum(flat) / len(flat)
    pairs = sum((a - mean) * (b - mean) for of_prompt in rewards for a in of_prompt for b in of_prompt)
    expected = pairs / len(flat) ** 2 * len(rewards) / (len(rewards) - 1)
    got = metrics.mean_and_error(rewards)
    assert got[""] == pytest.approx(mean, abs=1e-12)
    assert got["-stderr"] ** 2 == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("score", ["mean", "pass@2"])
def test_the_squared_standard_error_is_the_variance_over_all_draws(score: str) -> None:
    """Unbiased: two prompts drawn from three, three responses to each; every outcome is enumerated."""
    outcomes: list[tuple[float, float, float]] = []  # probability, estimate, its squared error
    for chances in itertools.product((0.1, 0.5, 0.8), repeat=2):
        for answers in itertools.product((0.0, 1.0), repeat=6):
            rewards = [list(answers[:3]), list(answers[3:])]
            likely = [p if a else 1 - p for p, of_prompt in zip(chances, rewards, strict=True) for a in of_prompt]
            got = metrics.mean_and_error(rewards) if score == "mean" else metrics.pass_at_k(rewards)
            name = score.removeprefix("mean")
            outcomes.append((math.prod(likely) / 9, got[name], got[f"{name}-stderr"] ** 2))
    assert sum(p for p, _, _ in outcomes) == pytest.approx(1)
    mean = sum(p * estimate for p, estimate, _ in outcomes)
    truth = {
        "mean": statistics.fmean((0.1, 0.5, 0.8)),
        "pass@2": statistics.fmean(1 - (1 - p) ** 2 for p in (0.1, 0.5, 0.8)),
    }
    assert mean == pytest.approx(truth[score])
    variance = sum(p * (estimate - mean) ** 2 for p, estimate, _ in outcomes)
    assert sum(p * squared for p, _, squared in outcomes) == pytest.approx(variance)


def test_rollout_metrics(make_args: MakeArgs) -> None:
    groups = [
        [sample(0, 4, 1.0, loss_mask=[1, 1, 0, 0]), sample(1, 6, 1.0, status=Status.TRUNCATED)],
        [
            sample(2, 2, 0.0, weight_versions=[3, 4], metadata={"constrained_tokens": 1}),
            sample(3, 8, 1.0, metadata={"raw_reward": 5.0, "constrained_tokens": 4}),
        ],
    ]
    got = metrics.rollout_metrics(make_args(log_passrate=True), groups, None, 4, SampleTable.from_samples(groups))
    assert got["rollout/response_len/mean"] == statistics.fmean([2, 6, 2, 8])
    assert got["rollout/response_len/median"] == 4
    assert got["rollout/truncated_ratio"] == 0.25
    assert got["rollout/zero_std/count_1.0"] == 1
    assert "rollout/zero_std/count_0.0" not in got
    assert got["rollout/raw_reward"] == statistics.fmean([1, 1, 0, 5])
    assert got["rollout/weight_staleness/max"] == 4
    assert got["rollout/weight_staleness/mean"] == pytest.approx((16 * 4 + 1) / 18)  # what the loss sees
    assert got["passrate/pass@1"] == 0.75
    assert got["rollout/constrained_token_ratio"] == 5 / 20


def test_an_episode_counts_once_whatever_the_number_of_its_branches(make_args: MakeArgs) -> None:
    facts = {FACTS: {"metrics": {}, "timeouts": 0, "errors": 0}, "role": "first"}
    branches = [
        sample(0, 4, {"right": right, "total": right}, rollout_id=0, metadata=facts) for right in (1.0, 1.0, 0.0, 0.0)
    ]
    groups = [[*branches, sample(1, 4, {"right": 0.0, "total": 0.0}, metadata=facts)]]
    table = SampleTable.from_samples(groups, "total")
    got = metrics.rollout_metrics(make_args(reward_key="total"), groups, "total", None, table)
    assert got["rollout/raw_reward"] == 0.25
    assert got["rollout/environment/reward/first"] == 0.25
    assert metrics.table_metrics(table)["rollout/reward/right"] == 0.25


def test_perf_metrics() -> None:
    generated = [Generated(10, 10, waited=3.0), Generated(30, 20)]
    got = metrics.perf_metrics(2, generated, seconds=4.0)
    assert got["perf/rollout_time"] == 4
    assert got["perf/generated_tokens"] == 40
    assert got["perf/tokens_per_gpu_per_sec"] == 5
    assert got["perf/effective_tokens_per_gpu_per_sec"] == 3.75
    assert got["perf/longest_sample_tokens_per_sec"] == 7.5
    assert got["perf/longest_effective_sample_tokens_per_sec"] == 5
    assert got["perf/non_generation_time/max"] == 3
    assert got["perf/longest_sample_non_generation_time"] == 0


def test_repetition() -> None:
    assert metrics.is_repetitive("the same words again " * 600)
    assert not metrics.is_repetitive("the same words again " * 10)  # too short to tell
    assert not metrics.is_repetitive("".join(str(i * i) for i in range(4000)))


def test_turns_are_runs_of_the_models_own_tokens(make_args: MakeArgs) -> None:
    groups = [[sample(0, 5, 0.0, loss_mask=[1, 0, 0, 1, 1]), sample(1, 2, 0.0)]]
    table = SampleTable.from_samples(groups)
    got = metrics.rollout_metrics(make_args(log_multi_turn=True), groups, None, None, table)
    assert got["multi_turn/turns/mean"] == 1.5
    assert got["multi_turn/environment_tokens"] == 1
