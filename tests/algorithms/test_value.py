"""The critic's loss against a loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from ragged import Batch, batches, check, clip, few, per_token, ratio_of
from torch import Tensor

from slimelite.algorithms.value import value_loss


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
