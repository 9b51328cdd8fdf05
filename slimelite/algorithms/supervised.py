"""Losses on responses from a dataset: supervised fine-tuning, preferences (DPO, KTO, ORPO) and reward models."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from slimelite.algorithms.packed import Metrics, mean_metric, segment_mean, segment_sum, select, upcast


def sft_loss(log_probs: Tensor, mask: Tensor) -> Tensor:
    """[T] negative log-likelihood −log_probs, 0 where masked.

    ``log_probs``: [T] at temperature 1, even if ``--rollout-temperature`` has another value. (slime divides the logits
    by the rollout temperature.) ``mask``: [T] bool.
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
    """The DPO loss of each preference pair. ``kind`` selects its formula, a function of Δ = h(chosen) − h(rejected).
    h is the sum or the mean of log_probs − ref over the unmasked tokens of a response.

    Args:
        log_probs: [T] log-probs of the policy at temperature 1. Only this tensor has a gradient.
        ref: [T] log-probs of the reference.
        mask: [T] bool.
        segments: [T] int64 row of each token.
        num_segments: number of rows.
        chosen: [P] int64, row of each pair's preferred response.
        rejected: [P] int64, row of each pair's other response.
        beta: how strongly the policy is pulled to the reference.
        kind: one of ``DPO_KINDS``.
        label_smoothing: ε, the probability that a label is wrong. Only the kind ``sigmoid`` uses ``label_smoothing``.

    Returns:
        [P] losses, to be averaged over the pairs of the step, and metrics over pairs: ``rewards/chosen`` and
        ``rewards/rejected`` (β·h), ``rewards/margins``, ``rewards/accuracies``, and ``logps/chosen`` and
        ``logps/rejected`` (the sums of log_probs).

    Raises:
        ValueError: an unknown kind.
    """
    log_ratio = select(log_probs, mask) - select(ref, mask)
    match kind:
        case "sigmoid":
            # −(1−ε)·log σ(βΔ) − ε·log σ(−βΔ) (arXiv:2305.18290; ε > 0: conservative DPO, ericmitchell.ai/cdpo.pdf)
            score = segment_sum(log_ratio, segments, num_segments)
            delta = score[chosen] - score[rejected]
            losses = -(1 - label_smoothing) * logsigmoid(beta * delta) - label_smoothing * logsigmoid(-beta * delta)
        case "ipo":  # (Δ − 1/(2β))² (arXiv:2310.12036). h is a mean over the tokens, as the authors advise
            score = segment_mean(log_ratio, mask, segments, num_segments)
            delta = score[chosen] - score[rejected]
            losses = (delta - 1 / (2 * beta)).square()
        case _:
            raise ValueError(f"--dpo-loss {kind}: there is no such loss of a pair")
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


