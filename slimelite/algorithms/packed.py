"""Shared operations on packed tensors: safe selection, safe exponentials, sums over rows, the loss of a step.

In this package ``[T]`` is the shape of a tensor with the response tokens of some rows, one row after the other.
``mask: [T] bool`` is True for each token that is trained on. ``segments: [T] int64`` is the row (0 … num_segments − 1)
of each token. A row's tokens are contiguous and in order, and a row may have no tokens.

The weight of every token is computed from the *whole* optimizer step, before the first micro-batch of the step runs.
With these weights, the loss of a micro-batch is a weighted sum of its token losses. The gradients of all micro-batches
and ranks are added, not averaged. So the total gradient does not depend on the packing.
"""

from __future__ import annotations

import torch
from torch import Tensor

# (sum, weight), both 0-d float64. The mean over micro-batches and ranks is the sum of sums / the sum of weights
Metric = tuple[Tensor, Tensor]
Metrics = dict[str, Metric]

MAX_LOG_RATIO = 20.0


def upcast(values: Tensor) -> Tensor:
    """``values`` as float32, or unchanged if they are float64."""
    return values if values.dtype == torch.float64 else values.float()


def select(values: Tensor, mask: Tensor) -> Tensor:
    """[T] ``values`` in at least fp32, 0 where ``mask`` is False.

    Apply `select` to the *inputs* of a formula. Then an inf or NaN at a masked token does not change the formula's
    value or gradient. A multiplication by the mask does not have this effect, because 0·inf = NaN.
    """
    return torch.where(mask, upcast(values), 0.0)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio that is clamped to [−20, 20]. Outside that range the gradient is 0."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def segment_sum(values: Tensor, segments: Tensor, num_segments: int) -> Tensor:
    """[num_segments] sum of ``values`` [T] over the tokens of each row; 0 for a row without tokens."""
    return values.new_zeros(num_segments).index_add(0, segments, values)


def segment_mean(values: Tensor, mask: Tensor, segments: Tensor, num_segments: int) -> Tensor:
    """[num_segments] mean of ``values`` [T] over the unmasked tokens of each row; 0 for a fully masked row."""
    total = segment_sum(select(values, mask), segments, num_segments)
    count = segment_sum(mask.to(total.dtype), segments, num_segments)
    return total / count.clamp(min=1)


def mean_metric(values: Tensor, mask: Tensor) -> Metric:
    """The mean of ``values`` [T] over unmasked tokens, as a (sum, weight) pair."""
    return select(values.detach(), mask).sum(dtype=torch.float64), mask.sum(dtype=torch.float64)


def row_weights(mask_sums: Tensor, rollout_ids: Tensor, mode: str, *, max_response_len: int | None = None) -> Tensor:
    """For each row, the weight of its unmasked tokens in the loss. The N rows are all rows of an optimizer step, over
    all ranks.

    Args:
        mask_sums: [N] number of unmasked tokens of each row.
        rollout_ids: [N] int64, equal for the fan-out siblings of one rollout.
        mode: one of ``AGGREGATIONS``. The mode selects the divisor of each token's loss.
        max_response_len: a number of tokens; only the mode ``constant`` needs it.

    Returns:
        [N] float64. A row whose divisor is 0 has no unmasked token, and gets weight 0.

    Raises:
        ValueError: an unknown mode, or ``constant`` without a positive max_response_len.
    """
    sums = mask_sums.double()
    rollouts, rollout = torch.unique(rollout_ids, return_inverse=True)
    match mode:
        case "rollout":  # the divisor is: tokens of the rollout × rollouts of the step. So the loss is the mean over
            # rollouts of their token means. Fan-out siblings share one divisor. A fully masked rollout counts as a
            # rollout whose loss is 0
            divisor = segment_sum(sums, rollout, len(rollouts))[rollout] * len(rollouts)
        case "token":  # the divisor is: tokens of the step (DAPO, arXiv:2503.14476). slime's
            # ``--calculate-per-token-loss`` is equal, except that there an empty response adds 1 token
            divisor = sums.sum().expand_as(sums)
        case "constant":  # the divisor is: rollouts of the step × max_response_len (Dr.GRPO, arXiv:2503.20783). The
            # number of rows of a rollout does not matter
            if not max_response_len:
                raise ValueError("--loss-aggregation constant divides by --rollout-max-response-len; set it")
            divisor = torch.full_like(sums, float(len(rollouts) * max_response_len))
        case _:
            raise ValueError(f"--loss-aggregation {mode}: there is no such reduction")
    return torch.where(divisor > 0, 1 / divisor.clamp(min=1), 0.0)


def weighted_sum(losses: Tensor, weights: Tensor) -> Tensor:
    """Σ losses·weights over [T], 0-d. A loss with weight 0 is not read, so it may be NaN."""
    return (select(losses, weights != 0) * weights.to(losses.dtype)).sum()


def checked(values: object, length: int, what: str) -> Tensor:
    """Return ``values`` if their shape is [length]. ``what``: the function that returned ``values``, for the message.

    Raises:
        ValueError: the shape of ``values`` is not [length]. Broadcasting or indexing such values would give a wrong
            result.
    """
    if not isinstance(values, Tensor) or values.shape != (length,):
        actual = f"shape {list(values.shape)}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
        raise ValueError(f"{what} returned {actual}: make it a tensor of shape [{length}]")
    return values
