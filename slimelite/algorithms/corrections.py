"""Train/inference mismatch: corrections for the case that the engine which sampled and the trainer disagree on
log-probs.

ρ = exp(old − roll). ``old: [T]`` is the trainer's log-prob under the weights at the start of this rollout's training.
``roll: [T]`` is the engine's log-prob when it generated the token, possibly under older weights. Weights multiply the
policy loss of a token; a ``keep`` of False drops it from the loss. Neither changes the denominators of the reduction.
Nothing here has a gradient. Background: arXiv:2110.00641 (decoupled policies); fengyao.notion.site/off-policy-rl.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slimelite.algorithms.packed import Metrics, bounded_exp, mean_metric, segment_mean, segment_sum, select


@torch.no_grad()
def mis_weights(
    old: Tensor,
    roll: Tensor,
    mask: Tensor,
    segments: Tensor,
    num_segments: int,
    *,
    level: str,
    mode: str,
    upper: float,
    lower: float | None = None,
) -> tuple[Tensor, Metrics]:
    """Importance weights [T] of ρ at a level, bounded by a mode (slime's and verl's rollout correction).

    At the level ``token`` the mode ``clip`` is TIS, truncated importance sampling (fengyao.notion.site/off-policy-rl),
    and ``mask`` is IcePop (arXiv:2510.18855). ``lower`` None means 1/upper.

    Raises:
        ValueError: an unknown level or mode.
    """
    ratio = level_ratio(old, roll, mask, segments, num_segments, level)
    lower = 1 / upper if lower is None else lower
    match mode:
        case "truncate":
            weights = ratio.clamp(max=upper)
        case "clip":
            weights = ratio.clamp(lower, upper)
        case "mask":
            weights = torch.where((ratio >= lower) & (ratio <= upper), ratio, 0.0)
        case _:
            raise ValueError(f"--mis-mode {mode}: there is no weighting mode of this name")
    return select(weights, mask), _weight_metrics(ratio, weights, mask)


@torch.no_grad()
def rejection_keep(
    old: Tensor,
    roll: Tensor,
    mask: Tensor,
    segments: Tensor,
    num_segments: int,
    *,
    level: str,
    upper: float,
    lower: float | None = None,
) -> tuple[Tensor, Metrics]:
    """Rejection sampling. Returns keep [T] bool: the tokens whose ρ at ``level`` is in [lower, upper] (default of
    lower: 1/upper).

    At the levels sequence and geometric a whole response is kept or dropped. Metric ``rs_reject_frac``: share of
    unmasked tokens dropped.

    Raises:
        ValueError: an unknown level.
    """
    ratio = level_ratio(old, roll, mask, segments, num_segments, level)
    keep = (ratio >= (1 / upper if lower is None else lower)) & (ratio <= upper)
    return keep, {"rs_reject_frac": mean_metric(~keep, mask)}


@torch.no_grad()
def veto_keep(
    old: Tensor, roll: Tensor, mask: Tensor, segments: Tensor, num_segments: int, *, threshold: float
) -> tuple[Tensor, Metrics]:
    """Veto. Returns keep [T] bool, which is False for every token of a response that has a token with ρ < threshold
    (about 1e-4).

    Metrics: ``veto_token_frac``, share of such tokens among unmasked ones, and ``veto_response_frac``, share of dropped
    responses among those with an unmasked token.
    """
    bad = select(old, mask) - select(roll, mask) < math.log(threshold)
    dropped = _any_token(bad, segments, num_segments)
    return ~dropped[segments], {
        "veto_token_frac": mean_metric(bad, mask),
        "veto_response_frac": mean_metric(dropped, _any_token(mask, segments, num_segments)),
    }


@torch.no_grad()
def opsm_keep(
    log_probs: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    segments: Tensor,
    num_segments: int,
    *,
    delta: float,
) -> tuple[Tensor, Metrics]:
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556; ``--use-opsm``). Returns keep [T] bool.

    It drops a response whose advantage is negative and whose masked mean of old − log_probs exceeds ``delta``. If the
    advantage [T] varies within the response, its masked mean decides for all tokens (slime decides token by token).
    Metric ``opsm_clipfrac``: share of dropped responses among those with an unmasked token (slime: share of tokens).
    """
    drift = segment_mean(select(old, mask) - select(log_probs, mask), mask, segments, num_segments)
    advantage = segment_mean(advantages, mask, segments, num_segments)
    dropped = (advantage < 0) & (drift > delta)
    return ~dropped[segments], {"opsm_clipfrac": mean_metric(dropped, _any_token(mask, segments, num_segments))}


