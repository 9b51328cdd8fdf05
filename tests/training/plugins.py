"""One hook of each kind that training calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slimelite.algorithms.packed import weighted_sum
from slimelite.arguments import Args
from slimelite.samples.table import SampleTable
from slimelite.training.batch import MicroBatch
from slimelite.training.columns import TokenColumns
from slimelite.training.loss import Loss, policy_gradient


def twice_the_likelihood(
    args: Args, batch: MicroBatch, log_probs: Tensor, entropy: Tensor
) -> tuple[Tensor, dict[str, Any]]:
    return -2 * torch.where(batch.mask, log_probs, 0.0), {"tokens": (batch.mask.sum(), torch.tensor(1))}


def nan_without_a_gradient(
    args: Args, batch: MicroBatch, log_probs: Tensor, entropy: Tensor
) -> tuple[Tensor, dict[str, Any]]:
    """Its value is NaN and its gradient 0, as when a clamp or a ``where`` stands between the two."""
    return log_probs.nan_to_num() * 0 + torch.nan, {}


def nan_on_the_last_rank(
    args: Args, batch: MicroBatch, log_probs: Tensor, entropy: Tensor
) -> tuple[Tensor, dict[str, Any]]:
    last = dist.get_rank() == dist.get_world_size() - 1
    return log_probs * 0 + (torch.nan if last else 0.0), {}


def without_gradient(
    args: Args, batch: MicroBatch, log_probs: Tensor, entropy: Tensor
) -> tuple[Tensor, dict[str, Any]]:
    return torch.ones_like(log_probs), {}


def one_number(args: Args, batch: MicroBatch, log_probs: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return -log_probs.mean(), {}


def half_squared_log_ratio(
    args: Args, batch: MicroBatch, log_probs: Tensor, entropy: Tensor
) -> tuple[Tensor, dict[str, Any]]:
    """The KL to the reference, as --kl-loss-type k2 estimates it, and no more."""
    assert batch.ref is not None
    return args.kl_loss_coef * torch.where(batch.mask, log_probs - batch.ref, 0.0) ** 2 / 2, {}


def all_ones(args: Args, table: SampleTable, columns: TokenColumns) -> None:
    assert columns.old is not None
    columns.advantages = torch.ones_like(columns.advantages)


def no_number(args: Args, table: SampleTable, columns: TokenColumns) -> None:
    columns.advantages = columns.advantages / 0.0


def tis_as_slime_does(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: list[Tensor],
    rollout_log_probs: list[Tensor],
    loss_masks: list[Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
    **kwargs: Any,
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """Truncated importance sampling that also drops responses of a single token."""
    from slime.backends.megatron_utils.cp_utils import all_gather_with_cp, slice_log_prob_with_cp

    lengths = list(zip(total_lengths, response_lengths, strict=True))
    old = [all_gather_with_cp(x, *n) for x, n in zip(train_log_probs, lengths, strict=True)]
    roll = [all_gather_with_cp(x, *n) for x, n in zip(rollout_log_probs, lengths, strict=True)]
    weights = [(a - b).exp().clamp(args.tis_clip_low, args.tis_clip) for a, b in zip(old, roll, strict=True)]
    weights = [slice_log_prob_with_cp(w, *n) for w, n in zip(weights, lengths, strict=True)]
    masks = [mask * (len(mask) > 1) for mask in loss_masks]
    assert all(total > response for total, response in lengths)
    return pg_loss * torch.cat(weights), masks, {"my_weight": torch.cat(weights)}


def constant_length_reducer(
    total_lengths: list[int], response_lengths: list[int], loss_masks: list[Tensor], calculate_per_token_loss: bool
) -> Callable[[Tensor], Tensor]:
    """slime's Dr.GRPO example: divide by a constant."""

    def reduce(losses: Tensor) -> Tensor:
        rows = zip(losses.split(response_lengths), loss_masks, strict=True)
        divisor = 1.0 if calculate_per_token_loss else 16.0
        return torch.stack([(row * mask).sum() / divisor for row, mask in rows]).sum()

    return reduce


def longest_response_reducer(
    total_lengths: list[int], response_lengths: list[int], loss_masks: list[Tensor], calculate_per_token_loss: bool
) -> Callable[[Tensor], Tensor]:
    """Divide by the longest response of the whole step, which no micro-batch knows."""
    mask, longest = torch.cat(loss_masks), max(response_lengths)
    return lambda losses: (losses * mask).sum() / longest


def largest_loss_reducer(*_: Any) -> Callable[[Tensor], Tensor]:
    return lambda losses: losses.max() ** 2


def unclamped_reducer(
    total_lengths: list[int], response_lengths: list[int], loss_masks: list[Tensor], calculate_per_token_loss: bool
) -> Callable[[Tensor], Tensor]:
    def reduce(losses: Tensor) -> Tensor:
        rows = zip(losses.split(response_lengths), loss_masks, strict=True)
        return torch.stack([(row * mask).sum() / mask.sum() for row, mask in rows]).sum()

    return reduce


def entropy_bonus(args: Args, batch: MicroBatch, log_probs: Tensor, entropy: Tensor) -> Loss:
    """What ``--entropy-coef 0.5`` adds."""
    policy = policy_gradient(args, batch, log_probs, entropy)
    return replace(policy, total=policy.total - 0.5 * weighted_sum(entropy, batch.weights))


def whole_without_gradient(args: Args, batch: MicroBatch, log_probs: Tensor, entropy: Tensor) -> Loss:
    policy = policy_gradient(args, batch, log_probs, entropy)
    return replace(policy, total=policy.total.detach())
