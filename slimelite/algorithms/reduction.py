"""From per-token losses to the loss of an optimizer step, whatever the packing.

The weight of every token is fixed from the *whole* step before its first micro-batch runs; the loss of a micro-batch
is then a plain weighted sum, and the gradients of all micro-batches and ranks add up (no averaging) to the same
gradient for every packing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slimelite.algorithms.packed import segment_sum, select

AGGREGATIONS = ("rollout", "token", "constant")


def row_weights(
    mask_sums: Tensor,
    rollout_ids: Tensor,
    mode: str,
    *,
    num_rollouts: int | None = None,
    max_response_len: int | None = None,
) -> Tensor:
    """The weight of each unmasked token of a row, for all N rows of one optimizer step on all ranks.

    ==========  ===================================================================================
    rollout     1 / (unmasked tokens of the row's rollout × rollouts of the step): the mean over rollouts of
                their token means; fan-out siblings share one denominator; a fully masked rollout counts as 0
                and stays in the divisor
    token       1 / unmasked tokens of the step (slime's ``--calculate-per-token-loss``, except that an empty
                response adds 0 tokens to the divisor, not 1; DAPO, arXiv:2503.14476)
    constant    1 / (N × max_response_len) (Dr.GRPO, arXiv:2503.20783)
    ==========  ===================================================================================

    Args:
        mask_sums: [N] unmasked tokens of each row.
        rollout_ids: [N] int64, equal for the fan-out siblings of one rollout.
        mode: one of ``AGGREGATIONS``.
        num_rollouts: divisor of ``rollout`` when it is not the number of different ids.
        max_response_len: tokens, for ``constant``.

    Returns:
        [N] float64; 0 for a row that has no unmasked token to weigh in modes ``rollout`` and ``token``.

    Raises:
        ValueError: an unknown mode, or ``constant`` without a positive max_response_len.
    """
    mask_sums = mask_sums.double()
    if mode == "rollout":
        unique_ids, rollout = torch.unique(rollout_ids, return_inverse=True)
        tokens = segment_sum(mask_sums, rollout, len(unique_ids))[rollout]
        divisor = tokens * (len(unique_ids) if num_rollouts is None else num_rollouts)
    elif mode == "token":
        divisor = mask_sums.sum().expand_as(mask_sums)
    elif mode == "constant":
        if not max_response_len:
            raise ValueError("--loss-aggregation constant divides by --rollout-max-response-len; set it")
        divisor = torch.full_like(mask_sums, float(len(mask_sums) * max_response_len))
    else:
        raise ValueError(f"unknown aggregation {mode!r}; --loss-aggregation takes {', '.join(AGGREGATIONS)}")
    return torch.where(divisor > 0, 1 / divisor.clamp(min=1), 0.0)


def token_weights(weights: Tensor, mask: Tensor, segments: Tensor) -> Tensor:
    """[T] weight of each token of a micro-batch, 0 where masked.

    ``weights``: [rows of the micro-batch] from `row_weights`; ``mask``: [T] bool; ``segments``: [T] int64.
    """
    return select(weights[segments], mask)


def weighted_sum(losses: Tensor, weights: Tensor) -> Tensor:
    """Σ losses·weights over [T], 0-d; a loss whose weight is 0 is not read."""
    return (select(losses, weights != 0) * weights.to(losses.dtype)).sum()
