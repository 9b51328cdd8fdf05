"""Losses of response tokens: PPO clip (clip-high, dual clip), GSPO, CISPO, the critic's, and the KL to a reference.

A policy loss returns ``losses: [T]`` (0 where masked; `packed.weighted_sum` makes a scalar of them) and metrics:
``pg_clipfrac``, ``ppo_kl`` (mean old − lp), ``logprob_abs_diff`` (mean |lp − old|) and ``ois`` (mean ratio).

Arguments that policy losses share, all [T]: ``log_probs`` under the weights being trained (the gradient flows through
them alone), ``old`` under the weights at the start of this rollout's training, ``advantages``, ``mask`` (bool).
``eps_clip_high`` None means ``eps_clip``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slimelite.algorithms.packed import MAX_LOG_RATIO, Metric, Metrics, bounded_exp, mean_metric, segment_mean, select


def ppo_clip_loss(
    log_probs: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> tuple[Tensor, Metrics]:
    """PPO's clipped surrogate, r = exp(log_probs − old) (arXiv:1707.06347):

    max(−r·A, −clip(r, 1 − eps_clip, 1 + eps_clip_high)·A)

    ``eps_clip_high`` > ``eps_clip`` is DAPO's clip-higher (arXiv:2503.14476). ``eps_clip_c`` c > 1 is the dual clip
    (arXiv:1912.09729): where A < 0 the loss is at most −c·A. ``pg_clipfrac`` is the share of tokens whose second
    term is the larger; with c, ``pg_dual_clipfrac`` that of the tokens which the dual clip cuts.
    """
    log_ratio = select(log_probs, mask) - select(old, mask)
    return _clipped_surrogate(log_ratio, advantages, mask, eps_clip, eps_clip_high, eps_clip_c)


def gspo_loss(
    log_probs: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    segments: Tensor,
    num_segments: int,
    *,
    eps_clip: float,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> tuple[Tensor, Metrics]:
    """GSPO (arXiv:2507.18071): the PPO loss with one ratio a response, exp(mean of log_probs − old over its
    unmasked tokens); the gradient flows through the mean, so a response must be whole in the micro-batch.

    ``segments``: [T] int64, row of each token; ``num_segments``: number of rows. Clip widths are about 3e-4.
    """
    log_ratio = select(log_probs, mask) - select(old, mask)
    log_ratio = segment_mean(log_ratio, mask, segments, num_segments)[segments]
    return _clipped_surrogate(log_ratio, advantages, mask, eps_clip, eps_clip_high, eps_clip_c)


def cispo_loss(
    log_probs: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float | None = None,
) -> tuple[Tensor, Metrics]:
    """CISPO (MiniMax-M1, arXiv:2506.13585): REINFORCE with a clipped, detached importance weight,

    −sg(clip(r, 1 − eps_clip, 1 + eps_clip_high))·A·log_probs

    so that no token loses its gradient to the clip. ``pg_clipfrac`` is the share of tokens whose weight was clipped;
    the paper leaves the lower side open (eps_clip = 1) and eps_clip_high wide (about 4).
    """
    log_probs = select(log_probs, mask)
    log_ratio = log_probs.detach() - select(old, mask)
    ratio = bounded_exp(log_ratio)
    weight = _clip(ratio, eps_clip, eps_clip_high)
    losses = -weight * select(advantages, mask) * log_probs
    return losses, {"pg_clipfrac": mean_metric(weight != ratio, mask), **_ratio_metrics(log_ratio, ratio, mask)}


def _clipped_surrogate(
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    eps_clip: float,
    eps_clip_high: float | None,
    eps_clip_c: float | None,
) -> tuple[Tensor, Metrics]:
    advantages = select(advantages, mask)
    ratio = bounded_exp(log_ratio)
    unclipped = -ratio * advantages
    clipped = -_clip(ratio, eps_clip, eps_clip_high) * advantages
    # where, not maximum: inside the clip range both are equal and maximum would split the gradient
    losses = torch.where(clipped > unclipped, clipped, unclipped)
    metrics = {"pg_clipfrac": mean_metric(clipped > unclipped, mask), **_ratio_metrics(log_ratio, ratio, mask)}
    if eps_clip_c is not None:
        if eps_clip_c <= 1:
            raise ValueError(f"--eps-clip-c must be greater than 1, not {eps_clip_c}")
        ceiling = -eps_clip_c * advantages
        cut = (advantages < 0) & (losses > ceiling)
        losses = torch.where(cut, ceiling, losses)
        metrics["pg_dual_clipfrac"] = mean_metric(cut, mask)
    return losses, metrics


def _clip(ratio: Tensor, eps_clip: float, eps_clip_high: float | None) -> Tensor:
    return ratio.clamp(1 - eps_clip, 1 + (eps_clip if eps_clip_high is None else eps_clip_high))


def _ratio_metrics(log_ratio: Tensor, ratio: Tensor, mask: Tensor) -> Metrics:
    return {
        "ppo_kl": mean_metric(-log_ratio, mask),
        "logprob_abs_diff": mean_metric(log_ratio.abs(), mask),
        "ois": mean_metric(ratio, mask),
    }


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, value_clip: float
) -> tuple[Tensor, Metrics]:
    """PPO's clipped value loss (arXiv:1707.06347, as in OpenAI baselines; no factor ½, like slime), 0 where masked:

    max((V_clip − G)², (V − G)²),  V_clip = V_old + clamp(V − V_old, ±value_clip)

    All [T]: ``values`` with gradient, ``old_values`` before this rollout's training, ``returns`` from
    `advantages.gae`. Metrics: ``value_clipfrac``, share of tokens whose first term is the larger, and ``values``.
    """
    values, old_values, returns = select(values, mask), select(old_values, mask), select(returns, mask)
    moved = values - old_values
    # inside the range V itself: V_old + moved would differ by rounding, and be counted
    bounded = torch.where(moved.abs() > value_clip, old_values + moved.clamp(-value_clip, value_clip), values)
    clipped, unclipped = (bounded - returns).square(), (values - returns).square()
    # where, not maximum: inside the clip range both are equal and maximum would split the gradient
    losses = clipped.where(clipped > unclipped, unclipped)
    return losses, {"value_clipfrac": mean_metric(clipped > unclipped, mask), "values": mean_metric(values, mask)}


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Metric:
    """1 − Var(returns − values) / Var(returns) over unmasked tokens: 1 is a perfect critic, 0 one that says nothing,
    below 0 one that misleads. All [T]; without weight where the returns do not vary.
    """
    kept = returns[mask].double()
    spread = kept.var(unbiased=False) if len(kept) else kept.sum()
    if not spread > 0:
        return spread.new_zeros(()), spread.new_zeros(())
    return 1 - (kept - values[mask]).var(unbiased=False) / spread, spread.new_ones(())


KL_KINDS = ("k1", "k2", "k3", "low_var_kl")


def kl_estimate(log_probs: Tensor, base: Tensor, mask: Tensor, kind: str, *, old: Tensor | None = None) -> Tensor:
    """KL of every token, 0 where masked; with d = log_probs − base:

    ============  ==========================
    k1            d
    k2            d² / 2
    k3            e^(−d) − 1 + d
    low_var_kl    k3 clamped to [−10, 10]
    ============  ==========================

    ``old`` given: the unbiased variant (``--use-unbiased-kl``, DeepSeek-V3.2, arXiv:2512.02556): the estimate times
    w = exp(log_probs − old), gradient through both factors, clamped (if at all) last.

    As a loss k1 has zero expected gradient unless ``old`` is given; low_var_kl is the default (slime's is k1), and a
    token whose k3 is above 10 has no gradient under it. Beyond |d| = 20 k3 goes on as its tangent there, so that it
    stays finite and its gradient keeps pulling towards the reference. The gradient of w·k3 is w·d at every d.

    Args:
        log_probs: [T] of the policy.
        base: [T] of the reference.
        mask: [T] bool.
        kind: one of ``KL_KINDS``.
        old: [T] log-probs of the policy that sampled, or None.

    Returns:
        [T], at least fp32.

    Raises:
        ValueError: an unknown kind.
    """
    d = select(log_probs, mask) - select(base, mask)
    now = d.detach()
    if kind == "k1":
        kl, slope = now, torch.ones_like(now)
    elif kind == "k2":
        kl, slope = now.square() / 2, now
    elif kind in ("k3", "low_var_kl"):
        near = now.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        # expm1, not exp − 1: near d = 0 the difference would be rounding noise
        slope = -torch.expm1(-near)
        kl = near - slope + slope * (now - near)
    else:
        raise ValueError(f"unknown KL estimator {kind!r}; --kl-loss-type takes {', '.join(KL_KINDS)}")
    if old is not None:
        weight = bounded_exp(select(log_probs.detach(), mask) - select(old, mask))
        # (w·f)′ = w·(f + f′); the exponentials of k3 and of its slope cancel
        slope = weight * (now if kind in ("k3", "low_var_kl") else kl + slope)
        kl = weight * kl
    kl = kl + slope * (d - now)  # d − now is 0: it carries the slope
    return kl.clamp(-10.0, 10.0) if kind == "low_var_kl" else kl
