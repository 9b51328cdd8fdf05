"""Group and token advantages against loops over rewards and tokens."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged import Batch, batches, few, per_token, same
from torch import Tensor

from slimelite.algorithms.advantages import (
    RolloutTokens,
    add_distillation,
    discounted_returns,
    gae,
    reinforce_plus_plus_baseline,
    token_rewards,
    whiten,
)
from slimelite.algorithms.estimators import ESTIMATORS
from slimelite.algorithms.groups import group_advantages

COMPARING = [name for name, estimator in ESTIMATORS.items() if estimator.group is not None]


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def rewards_of(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def naive_group(rewards: list[float], groups: list[int], rollouts: list[int], estimator: str, std: bool) -> list[float]:
    """One row at a time, from the definition."""
    out = []
    for row, group in enumerate(groups):
        members = sorted({r for r, g in zip(rollouts, groups, strict=True) if g == group})
        value = {m: statistics.fmean(x for x, r in zip(rewards, rollouts, strict=True) if r == m) for m in members}
        mine = value[rollouts[row]]
        others = [value[m] for m in members if m != rollouts[row]]
        if not others:
            out.append(0.0)
        elif estimator == "rloo":
            out.append(mine - statistics.fmean(others))
        elif estimator == "reinforce_plus_plus_baseline" or not std:
            out.append(mine - statistics.fmean(value.values()))
        else:
            out.append((mine - statistics.fmean(value.values())) / (statistics.stdev(value.values()) + 1e-6))
    return out


@pytest.mark.parametrize("std", [True, False])
@pytest.mark.parametrize("estimator", COMPARING)
@few
@given(
    # (rollout, reward) per row; a rollout's group is its id modulo 3: ragged groups, siblings, any row order
    rows=st.lists(st.tuples(st.integers(0, 8), st.floats(-5, 5).map(lambda x: round(x, 3))), min_size=1, max_size=20),
)
def test_group_advantages_equal_the_loop(rows: list[tuple[int, float]], estimator: str, std: bool) -> None:
    rollouts, rewards = [r for r, _ in rows], [x for _, x in rows]
    groups = [r % 3 for r in rollouts]
    actual, _ = group_advantages(rewards_of(*rewards), ids(*groups), ids(*rollouts), estimator, std_normalization=std)
    expected = rewards_of(*naive_group(rewards, groups, rollouts, estimator, std))
    # a group of nearly equal rewards divides rounding errors by 1e-6
    np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-9)


def test_groups_of_different_sizes_have_their_own_baselines() -> None:
    adv, _ = group_advantages(rewards_of(1, 0, 5, 5, 8), ids(7, 7, 9, 9, 9), ids(0, 1, 2, 3, 4), "rloo")
    assert adv.tolist() == [1.0, -1.0, -1.5, -1.5, 3.0]


def test_fan_out_siblings_count_once_and_share_the_advantage() -> None:
    adv, _ = group_advantages(rewards_of(1, 1, 1, 0), ids(0, 0, 0, 0), ids(5, 5, 5, 6), "grpo", std_normalization=False)
    assert adv.tolist() == [0.5, 0.5, 0.5, -0.5]


@pytest.mark.parametrize("estimator", COMPARING)
def test_groups_of_one_and_equal_rewards_give_exactly_zero(estimator: str) -> None:
    # 0.1 seven times: a plain mean differs from 0.1 by rounding
    rewards = rewards_of(*[0.1] * 7, 3.0, 1.0, 2.0)
    groups = ids(*[0] * 7, 1, 2, 2)
    adv, metrics = group_advantages(rewards, groups, np.arange(10), estimator)
    assert adv[:8].tolist() == [0.0] * 8
    assert (adv[8:] != 0).all()
    assert metrics["groups_of_one"] == pytest.approx(1 / 3)
    assert metrics["zero_variance_groups"] == pytest.approx(1 / 3)


def test_raw_rewards() -> None:
    rewards = rewards_of(1, 2, 4)
    for estimator in set(ESTIMATORS) - set(COMPARING):
        assert group_advantages(rewards, ids(0, 0, 0), np.arange(3), estimator)[0].tolist() == [1, 2, 4]
    assert group_advantages(rewards, ids(0, 1, 2), np.arange(3), "grpo", normalize=False)[0].tolist() == [1, 2, 4]


def test_group_errors() -> None:
    one, two = np.zeros(1), ids(0, 1)
    with pytest.raises(ValueError, match="--advantage-estimator"):
        group_advantages(one, ids(0), ids(0), "a2c")
    with pytest.raises(ValueError, match="--reward-error"):
        group_advantages(rewards_of(1, np.nan), two, two, "grpo")
    with pytest.raises(ValueError, match="group_index"):
        group_advantages(rewards_of(1, 1), two, ids(3, 3), "grpo")


def naive_rewards(batch: Batch, rewards: Tensor, kl: Tensor, kl_coef: float) -> list[float]:
    out = [-kl_coef * float(kl[t]) if batch.mask[t] else 0.0 for t in range(len(batch.mask))]
    for row in range(batch.rows):
        if trained := batch.trained(row):
            out[trained[-1]] += float(rewards[row])
    return out


@few
@given(batch=batches, gamma=st.sampled_from([0.0, 0.9, 1.0]))
def test_reinforce_plus_plus_equals_the_loop(batch: Batch, gamma: float) -> None:
    kl, rewards = batch.randn(), torch.randn(batch.rows, generator=batch.generator, dtype=torch.float64)
    r = token_rewards(rewards, kl, batch.mask, batch.segments, batch.rows, kl_coef=0.3)
    naive = naive_rewards(batch, rewards, kl, 0.3)
    same(r, doubles(*naive))
    expected = [
        sum(gamma ** (s - t) * naive[s] for s in batch.tokens(row) if s >= t)
        for row in range(batch.rows)
        for t in batch.tokens(row)
    ]
    same(discounted_returns(r, batch.segments, gamma=gamma), doubles(*expected))


@few
@given(batch=batches)
def test_reinforce_plus_plus_baseline_equals_the_loop(batch: Batch) -> None:
    kl, group = batch.randn(), torch.randn(batch.rows, generator=batch.generator, dtype=torch.float64)
    actual = reinforce_plus_plus_baseline(RolloutTokens(group, kl, batch.mask, batch.segments, kl_coef=0.3))
    expected = [
        float(group[row]) - (0.3 * float(kl[t]) if batch.mask[t] else 0.0)
        for row in range(batch.rows)
        for t in batch.tokens(row)
    ]
    same(actual, doubles(*expected))


@few
@given(batch=batches, gamma=st.sampled_from([0.9, 1.0]), lambd=st.sampled_from([0.0, 0.95, 1.0]))
def test_gae_equals_the_recurrence_over_unmasked_tokens(batch: Batch, gamma: float, lambd: float) -> None:
    kl, values = batch.randn(), batch.randn()
    rewards = torch.randn(batch.rows, generator=batch.generator, dtype=torch.float64)
    r = token_rewards(rewards, kl, batch.mask, batch.segments, batch.rows, kl_coef=0.1)
    naive, expected = naive_rewards(batch, rewards, kl, 0.1), [0.0] * len(batch.mask)
    for row in range(batch.rows):
        running, next_value = 0.0, 0.0
        for t in reversed(batch.tokens(row)):
            if batch.mask[t]:
                running = naive[t] + gamma * next_value - float(values[t]) + gamma * lambd * running
                next_value, expected[t] = float(values[t]), running
    advantages, returns = gae(r, values, batch.mask, batch.segments, gamma=gamma, lambd=lambd)
    same(advantages, doubles(*expected))
    same(returns, per_token(batch, lambda _, t: expected[t] + values[t]))


def test_gae_with_lambda_one_is_return_minus_value_and_long_rows_keep_precision() -> None:
    length = 5000
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(length, generator=generator)
    mask, segments = torch.ones(length, dtype=torch.bool), torch.zeros(length, dtype=torch.long)
    r = token_rewards(torch.tensor([2.0]), torch.zeros(length), mask, segments, 1, kl_coef=0.0)
    advantages, returns = gae(r, values, mask, segments, gamma=1.0, lambd=1.0)
    torch.testing.assert_close(returns, torch.full((length,), 2.0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(advantages, 2.0 - values, rtol=1e-5, atol=1e-5)


@few
@given(batch=batches)
def test_whitening_equals_the_loop(batch: Batch) -> None:
    values = batch.randn(3.0)
    kept = [float(values[t]) for _, t in batch.all_trained()]
    if kept:
        mean = statistics.fmean(kept)
        variance = statistics.variance(kept) if len(kept) > 1 else 0.0
        expected = per_token(batch, lambda _, t: (values[t] - mean) / (variance + 1e-8) ** 0.5)
    else:
        expected = torch.zeros(len(values), dtype=torch.float64)
    whole = whiten(values, batch.mask)
    torch.testing.assert_close(whole, expected, rtol=1e-9, atol=1e-9)


def test_whitened_values_have_zero_mean_and_unit_variance() -> None:
    values = torch.arange(10.0) * 1e4 + 1e6
    white = whiten(values, torch.ones(10, dtype=torch.bool))
    assert white.dtype == torch.float32
    assert abs(float(white.mean())) < 1e-6
    assert float(white.var()) == pytest.approx(1.0)


@few
@given(batch=batches)
def test_distillation_adds_the_reverse_kl_of_scored_tokens(batch: Batch) -> None:
    adv, old, teacher = batch.randn(poison=False), batch.randn(), batch.randn()
    teacher[::3] = torch.nan
    actual = add_distillation(adv, old, teacher, batch.mask, opd_kl_coef=0.5)
    scored = [t for _, t in batch.all_trained() if t % 3]
    expected = adv.clone()
    for t in scored:
        expected[t] -= 0.5 * (old[t] - teacher[t])
    same(actual, expected)


def test_rewards_have_the_range_of_fp32() -> None:
    """Statistics of what fp32 holds do not overflow; beyond it the advantages of a group were all 0, unsaid."""
    one_group = (np.zeros(3, np.int64), np.arange(3))
    advantages, _ = group_advantages(rewards_of(1e30, 2e30, 3e30), *one_group, "grpo")
    np.testing.assert_allclose(advantages, [-1, 0, 1], rtol=1e-6, atol=1e-6)
    for wrong in (np.inf, np.nan, 1e300):
        with pytest.raises(ValueError, match=r"rewards of rows \[1\] are not finite in fp32; use --reward-error"):
            group_advantages(rewards_of(0.0, wrong, 1.0), *one_group, "grpo")


def test_empty_and_fully_masked_batches_do_not_crash() -> None:
    nothing, none = torch.zeros(0), torch.zeros(0, dtype=torch.long)
    mask = torch.zeros(3, dtype=torch.bool)
    assert group_advantages(nothing.numpy(), none.numpy(), none.numpy(), "grpo")[0].shape == (0,)
    for t, m, segments in ((nothing, none.bool(), none), (torch.full((3,), torch.nan), mask, torch.zeros(3).long())):
        r = token_rewards(torch.ones(2), t, m, segments, 2, kl_coef=0.1)
        for out in (
            *gae(r, t, m, segments, gamma=1.0, lambd=1.0),
            discounted_returns(r, segments, gamma=1.0),
            whiten(t, m),
        ):
            assert out.tolist() == [0.0] * len(t)
