"""The critic's loss against a loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from ragged import Batch, batches, check, clip, few, per_token, ratio_of
from torch import Tensor

from slimelite.algorithms.value import explained_variance, value_loss


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
