"""KL estimators against a loop, at extremes, and near zero."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from ragged import Batch, batches, bounded_exp, check, clip, few, per_token

from slimelite.algorithms.kl import KL_KINDS, kl_estimate

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
def test_extreme_log_ratios_stay_finite(kind: str, difference: float) -> None:
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
