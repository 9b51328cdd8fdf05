"""Policy losses against loops: values, gradients, clip fractions, extremes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from ragged import Batch, batches, bounded_exp, check, clip, few, mean, per_token, ratio_of
from torch import Tensor

from slimelite.algorithms.policy import cispo_loss, gspo_loss, ppo_clip_loss


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
        return ppo_clip_loss(lp, old, adv, batch.mask, eps_clip=low, eps_clip_high=high, eps_clip_c=c)[0]

    check(packed, naive, leaf, batch)


@few
@given(batch=batches)
def test_gspo_equals_the_loop(batch: Batch) -> None:
    leaf, old, adv = batch.randn(), batch.randn(), batch.randn()

    def naive(lp: Tensor) -> Tensor:
        ratios = [bounded_exp(mean([lp[t] - old[t] for t in batch.trained(r)])) for r in range(batch.rows)]
        return per_token(batch, lambda r, t: naive_clip(ratios[r], adv[t], 0.3, 0.4, 3.0))

    def packed(lp: Tensor) -> Tensor:
        return gspo_loss(
            lp, old, adv, batch.mask, batch.segments, batch.rows, eps_clip=0.3, eps_clip_high=0.4, eps_clip_c=3.0
        )[0]

    check(packed, naive, leaf, batch)


@few
@given(batch=batches)
def test_cispo_equals_the_loop(batch: Batch) -> None:
    leaf, old, adv = batch.randn(), batch.randn(), batch.randn()

    def naive(lp: Tensor) -> Tensor:
        return per_token(batch, lambda _, t: -clip(bounded_exp(lp[t] - old[t]), 0.7, 1.5).detach() * adv[t] * lp[t])

    check(lambda lp: cispo_loss(lp, old, adv, batch.mask, eps_clip=0.3, eps_clip_high=0.5)[0], naive, leaf, batch)


def test_metrics_are_shares_of_unmasked_tokens() -> None:
    old = torch.zeros(6)
    lp = torch.tensor([0.5, 0.5, -0.5, -0.5, 0.1, torch.nan])
    adv = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, 1.0])
    mask = torch.tensor([True] * 5 + [False])
    _, metrics = ppo_clip_loss(lp, old, adv, mask, eps_clip=0.2, eps_clip_c=1.3)
    # clipped: ratio too high with A > 0, too low with A < 0; dual clip: e^0.5 > 1.3 with A < 0
    assert ratio_of(metrics["pg_clipfrac"]) == pytest.approx(2 / 5)
    assert ratio_of(metrics["pg_dual_clipfrac"]) == pytest.approx(1 / 5)
    assert ratio_of(metrics["ppo_kl"]) == pytest.approx(-0.1 / 5)
    assert ratio_of(metrics["logprob_abs_diff"]) == pytest.approx(2.1 / 5)
    assert ratio_of(metrics["ois"]) == pytest.approx(sum(math.exp(x) for x in (0.5, 0.5, -0.5, -0.5, 0.1)) / 5)
    assert ratio_of(cispo_loss(lp, old, adv, mask, eps_clip=0.2)[1]["pg_clipfrac"]) == pytest.approx(4 / 5)


def test_on_policy_gradient_is_reinforce() -> None:
    """old = sg(lp): every loss has the gradient −A of plain policy gradient (gspo: of its response mean)."""
    lp = torch.tensor([-0.3, -1.0, -2.0, -0.5], dtype=torch.float64)
    adv = torch.tensor([1.0, 1.0, -2.0, -2.0], dtype=torch.float64)
    mask, segments = torch.ones(4, dtype=torch.bool), torch.tensor([0, 0, 1, 1])
    for loss in (
        lambda x: ppo_clip_loss(x, x.detach(), adv, mask, eps_clip=0.2, eps_clip_c=3.0),
        lambda x: gspo_loss(x, x.detach(), adv, mask, segments, 2, eps_clip=3e-4),
        lambda x: cispo_loss(x, x.detach(), adv, mask, eps_clip=1.0, eps_clip_high=4.0),
    ):
        x = lp.clone().requires_grad_()
        losses, metrics = loss(x)
        torch.testing.assert_close(torch.autograd.grad(losses.sum(), x)[0], -adv)
        assert ratio_of(metrics["pg_clipfrac"]) == 0.0


@pytest.mark.parametrize("difference", [-1e3, 1e3])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
@pytest.mark.parametrize("name", ["ppo", "gspo", "cispo"])
def test_extreme_log_ratios_stay_finite(difference: float, advantage: float, name: str) -> None:
    lp = torch.tensor([difference], requires_grad=True)
    old, adv, mask = torch.zeros(1), torch.tensor([advantage]), torch.ones(1, dtype=torch.bool)
    if name == "ppo":
        losses, _ = ppo_clip_loss(lp, old, adv, mask, eps_clip=0.2)
    elif name == "gspo":
        # a second, empty row
        losses, _ = gspo_loss(lp, old, adv, mask, torch.zeros(1, dtype=torch.long), 2, eps_clip=0.2)
    else:
        losses, _ = cispo_loss(lp, old, adv, mask, eps_clip=0.2)
    losses.sum().backward()
    assert losses.isfinite().all()
    assert lp.grad is not None
    assert lp.grad.isfinite().all()


def test_dual_clip_must_exceed_one() -> None:
    one = torch.ones(1)
    with pytest.raises(ValueError, match="--eps-clip-c"):
        ppo_clip_loss(one, one, one, one.bool(), eps_clip=0.2, eps_clip_c=1.0)


def test_half_precision_is_computed_in_fp32() -> None:
    half = torch.full((1,), -1.0, dtype=torch.bfloat16)
    assert ppo_clip_loss(half, half, half, torch.ones(1, dtype=torch.bool), eps_clip=0.2)[0].dtype == torch.float32
