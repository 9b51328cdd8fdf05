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
    k3 = (bounded_exp(-d) - 1 + d) * ratio
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


@pytest.mark.parametrize("kind", KL_KINDS)
@pytest.mark.parametrize("difference", [-1e3, 1e3])
def test_extreme_log_ratios_stay_finite(kind: str, difference: float) -> None:
    lp = torch.tensor([difference], requires_grad=True)
    kl = kl_estimate(lp, torch.zeros(1), ONE, kind, old=torch.zeros(1))
    kl.sum().backward()
    assert kl.isfinite().all()
    assert lp.grad is not None
    assert lp.grad.isfinite().all()


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
