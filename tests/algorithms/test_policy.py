"""Policy losses, the KL and the critic's loss against loops: values, gradients, clip fractions, extremes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from ragged import Batch, batches, bounded_exp, check, clip, few, mean, per_token, ratio_of
from torch import Tensor

from slimelite.algorithms.estimators import ESTIMATORS
from slimelite.algorithms.losses import KL_KINDS
from slimelite.algorithms.policy import (
    explained_variance,
    kl_estimate,
    policy_loss,
    value_loss,
)


def where(batch: Batch) -> tuple[Tensor, Tensor, int]:
    return batch.mask, batch.segments, batch.rows


def naive_clip(ratio: Tensor, advantage: Tensor, low: float, high: float, c: float | None) -> Tensor:
    first, second = -ratio * advantage, -clip(ratio, 1 - low, 1 + high) * advantage
    loss = second if second > first else first
    if c is not None and advantage < 0 and loss > -c * advantage:
        loss = -c * advantage
    return loss


@pytest.mark.parametrize(("low", "high", "c"), [(0.2, None, None), (0.2, 0.28, None), (0.2, 0.28, 3.0)])
@few
@given(batch=batches)
def test_ppo_equals_the_loop(batch: Batch, low: float, high: float | None, c: float | None) -> None:
    leaf, old, adv = batch.randn(), batch.randn(), batch.randn()

    def naive(lp: Tensor) -> Tensor:
        return per_token(
            batch, lambda _, t: naive_clip(bounded_exp(lp[t] - old[t]), adv[t], low, high if high else low, c)
        )

    def packed(lp: Tensor) -> Tensor:
        return policy_loss(lp, old, adv, *where(batch), "grpo", eps_clip=low, eps_clip_high=high, eps_clip_c=c)[0]

    check(packed, naive, leaf, batch)


@few
@given(batch=batches)
def test_gspo_equals_the_loop(batch: Batch) -> None:
    leaf, old, adv = batch.randn(), batch.randn(), batch.randn()

    def naive(lp: Tensor) -> Tensor:
        ratios = [bounded_exp(mean([lp[t] - old[t] for t in batch.trained(r)])) for r in range(batch.rows)]
        return per_token(batch, lambda r, t: naive_clip(ratios[r], adv[t], 0.3, 0.4, 3.0))

    def packed(lp: Tensor) -> Tensor:
        return policy_loss(lp, old, adv, *where(batch), "gspo", eps_clip=0.3, eps_clip_high=0.4, eps_clip_c=3.0)[0]

    check(packed, naive, leaf, batch)


@few
@given(batch=batches)
def test_cispo_equals_the_loop(batch: Batch) -> None:
    leaf, old, adv = batch.randn(), batch.randn(), batch.randn()

    def naive(lp: Tensor) -> Tensor:
        return per_token(batch, lambda _, t: -clip(bounded_exp(lp[t] - old[t]), 0.7, 1.5).detach() * adv[t] * lp[t])

    def packed(lp: Tensor) -> Tensor:
        return policy_loss(lp, old, adv, *where(batch), "cispo", eps_clip=0.3, eps_clip_high=0.5)[0]

    check(packed, naive, leaf, batch)


def test_metrics_are_shares_of_unmasked_tokens() -> None:
    old = torch.zeros(6)
    lp = torch.tensor([0.5, 0.5, -0.5, -0.5, 0.1, torch.nan])
    adv = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, 1.0])
    mask = torch.tensor([True] * 5 + [False])
    one_row = (torch.zeros(6, dtype=torch.long), 1)
    _, metrics = policy_loss(lp, old, adv, mask, *one_row, "grpo", eps_clip=0.2, eps_clip_c=1.3)
    # clipped: ratio too high with A > 0, too low with A < 0; dual clip: e^0.5 > 1.3 with A < 0
    assert ratio_of(metrics["pg_clipfrac"]) == pytest.approx(2 / 5)
    assert ratio_of(metrics["pg_dual_clipfrac"]) == pytest.approx(1 / 5)
    assert ratio_of(metrics["ppo_kl"]) == pytest.approx(-0.1 / 5)
    assert ratio_of(metrics["logprob_abs_diff"]) == pytest.approx(2.1 / 5)
    assert ratio_of(metrics["ois"]) == pytest.approx(sum(math.exp(x) for x in (0.5, 0.5, -0.5, -0.5, 0.1)) / 5)
    _, metrics = policy_loss(lp, old, adv, mask, *one_row, "cispo", eps_clip=0.2)
    assert ratio_of(metrics["pg_clipfrac"]) == pytest.approx(4 / 5)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_on_policy_gradient_is_reinforce(estimator: str) -> None:
    """old = sg(lp): every loss has the gradient −A of plain policy gradient (gspo: of its response mean)."""
    lp = torch.tensor([-0.3, -1.0, -2.0, -0.5], dtype=torch.float64)
    adv = torch.tensor([1.0, 1.0, -2.0, -2.0], dtype=torch.float64)
    mask, segments = torch.ones(4, dtype=torch.bool), torch.tensor([0, 0, 1, 1])
    x = lp.clone().requires_grad_()
    losses, metrics = policy_loss(x, lp, adv, mask, segments, 2, estimator, eps_clip=0.2)
    torch.testing.assert_close(torch.autograd.grad(losses.sum(), x)[0], -adv)
    assert ratio_of(metrics["pg_clipfrac"]) == 0.0


@pytest.mark.parametrize("difference", [-1e3, 1e3])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_extreme_log_ratios_stay_finite(difference: float, advantage: float, estimator: str) -> None:
    lp = torch.tensor([difference], requires_grad=True)
    old, adv, mask = torch.zeros(1), torch.tensor([advantage]), torch.ones(1, dtype=torch.bool)
    # of two rows the second one is empty
    losses, _ = policy_loss(lp, old, adv, mask, torch.zeros(1, dtype=torch.long), 2, estimator, eps_clip=0.2)
    losses.sum().backward()
    assert losses.isfinite().all()
    assert lp.grad is not None
    assert lp.grad.isfinite().all()


def test_dual_clip_must_exceed_one() -> None:
    one = torch.ones(1)
    with pytest.raises(ValueError, match="--eps-clip-c"):
        policy_loss(one, one, one, one.bool(), one.long() - 1, 1, "grpo", eps_clip=0.2, eps_clip_c=1.0)


def test_half_precision_is_computed_in_fp32() -> None:
    half, mask = torch.full((1,), -1.0, dtype=torch.bfloat16), torch.ones(1, dtype=torch.bool)
    losses, _ = policy_loss(half, half, half, mask, torch.zeros(1, dtype=torch.long), 1, "grpo", eps_clip=0.2)
    assert losses.dtype == torch.float32


ONE = torch.ones(1, dtype=torch.bool)


def naive_kl(d: torch.Tensor, kind: str, ratio: torch.Tensor | float) -> torch.Tensor:
    if kind == "k1":
        return d * ratio
    if kind == "k2":
        return d * d / 2 * ratio
    k3 = (torch.exp(-d) - 1 + d) * ratio
    return clip(k3, -10.0, 10.0) if kind == "low_var_kl" else k3


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("kind", KL_KINDS)
@few
@given(batch=batches)
def test_every_kind_equals_the_loop(batch: Batch, kind: str, unbiased: bool) -> None:
    leaf, base, old = batch.randn(2.0), batch.randn(2.0), batch.randn(2.0)

    def naive(lp: torch.Tensor) -> torch.Tensor:
        return per_token(
            batch, lambda _, t: naive_kl(lp[t] - base[t], kind, bounded_exp(lp[t] - old[t]) if unbiased else 1.0)
        )

    check(lambda lp: kl_estimate(lp, base, batch.mask, kind, old=old if unbiased else None), naive, leaf, batch)


def value_and_slope(
    kind: str, lp: list[float], base: float = 0.0, old: list[float] | None = None, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """[T] estimates of one policy log-prob each, and their derivatives with respect to it, in float64."""
    leaf = torch.tensor(lp, dtype=dtype, requires_grad=True)
    mask = torch.ones(len(lp), dtype=torch.bool)
    sampled = None if old is None else torch.tensor(old, dtype=dtype)
    kl = kl_estimate(leaf, torch.full((len(lp),), base, dtype=dtype), mask, kind, old=sampled)
    kl.sum().backward()
    assert leaf.grad is not None
    return kl.detach().double(), leaf.grad.double()


# both sides of ±20, where the exponential of k3 is clamped
DIFFERENCES = [-1e4, -100.0, -25.0, -20.01, -20.0, -19.99, -10.0, -1.0, 0.0, 1.0, 10.0, 19.99, 20.0, 20.01, 25.0, 1e4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k3_falls_to_zero_and_rises_from_it_at_every_distance(dtype: torch.dtype) -> None:
    """e^(−d) − 1 + d is convex; its clamp must not turn the pull to the reference around, nor end it."""
    value, slope = value_and_slope("k3", DIFFERENCES, dtype=dtype)
    d = torch.tensor(DIFFERENCES, dtype=torch.float64)
    assert value.isfinite().all()
    assert (value.diff()[d[1:] <= 0] < 0).all()
    assert (value.diff()[d[:-1] >= 0] > 0).all()
    assert (slope.sign() == d.sign()).all()
    assert (slope.diff() >= 0).all(), "a convex function has a growing slope"
    near = d.abs() <= 20
    torch.testing.assert_close(slope[near], 1 - torch.exp(-d[near]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_slope_of_unbiased_k3_is_the_weighted_difference(dtype: torch.dtype) -> None:
    """Two exponentials cancel in the derivative of w·(e^(−d) − 1 + d), w = e^(lp − old): w·d is left, which is exact
    also where the sum of the two would be rounding noise, or of the wrong sign where one is clamped.
    """
    _, slope = value_and_slope("k3", DIFFERENCES, old=DIFFERENCES, dtype=dtype)  # w is 1
    torch.testing.assert_close(slope, torch.tensor(DIFFERENCES, dtype=torch.float64), rtol=1e-6, atol=0)
    # a weight beyond its own clamp is large, and leaves the sign alone
    _, slope = value_and_slope("k3", [-25.0, 25.0], old=[-50.0, 0.0], dtype=dtype)
    torch.testing.assert_close(slope, 25 * torch.tensor([-1, 1]) * torch.tensor(20.0).double().exp(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("kind", KL_KINDS)
def test_values_are_what_slopes_add_up_to(kind: str, unbiased: bool) -> None:
    """Numerical derivatives in float64, on both sides of every clamp."""
    lp = [-30.0, -21.0, -19.0, -12.0, -5.0, -1.0, 0.5, 5.0, 12.0, 19.0, 21.0, 30.0]
    old = [x - 0.3 for x in lp] if unbiased else None
    _, slope = value_and_slope(kind, lp, old=old, dtype=torch.float64)
    step = 1e-6
    high, low = (value_and_slope(kind, [x + e for x in lp], old=old, dtype=torch.float64)[0] for e in (step, -step))
    numerical = (high - low) / (2 * step)
    if unbiased and kind == "k3":
        # the difference of two large numbers tells nothing; the test above has these slopes
        kept = torch.tensor(lp) > -10
        slope, numerical = slope[kept], numerical[kept]
    torch.testing.assert_close(slope, numerical, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", KL_KINDS)
@pytest.mark.parametrize("difference", [-1e4, 1e4])
def test_extreme_log_ratios_of_a_kl_stay_finite(kind: str, difference: float) -> None:
    for old in (None, [0.0], [2 * difference]):
        value, slope = value_and_slope(kind, [difference], old=old)
        assert value.isfinite().all()
        assert slope.isfinite().all()


def test_low_var_kl_is_bounded_and_k3_is_precise_near_zero() -> None:
    d = torch.tensor([1e-4], dtype=torch.float32)
    k3 = kl_estimate(d, torch.zeros(1), ONE, "k3")
    # d²/2 = 5e-9 is far below what exp(−d) − 1 + d could resolve in fp32
    assert abs(float(k3) - 5e-9) < 2e-11
    assert float(kl_estimate(torch.tensor([-9.0]), torch.zeros(1), ONE, "low_var_kl")) == 10.0


def test_k1_has_zero_mean_gradient_and_k2_has_the_gradient_of_kl() -> None:
    """Summed exactly over a small vocabulary: Σ π ∇k1 = 0, and Σ π ∇k2 = ∇KL, as does unbiased k3."""
    base = torch.log_softmax(torch.tensor([0.3, -1.0, 0.5, 2.0], dtype=torch.float64), 0)
    start = torch.tensor([1.0, 0.2, -0.7, 0.1], dtype=torch.float64)
    mask = torch.ones(4, dtype=torch.bool)

    def expected_gradient(kind: str, unbiased: bool = False) -> torch.Tensor:
        logits = start.clone().requires_grad_()
        lp = torch.log_softmax(logits, 0)
        kl = kl_estimate(lp, base, mask, kind, old=lp.detach() if unbiased else None)
        (kl * lp.detach().exp()).sum().backward()
        assert logits.grad is not None
        return logits.grad

    logits = start.clone().requires_grad_()
    lp = torch.log_softmax(logits, 0)
    (lp.exp() * (lp - base)).sum().backward()
    assert logits.grad is not None
    torch.testing.assert_close(expected_gradient("k1"), torch.zeros(4, dtype=torch.float64))
    for kind, unbiased in (("k2", False), ("k1", True), ("k3", True)):
        torch.testing.assert_close(expected_gradient(kind, unbiased), logits.grad)


def test_unknown_kind_names_the_flag() -> None:
    with pytest.raises(ValueError, match="--kl-loss-type"):
        kl_estimate(torch.zeros(1), torch.zeros(1), ONE, "k4")


def test_dtypes() -> None:
    half = torch.zeros(1, dtype=torch.bfloat16)
    assert kl_estimate(half, half, ONE, "k3").dtype == torch.float32
    assert kl_estimate(half.double(), half.double(), ONE, "k3").dtype == torch.float64


@few
@given(batch=batches)
def test_value_loss_equals_the_loop(batch: Batch) -> None:
    leaf, old, returns = batch.randn(), batch.randn(), batch.randn()

    def naive(values: Tensor) -> Tensor:
        def one(_: int, t: int) -> Tensor:
            first = (old[t] + clip(values[t] - old[t], -0.2, 0.2) - returns[t]) ** 2
            second = (values[t] - returns[t]) ** 2
            return first if first > second else second

        return per_token(batch, one)

    check(lambda values: value_loss(values, old, returns, batch.mask, value_clip=0.2)[0], naive, leaf, batch)


def test_clipped_values_get_no_gradient_and_are_counted() -> None:
    values = torch.tensor([1.0, 0.1], requires_grad=True)
    losses, metrics = value_loss(values, torch.zeros(2), torch.ones(2), torch.ones(2, dtype=torch.bool), value_clip=0.2)
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([0.64, 0.81])
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.0, -1.8])
    assert ratio_of(metrics["value_clipfrac"]) == 0.5
    assert ratio_of(metrics["values"]) == pytest.approx(0.55)


def test_rounding_is_not_taken_for_clipping() -> None:
    old = torch.full((1000,), 1e-3)
    values = old + torch.linspace(-0.19, 0.19, 1000)
    _, metrics = value_loss(values, old, torch.zeros(1000), torch.ones(1000, dtype=torch.bool), value_clip=0.2)
    assert ratio_of(metrics["value_clipfrac"]) == 0


def test_explained_variance() -> None:
    returns = torch.tensor([0.0, 1.0, 3.0, torch.nan])
    mask = torch.tensor([True, True, True, False])

    def explained(values: list[float]) -> float:
        return ratio_of(explained_variance(torch.tensor([*values, torch.inf]), returns, mask))

    assert explained([0.0, 1.0, 3.0]) == 1
    assert explained([5.0, 6.0, 8.0]) == 1, "a constant error is no lack of explanation"
    assert explained([7.0, 7.0, 7.0]) == pytest.approx(0, abs=1e-12)
    assert explained([3.0, 1.0, 0.0]) < 0
    # residuals -1/2, 1/2, 1 have variance 7/18, the returns 14/9
    assert explained([0.5, 0.5, 2.0]) == pytest.approx(1 - (7 / 18) / (14 / 9))
    for kept in (torch.tensor([True, False, False, False]), torch.zeros(4, dtype=torch.bool)):
        assert explained_variance(returns, returns, kept)[1] == 0, "what does not vary cannot be explained"