def kto_loss(
    log_probs: Tensor,
    ref: Tensor,
    mask: Tensor,
    segments: Tensor,
    num_segments: int,
    desirable: Tensor,
    *,
    kl: float,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> tuple[Tensor, Metrics]:
    """The KTO loss of each reply (arXiv:2402.01306, equation 7): w·(1 − σ(±(h − z))).

    h = β·Σ(log_probs − ref) over the unmasked tokens of the reply. z = β·max(0, kl).

    Args:
        log_probs: [T] log-probs of the policy at temperature 1. Only this tensor has a gradient.
        ref: [T] log-probs of the reference.
        mask: [T] bool.
        segments: [T] int64 row of each token.
        num_segments: number of rows, n.
        desirable: [n] bool. The sign ± is + for desirable and − for undesirable replies.
        kl: an estimate of the KL between policy and reference [nats]. To compute it, each prompt of the optimizer step
            is paired with the reply of another row. ``kl`` is the mean of Σ(log_probs − ref) over these pairs.
        beta: how strongly the policy is pulled to the reference.
        desirable_weight, undesirable_weight: w for desirable and for undesirable replies.

    Returns:
        [n] losses, to be averaged over the rows of the step, and metrics over rows: ``rewards/chosen`` and
        ``rewards/rejected`` (h of desirable and of undesirable replies), ``logps/chosen`` and ``logps/rejected``.
    """
    h = beta * segment_sum(select(log_probs, mask) - select(ref, mask), segments, num_segments)
    gap = h - beta * max(kl, 0.0)
    weight = torch.where(desirable, desirable_weight, undesirable_weight)
    # 1 − σ(x) = σ(−x); the right-hand side stays accurate if x is large
    losses = weight * torch.sigmoid(torch.where(desirable, -gap, gap))
    log_likelihood = segment_sum(select(log_probs.detach(), mask), segments, num_segments)
    return losses, {
        "rewards/chosen": mean_metric(h, desirable),
        "rewards/rejected": mean_metric(h, ~desirable),
        "logps/chosen": mean_metric(log_likelihood, desirable),
        "logps/rejected": mean_metric(log_likelihood, ~desirable),
    }


def odds_ratio_loss(
    log_probs: Tensor,
    mask: Tensor,
    segments: Tensor,
    num_segments: int,
    chosen: Tensor,
    rejected: Tensor,
) -> tuple[Tensor, Metrics]:
    """The odds-ratio term of ORPO (arXiv:2403.07691, equations 4 and 7), for each pair: −log σ(o_w − o_l).

    o = m − log(1 − exp m) are the log-odds of a reply, and m is the mean log-prob of its tokens. o_w belongs to the
    chosen reply, and o_l to the rejected one.

    Args:
        log_probs: [T] log-probs of the policy at temperature 1.
        mask: [T] bool.
        segments: [T] int64 row of each token.
        num_segments: number of rows.
        chosen: [P] int64, row of each pair's preferred response.
        rejected: [P] int64, row of each pair's other response.

    Returns:
        [P] losses, to be averaged over the pairs of the step, and metrics over pairs: ``rewards/margins`` (o_w − o_l),
        ``rewards/accuracies``, ``logps/chosen`` and ``logps/rejected`` (m).
    """
    # if all tokens of a reply have probability 1, its odds are infinite. So the mean log-prob is at most -1e-7
    mean = segment_mean(log_probs, mask, segments, num_segments).clamp(max=-1e-7)
    odds = mean - torch.log(-torch.expm1(mean))
    delta = odds[chosen] - odds[rejected]
    pairs = torch.ones_like(chosen, dtype=torch.bool)
    return -logsigmoid(delta), {
        "rewards/margins": mean_metric(delta, pairs),
        "rewards/accuracies": mean_metric(delta > 0, pairs),
        "logps/chosen": mean_metric(mean[chosen], pairs),
        "logps/rejected": mean_metric(mean[rejected], pairs),
    }


def reward_model_loss(scores: Tensor, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Metrics]:
    """The Bradley–Terry loss of each pair: −log σ(s_w − s_l) (arXiv:2203.02155, equation 1).

    s_w is the score of the preferred conversation, and s_l the score of the rejected conversation.

    Args:
        scores: [n], one for each conversation.
        chosen: [P] int64, row of each pair's preferred conversation.
        rejected: [P] int64, row of each pair's other conversation.

    Returns:
        [P] losses, to be averaged over the pairs of the step, and metrics over pairs: ``rewards/chosen`` and
        ``rewards/rejected`` (s), ``rewards/margins``, ``rewards/accuracies``.
    """
    scores = upcast(scores)
    delta = scores[chosen] - scores[rejected]
    pairs = torch.ones_like(chosen, dtype=torch.bool)
    return -logsigmoid(delta), {
        "rewards/chosen": mean_metric(scores[chosen], pairs),
        "rewards/rejected": mean_metric(scores[rejected], pairs),
        "rewards/margins": mean_metric(delta, pairs),
        "rewards/accuracies": mean_metric(delta > 0, pairs),
    }
