"""Policy-gradient losses of response tokens: PPO clip (clip-high, dual clip), GSPO, CISPO.

Each returns ``losses: [T]`` (0 where masked; `reduction` turns them into a scalar) and metrics: ``pg_clipfrac``,
``ppo_kl`` (mean old − lp), ``logprob_abs_diff`` (mean |lp − old|) and ``ois`` (mean ratio).

Arguments they share, all [T]: ``log_probs`` under the weights being trained (the gradient flows through them alone),
``old`` under the weights at the start of this rollout's training, ``advantages``, ``mask`` (bool).
``eps_clip_high`` None means ``eps_clip``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slimelite.algorithms.packed import Metrics, bounded_exp, mean_metric, segment_mean, select


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
