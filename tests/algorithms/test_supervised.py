"""SFT is a masked cross entropy of the logits; preference losses equal a loop over pairs, and hold at extremes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged import Batch, batches, check, few, mean, per_token, ratio_of, token_weights
from torch import Tensor
from torch.nn.functional import cross_entropy

from slimelite.algorithms.packed import row_weights, weighted_sum
from slimelite.algorithms.supervised import dpo_loss, sft_loss


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


@pytest.mark.parametrize(("kind", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.1), ("ipo", 0.0)])
@few
@given(batch=batches, data=st.data())
def test_dpo_equals_the_loop(batch: Batch, kind: str, smoothing: float, data: st.DataObject) -> None:
    rows = data.draw(st.permutations(range(batch.rows)))
    pairs = list(zip(rows[::2], rows[1::2], strict=False))
    chosen, rejected = (torch.tensor([p[i] for p in pairs], dtype=torch.long) for i in (0, 1))
    leaf, ref = batch.randn(), batch.randn()

    def naive(lp: Tensor) -> Tensor:
        def score(row: int) -> Tensor:
            terms = [lp[t] - ref[t] for t in batch.trained(row)]
            return mean(terms) if kind == "ipo" else mean(terms) * len(terms)

        losses = [torch.zeros(0, dtype=torch.float64)]
        for winner, loser in pairs:
            delta = score(winner) - score(loser)
            if kind == "ipo":
                loss = (delta - 1 / (2 * 0.3)) ** 2
            else:
                loss = (1 - smoothing) * torch.log(1 + torch.exp(-0.3 * delta))
                loss = loss + smoothing * torch.log(1 + torch.exp(0.3 * delta))
            losses.append(loss[None])
        return torch.cat(losses)

    def packed(lp: Tensor) -> Tensor:
        return dpo_loss(
            lp,
            ref,
            batch.mask,
            batch.segments,
            batch.rows,
            chosen,
            rejected,
            beta=0.3,
            kind=kind,
            label_smoothing=smoothing,
        )[0]

    check(packed, naive, leaf, batch)


def pair(chosen: float, rejected: float, kind: str) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Loss, gradient and metrics of one pair of one-token responses."""
    lp = torch.tensor([chosen, rejected], requires_grad=True)
    mask, rows = torch.ones(2, dtype=torch.bool), torch.tensor([0, 1])
    losses, metrics = dpo_loss(lp, torch.zeros(2), mask, rows, 2, rows[:1], rows[1:], beta=0.5, kind=kind)
    return losses, torch.autograd.grad(losses.sum(), lp)[0], {k: ratio_of(v) for k, v in metrics.items()}


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
@pytest.mark.parametrize("difference", [-1e3, 1e3])
def test_extreme_margins_stay_finite(kind: str, difference: float) -> None:
    losses, gradient, _ = pair(difference, 0.0, kind)
    assert losses.isfinite().all()
    assert gradient.isfinite().all()


def test_metrics_of_a_pair() -> None:
    losses, gradient, metrics = pair(1.0, -1.0, "sigmoid")
    assert losses.item() == pytest.approx(math.log(1 + math.exp(-1.0)))
    assert gradient[0] < 0 < gradient[1]
    assert metrics == {
        "rewards/chosen": 0.5,
        "rewards/rejected": -0.5,
        "rewards/margins": 1.0,
        "rewards/accuracies": 1.0,
        "logps/chosen": 1.0,
        "logps/rejected": -1.0,
    }
    assert pair(-1.0, 1.0, "sigmoid")[2]["rewards/accuracies"] == 0.0


def test_empty_responses_are_a_tie() -> None:
    none = torch.zeros(0)
    rows = torch.tensor([0, 1])
    losses, _ = dpo_loss(none, none, none.bool(), none.long(), 2, rows[:1], rows[1:], beta=0.1)
    assert losses.item() == pytest.approx(math.log(2))


def test_unknown_kind() -> None:
    one, rows = torch.zeros(2), torch.tensor([0, 1])
    with pytest.raises(ValueError, match="--dpo-loss hinge"):
        dpo_loss(one, one, one == 0, rows, 2, rows[:1], rows[1:], beta=0.1, kind="hinge")
