"""Losses on responses from a data set: supervised fine-tuning, and direct preference optimisation on pairs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from slimelite.algorithms.losses import DPO_KINDS
from slimelite.algorithms.packed import Metrics, mean_metric, segment_mean, segment_sum, select


def sft_loss(log_probs: Tensor, mask: Tensor) -> Tensor:
    """[T] negative log-likelihood −log_probs, 0 where masked.

    ``log_probs``: [T] at temperature 1, whatever the rollout temperature is (slime divides by it); ``mask``: [T] bool.
    """
    return -select(log_probs, mask)


def dpo_loss(
    log_probs: Tensor,
    ref: Tensor,
    mask: Tensor,
    segments: Tensor,
    num_segments: int,
    chosen: Tensor,
    rejected: Tensor,
    *,
    beta: float,
    kind: str = "sigmoid",
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Metrics]:
    """Loss of each preference pair by a function of ``DPO_KINDS`` of Δ = h(chosen) − h(rejected), where h is the sum or
    the mean of log_probs − ref over the unmasked tokens of a response.

    Args:
        log_probs: [T] of the policy at temperature 1; the gradient flows through them alone.
        ref: [T] of the reference.
        mask: [T] bool.
        segments: [T] int64 row of each token.
        num_segments: number of rows.
        chosen: [P] int64, row of each pair's preferred response.
        rejected: [P] int64, row of its other response.
        beta: strength of the pull to the reference.
        kind: one of ``DPO_KINDS``.
        label_smoothing: ε, the probability that a label is wrong (sigmoid).

    Returns:
        [P] losses, to be averaged over the pairs of the step, and metrics over pairs: ``rewards/chosen`` and
        ``rewards/rejected`` (β·h), ``rewards/margins``, ``rewards/accuracies``, and ``logps/chosen`` and
        ``logps/rejected``, the sums of log_probs.

    Raises:
        ValueError: an unknown kind.
    """
    record, log_ratio = DPO_KINDS[kind], select(log_probs, mask) - select(ref, mask)
    score = segment_sum(log_ratio, segments, num_segments)
    if record.mean:
        score = segment_mean(log_ratio, mask, segments, num_segments)
    delta = score[chosen] - score[rejected]
    losses = record(delta, beta, label_smoothing)
    pairs = torch.ones_like(chosen, dtype=torch.bool)
    log_likelihood = segment_sum(select(log_probs.detach(), mask), segments, num_segments)
    return losses, {
        "rewards/chosen": mean_metric(beta * score[chosen], pairs),
        "rewards/rejected": mean_metric(beta * score[rejected], pairs),
        "rewards/margins": mean_metric(beta * delta, pairs),
        "rewards/accuracies": mean_metric(delta > 0, pairs),
        "logps/chosen": mean_metric(log_likelihood[chosen], pairs),
        "logps/rejected": mean_metric(log_likelihood[rejected], pairs),
    }


def sigmoid_loss(delta: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """−(1−ε)·log σ(βΔ) − ε·log σ(−βΔ) (arXiv:2305.18290; ε > 0 is conservative DPO, ericmitchell.ai/cdpo.pdf)."""
    return -(1 - label_smoothing) * logsigmoid(beta * delta) - label_smoothing * logsigmoid(-beta * delta)


def ipo_loss(delta: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """(Δ − 1/(2β))² (arXiv:2310.12036; its h is averaged over length, as its authors advise)."""
    return (delta - 1 / (2 * beta)).square()
