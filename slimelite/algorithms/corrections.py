"""Corrections of the train/inference mismatch: engine and trainer compute different log-probs of the same token.

ρ = exp(old − roll). ``old: [T]`` is the trainer's log-prob with the weights at the start of this rollout's training.
``roll: [T]`` is the engine's log-prob at the time of sampling, possibly with older weights. The policy loss of a token
is multiplied by the token's weight. A token whose ``keep`` is False is dropped from the loss. Weights and ``keep`` do
not change the divisors of the loss: a dropped token still counts in them. These functions compute no gradients.
Background: arXiv:2110.00641 (decoupled policies); fengyao.notion.site/off-policy-rl.
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
    """Importance weights [T]: ρ at ``level``, bounded according to ``mode`` (slime's and verl's rollout correction).

    At the level ``token``, the mode ``clip`` is TIS (truncated importance sampling, fengyao.notion.site/off-policy-rl),
    and the mode ``mask`` is IcePop (arXiv:2510.18855). If ``lower`` is None, the lower bound is 1/upper.

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
            raise ValueError(f"--mis-mode {mode}: there is no weighting mode with this name")
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
    """Rejection sampling. Returns keep [T] bool, True for tokens whose ρ at ``level`` is in [lower, upper]. If
    ``lower`` is None, the lower bound is 1/upper.

    At the levels ``sequence`` and ``geometric``, a response is kept or dropped as a whole. Metric ``rs_reject_frac``:
    the share of unmasked tokens that are dropped.

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
    """Veto: drop each response that has a token with ρ < ``threshold`` (about 1e-4). Returns keep [T] bool.

    Metrics: ``veto_token_frac`` (the share of unmasked tokens that have ρ < ``threshold``) and ``veto_response_frac``
    (the share of dropped responses among the responses with an unmasked token).
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

    A response is dropped if its advantage is negative and its mean of old − log_probs exceeds ``delta``. Means are over
    the unmasked tokens. If the advantage [T] varies within the response, its mean decides whether the whole response is
    dropped (slime decides for each token). Metric ``opsm_clipfrac``: the share of dropped responses among the responses
    with an unmasked token (slime: the share of tokens).
    """
    drift = segment_mean(select(old, mask) - select(log_probs, mask), mask, segments, num_segments)
    advantage = segment_mean(advantages, mask, segments, num_segments)
    dropped = (advantage < 0) & (drift > delta)
    return ~dropped[segments], {"opsm_clipfrac": mean_metric(dropped, _any_token(mask, segments, num_segments))}


@torch.no_grad()
def mismatch_metrics(old: Tensor, roll: Tensor, mask: Tensor, *, clip: float = 2.0, clip_low: float = 0.0) -> Metrics:
    """Metrics of the difference between engine and trainer, over the unmasked tokens for which both log-probs are known
    (not NaN).

    =================================  ============================================================================
    train_rollout_logprob_abs_diff     mean |old − roll|
    mismatch_k3                        mean ρ − 1 − log ρ, an estimate of KL(roll ‖ old)
    mismatch_ratio                     mean ρ
    mismatch_ratio_sq                  mean ρ²; `effective_sample_size` needs it and mean ρ
    mismatch_clipfrac                  share of tokens with ρ outside [clip_low, clip]; TIS would clip these ρ
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
    """(Σρ)² / (N·Σρ²), computed from the means of ρ and ρ² over N tokens. The result is the effective share of tokens
    under importance weighting.

    It is not a mean, so it is computed last, from the means over all ranks.
    """
    return mean_ratio**2 / mean_ratio_sq if mean_ratio_sq > 0 else 0.0


def level_ratio(old: Tensor, roll: Tensor, mask: Tensor, segments: Tensor, num_segments: int, level: str) -> Tensor:
    """[T] ρ at ``level``: the ratio of the token, or one ratio for its whole response.

    ``sequence``: the product of the ratios of the unmasked tokens, which is unbiased but has a high variance.
    ``geometric``: the geometric mean of these ratios.

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
    """[num_segments] bool: whether ``flags`` is True for at least one token of the row."""
    return segment_sum(flags.long(), segments, num_segments) > 0


def _weight_metrics(ratio: Tensor, weights: Tensor, mask: Tensor) -> Metrics:
    """Metrics of a correction under slime's names: mean ρ, mean |ρ − 1|, the share of ρ that the bounds changed, and
    the mean weight."""
    return {
        "tis": mean_metric(ratio, mask),
        "tis_abs": mean_metric((ratio - 1).abs(), mask),
        "tis_clipfrac": mean_metric(weights != ratio, mask),
        "tis_weight": mean_metric(weights, mask),
    }
