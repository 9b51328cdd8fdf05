"""Losses of response tokens: the policy's (PPO clip, GSPO, CISPO), the critic's, and the KL to a reference model."""

from __future__ import annotations

import torch
from torch import Tensor

from slimelite.algorithms.estimators import ESTIMATORS
from slimelite.algorithms.packed import (
    MAX_LOG_RATIO,
    Metric,
    Metrics,
    bounded_exp,
    checked,
    mean_metric,
    segment_mean,
    select,
)
from slimelite.base.registry import function

LOW_VAR_BOUND = 10.0  # of low_var_kl


def policy_loss(
    log_probs: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    segments: Tensor,
    num_segments: int,
    estimator: str,
    *,
    eps_clip: float,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> tuple[Tensor, Metrics]:
    """The policy loss of each token, from ratios r = exp(log_probs − old). An estimator's ``loss`` function computes
    it.

    That function is ``fn(log_probs, log_ratio, advantages, *, eps_clip, eps_clip_high, eps_clip_c)``. All tensors are
    [T] and 0 where masked. It returns losses [T] and a dict of metrics, whose values [T] are logged as means over
    unmasked tokens.

    An estimator with ``sequence_ratio`` has one ratio for each response, exp(mean of log_probs − old over its unmasked
    tokens). That is GSPO (arXiv:2507.18071), whose clip widths are about 3e-4. The gradient flows through the mean, so
    a micro-batch must have the complete response.

    Args:
        log_probs: [T] under the weights that are trained. Only they have a gradient.
        old: [T] under the weights at the start of this rollout's training.
        advantages: [T].
        mask: [T] bool.
        segments: [T] int64 row of each token.
        num_segments: number of rows.
        estimator: one of ``ESTIMATORS``.
        eps_clip: the ratio may fall to 1 − eps_clip.
        eps_clip_high: the ratio may rise to 1 + eps_clip_high; None: eps_clip.
        eps_clip_c: bound of the dual clip; None: no dual clip.

    Returns:
        losses [T], 0 where masked, and metrics. `packed.weighted_sum` makes a scalar of the losses. The metrics are
        those of ``loss``, ``ppo_kl`` (mean old − lp), ``logprob_abs_diff`` (mean |lp − old|) and ``ois`` (mean ratio).
    """
    record = ESTIMATORS[estimator]
    log_probs, advantages = select(log_probs, mask), select(advantages, mask)
    log_ratio = log_probs - select(old, mask)
    if record.sequence_ratio:
        log_ratio = segment_mean(log_ratio, mask, segments, num_segments)[segments]
    high = eps_clip if eps_clip_high is None else eps_clip_high
    result = function(record.loss, ESTIMATORS.option, estimator)(
        log_probs, log_ratio, advantages, eps_clip=eps_clip, eps_clip_high=high, eps_clip_c=eps_clip_c
    )
    what = f"--advantage-estimator {estimator}: its loss function"
    if not (isinstance(result, tuple) and len(result) == 2):
        raise ValueError(f"{what} returned a {type(result).__name__}: make it a pair of losses and metrics by name")
    losses, values = checked(result[0], len(log_probs), what), result[1]
    now = log_ratio.detach()
    values |= {"ppo_kl": -now, "logprob_abs_diff": now.abs(), "ois": bounded_exp(now)}
    return losses, {name: mean_metric(value, mask) for name, value in values.items()}


def ppo_clip_loss(
    log_probs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate (arXiv:1707.06347):

    max(−r·A, −clip(r, 1 − eps_clip, 1 + eps_clip_high)·A)

    ``eps_clip_high`` > ``eps_clip`` is DAPO's clip-higher (arXiv:2503.14476). ``eps_clip_c`` c > 1 is the dual clip
    (arXiv:1912.09729): where A < 0 the loss is at most −c·A. ``pg_clipfrac`` is the share of tokens whose second term
    is larger. With c, ``pg_dual_clipfrac`` is the share of tokens that the dual clip cuts.

    Raises:
        ValueError: ``eps_clip_c`` is not above 1.
    """
    ratio = bounded_exp(log_ratio)
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages
    # where, not maximum: inside the clip range both are equal and maximum would split the gradient
    losses = torch.where(clipped > unclipped, clipped, unclipped)
    metrics = {"pg_clipfrac": clipped > unclipped}
    if eps_clip_c is not None:
        if eps_clip_c <= 1:
            raise ValueError(f"--eps-clip-c must be greater than 1, not {eps_clip_c}")
        ceiling = -eps_clip_c * advantages
        cut = (advantages < 0) & (losses > ceiling)
        losses = torch.where(cut, ceiling, losses)
        metrics["pg_dual_clipfrac"] = cut
    return losses, metrics


def cispo_loss(
    log_probs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """CISPO (MiniMax-M1, arXiv:2506.13585): REINFORCE with a clipped importance weight that has no gradient,

    −sg(clip(r, 1 − eps_clip, 1 + eps_clip_high))·A·log_probs

    so the clip never removes a token's gradient. ``pg_clipfrac`` is the share of tokens whose weight was clipped. The
    paper leaves the lower side open (eps_clip = 1) and uses a large eps_clip_high (about 4).
    """
    ratio = bounded_exp(log_ratio.detach())
    weight = ratio.clamp(1 - eps_clip, 1 + eps_clip_high)
    return -weight * advantages * log_probs, {"pg_clipfrac": weight != ratio}


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, value_clip: float
) -> tuple[Tensor, Metrics]:
    """PPO's clipped value loss (arXiv:1707.06347, as in OpenAI baselines; no factor ½, like slime), 0 where masked:

    max((V_clip − G)², (V − G)²),  V_clip = V_old + clamp(V − V_old, ±value_clip)

    All are [T]. ``values`` has a gradient, ``old_values`` are from before this rollout's training, and ``returns`` are
    from `advantages.gae`. Metrics: ``value_clipfrac``, the share of tokens whose first term is larger, and ``values``.
    """
    values, old_values, returns = select(values, mask), select(old_values, mask), select(returns, mask)
    moved = values - old_values
    # inside the range use V itself: V_old + moved would differ by rounding, and would count as clipped
    bounded = torch.where(moved.abs() > value_clip, old_values + moved.clamp(-value_clip, value_clip), values)
    clipped, unclipped = (bounded - returns).square(), (values - returns).square()
    # where, not maximum: inside the clip range both are equal and maximum would split the gradient
    losses = clipped.where(clipped > unclipped, unclipped)
    return losses, {"value_clipfrac": mean_metric(clipped > unclipped, mask), "values": mean_metric(values, mask)}


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Metric:
    """1 − Var(returns − values) / Var(returns) over unmasked tokens. It is 1 for a perfect critic, 0 for a constant
    one, and below 0 for a worse one. All are [T]. The weight is 0 if the returns do not vary.
    """
    kept = returns[mask].double()
    spread = kept.var(unbiased=False) if len(kept) else kept.sum()
    if not spread > 0:
        return spread.new_zeros(()), spread.new_zeros(())
    return 1 - (kept - values[mask]).var(unbiased=False) / spread, spread.new_ones(())


def kl_estimate(log_probs: Tensor, base: Tensor, mask: Tensor, kind: str, *, old: Tensor | None = None) -> Tensor:
    """Estimate of KL(π ‖ base) at every token, 0 where masked (Schulman, http://joschu.net/blog/kl-approx.html).

    With ``old`` it is the unbiased variant (``--use-unbiased-kl``, DeepSeek-V3.2, arXiv:2512.02556): the estimate times
    w = exp(log_probs − old). The gradient flows through both factors. A clamp, if there is one, comes last.

    As a loss k1 has zero expected gradient unless ``old`` is given. The default is low_var_kl (slime's is k1), which
    gives no gradient to a token whose k3 is above 10.

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
    match kind:  # an estimate f of d, its derivative f′, and f + f′
        case "k1":
            kl, slope, both = now, torch.ones_like(now), now + torch.ones_like(now)
        case "k2":
            kl, slope = now.square() / 2, now
            both = kl + now
        case "k3" | "low_var_kl":  # e^(−d) − 1 + d; the exponentials of f and f′ cancel: f + f′ = d
            # beyond |d| = 20 it continues as the tangent at that point, so that it stays finite and its gradient
            # keeps pulling towards the reference
            near = now.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            # expm1, not exp − 1: near d = 0 the difference would be rounding noise
            slope = -torch.expm1(-near)
            kl, both = near - slope + slope * (now - near), now
        case _:
            raise ValueError(f"--kl-loss-type {kind}: there is no such estimator of the KL")
    if old is not None:
        weight = bounded_exp(select(log_probs.detach(), mask) - select(old, mask))
        kl, slope = weight * kl, weight * both  # (w·f)′ = w·(f + f′)
    kl = kl + slope * (d - now)  # d − now is 0 and adds only the gradient
    return kl.clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND) if kind == "low_var_kl" else kl
