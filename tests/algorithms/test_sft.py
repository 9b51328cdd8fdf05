"""The supervised loss: what a masked cross entropy of the logits gives."""

from __future__ import annotations

import torch
from hypothesis import given
from ragged import Batch, batches, check, few, per_token
from torch.nn.functional import cross_entropy

from slimelite.algorithms.reduction import row_weights, token_weights, weighted_sum
from slimelite.algorithms.sft import sft_loss


@few
@given(batch=batches)
def test_sft_loss_equals_the_loop(batch: Batch) -> None:
    check(lambda lp: sft_loss(lp, batch.mask), lambda lp: per_token(batch, lambda _, t: -lp[t]), batch.randn(), batch)


def test_token_mean_is_torch_cross_entropy() -> None:
    logits, targets = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)), torch.tensor([1, 0, 6, 2, 3])
    mask, segments = torch.tensor([True, False, True, True, True]), torch.tensor([0, 0, 0, 1, 1])
    log_probs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    weights = token_weights(row_weights(torch.tensor([2, 2]), torch.arange(2), "token"), mask, segments)
    expected = cross_entropy(logits, targets.masked_fill(~mask, -100))
    torch.testing.assert_close(weighted_sum(sft_loss(log_probs, mask), weights), expected)