@torch.no_grad()
def mismatch_metrics(old: Tensor, roll: Tensor, mask: Tensor, *, clip: float = 2.0, clip_low: float = 0.0) -> Metrics:
    """How much engine and trainer differ, over unmasked tokens that have log-probs of both (no NaN).

    =================================  ============================================================================
    train_rollout_logprob_abs_diff     mean |old − roll|
    mismatch_k3                        mean ρ − 1 − log ρ, an estimate of KL(roll ‖ old)
    mismatch_ratio                     mean ρ
    mismatch_ratio_sq                  mean ρ²; with the mean it gives `effective_sample_size`
    mismatch_clipfrac                  share of ρ outside [clip_low, clip], which TIS clips or would clip
    =================================  ============================================================================
    """
    mask = mask & ~roll.isnan() & ~old.isnan()
    log_ratio = select(old, mask) - select(roll, mask)
    ratio = bounded_exp(log_ratio)
    return {
        "train_rollout_logprob_abs_diff": mean_metric(log_ratio.abs(), mask),
        "mismatch_k3": mean_metric(torch.expm1(log_ratio.clamp(-20.0, 20.0)) - log_ratio, mask),
        "mismatch_ratio": mean_metric(ratio, mask),
        "mismatch_ratio_sq": mean_metric(ratio.square(), mask),
        "mismatch_clipfrac": mean_metric((ratio < clip_low) | (ratio > clip), mask),
    }


def effective_sample_size(mean_ratio: float, mean_ratio_sq: float) -> float:
    """(Σρ)² / (N·Σρ²), the effective share of tokens under importance weighting, from the means of ρ and ρ².

    It is the only mismatch metric that is not a mean. So it is computed last, from the means over all ranks.
    """
    return mean_ratio**2 / mean_ratio_sq if mean_ratio_sq > 0 else 0.0


def level_ratio(old: Tensor, roll: Tensor, mask: Tensor, segments: Tensor, num_segments: int, level: str) -> Tensor:
    """[T] ρ of the token or of its response. For a response it is the product of the tokens' ratios (sequence;
    unbiased, but of high variance) or the geometric mean over unmasked tokens (geometric).

    Raises:
        ValueError: an unknown level.
    """
    log_ratio = select(old, mask) - select(roll, mask)
    match level:
        case "sequence":
            log_ratio = segment_sum(log_ratio, segments, num_segments)[segments]
        case "geometric":
            log_ratio = segment_mean(log_ratio, mask, segments, num_segments)[segments]
        case "token":
            pass
        case _:
            raise ValueError(f"--mis-level {level}: there is no such correction level")
    return bounded_exp(log_ratio)


def _any_token(flags: Tensor, segments: Tensor, num_segments: int) -> Tensor:
    """[num_segments] bool: some token of the row has its flag set."""
    return segment_sum(flags.long(), segments, num_segments) > 0


def _weight_metrics(ratio: Tensor, weights: Tensor, mask: Tensor) -> Metrics:
    """Metrics of a correction under slime's names: mean ρ, mean |ρ − 1|, and the share that the bounds changed. Also
    the mean weight."""
    return {
        "tis": mean_metric(ratio, mask),
        "tis_abs": mean_metric((ratio - 1).abs(), mask),
        "tis_clipfrac": mean_metric(weights != ratio, mask),
        "tis_weight": mean_metric(weights, mask),
    }
