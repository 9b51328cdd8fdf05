"""Losses of response tokens: policy losses (PPO clip, GSPO, CISPO), the critic's loss, and the KL to a reference."""

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

LOW_VAR_BOUND = 10.0  # low_var_kl is clamped to ± this value


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
    """The policy loss of each token, computed from ratios r = exp(log_probs − old) by the estimator's ``loss``
    function.

    The signature of that function is ``fn(log_probs, log_ratio, advantages, *, eps_clip, eps_clip_high, eps_clip_c)``.
    Its tensors are [T]; ``log_probs`` and ``advantages`` are 0 where masked. It returns losses [T] and a dict of
    metrics. Each metric has values [T], and its mean over unmasked tokens is logged.

    An estimator with ``sequence_ratio`` has one ratio for each response: exp(mean of log_probs − old over its unmasked
    tokens). This is GSPO (arXiv:2507.18071). Clip widths for GSPO are about 3e-4. The gradient flows through the mean,
    so a response must not be split over micro-batches.

    Args:
        log_probs: [T] log-probs of the weights that are trained. Only this tensor has a gradient.
        old: [T] log-probs of the weights at the start of this rollout's training.
        advantages: [T].
        mask: [T] bool.
        segments: [T] int64 row of each token.
        num_segments: number of rows.
        estimator: one of ``ESTIMATORS``.
        eps_clip: the ratio may fall to 1 − eps_clip.
        eps_clip_high: the ratio may rise to 1 + eps_clip_high; None: equal to eps_clip.
        eps_clip_c: bound of the dual clip; None: no dual clip.

    Returns:
        losses [T], 0 where masked, and metrics. `packed.weighted_sum` makes a scalar of the losses. Besides the metrics
        of the ``loss`` function, there are ``ppo_kl`` (mean of old − log_probs), ``logprob_abs_diff`` (mean of
        |log_probs − old|) and ``ois`` (mean ratio).
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
    """PPO's clipped surrogate loss (arXiv:1707.06347):

    max(−r·A, −clip(r, 1 − eps_clip, 1 + eps_clip_high)·A)

    ``eps_clip_high`` > ``eps_clip`` is DAPO's clip-higher (arXiv:2503.14476). c = ``eps_clip_c`` > 1 is the dual clip
    (arXiv:1912.09729): if A < 0, the loss is at most −c·A. The metric ``pg_clipfrac`` is the share of tokens whose
    second (clipped) term is larger. The metric ``pg_dual_clipfrac`` is the share of tokens whose loss the dual clip
    reduces.

    Raises:
        ValueError: ``eps_clip_c`` is not greater than 1.
    """
    ratio = bounded_exp(log_ratio)
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages
    # not torch.maximum: inside the clip range both terms are equal, and maximum would split the gradient between them
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
    """CISPO (MiniMax-M1, arXiv:2506.13585): REINFORCE with a clipped importance weight that has no gradient:

    −sg(clip(r, 1 − eps_clip, 1 + eps_clip_high))·A·log_probs

    Here sg(x) is x without a gradient. So a clipped token still has a gradient. The metric ``pg_clipfrac`` is the share
    of tokens whose weight was clipped. The paper does not bound the ratio from below (eps_clip = 1) and uses a large
    eps_clip_high (about 4).
    """
    ratio = bounded_exp(log_ratio.detach())
    weight = ratio.clamp(1 - eps_clip, 1 + eps_clip_high)
    return -weight * advantages * log_probs, {"pg_clipfrac": weight != ratio}


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, value_clip: float
) -> tuple[Tensor, Metrics]:
    """PPO's clipped value loss (arXiv:1707.06347, as in OpenAI baselines; without the factor ½, as in slime), 0 where
    masked:

    max((V_clip − G)², (V − G)²),  V_clip = V_old + clamp(V − V_old, ±value_clip)

    V = ``values`` [T], with a gradient. V_old = ``old_values`` [T], the values before this rollout's training.
    G = ``returns`` [T] of `advantages.gae`. Metrics: ``value_clipfrac``, the share of tokens whose first (clipped) term
    is larger, and ``values``, the mean value.
    """
    values, old_values, returns = select(values, mask), select(old_values, mask), select(returns, mask)
    moved = values - old_values
    # inside the clip range use V itself: V_old + moved differs from V by rounding, so the token would count as clipped
    bounded = torch.where(moved.abs() > value_clip, old_values + moved.clamp(-value_clip, value_clip), values)
    clipped, unclipped = (bounded - returns).square(), (values - returns).square()
    # not torch.maximum: inside the clip range both terms are equal, and maximum would split the gradient between them
    losses = clipped.where(clipped > unclipped, unclipped)
    return losses, {"value_clipfrac": mean_metric(clipped > unclipped, mask), "values": mean_metric(values, mask)}


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Metric:
    """1 − Var(returns − values) / Var(returns) over unmasked tokens. The result is 1 for a perfect critic, 0 for a
    critic with constant values, and below 0 for a worse critic. All arguments are [T]. The metric's weight is 0 if the
    returns do not vary.
    """
    kept = returns[mask].double()
    spread = kept.var(unbiased=False) if len(kept) else kept.sum()
    if not spread > 0:
        return spread.new_zeros(()), spread.new_zeros(())
    return 1 - (kept - values[mask]).var(unbiased=False) / spread, spread.new_ones(())


def kl_estimate(log_probs: Tensor, base: Tensor, mask: Tensor, kind: str, *, old: Tensor | None = None) -> Tensor:
    """Estimate of KL(π ‖ base) at every token, 0 where masked (Schulman, http://joschu.net/blog/kl-approx.html).

    With ``old``, the result is the unbiased variant (``--use-unbiased-kl``, DeepSeek-V3.2, arXiv:2512.02556): the
    estimate times w = exp(log_probs − old). The gradient flows through both factors. low_var_kl clamps the product.

    In a loss without ``old``, the expected gradient of k1 is zero. ``--kl-loss-type`` has the default low_var_kl
    (slime's default is k1). With low_var_kl, a token whose k3 is above 10 has no gradient.

    Args:
        log_probs: [T] log-probs of the policy.
        base: [T] log-probs of the reference.
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
            # for |d| > 20, f continues as its tangent at |d| = 20. So f stays finite, and its gradient still pulls
            # towards the reference
            near = now.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            # expm1 is accurate near d = 0, where exp − 1 has a large rounding error
            slope = -torch.expm1(-near)
            kl, both = near - slope + slope * (now - near), now
        case _:
            raise ValueError(f"--kl-loss-type {kind}: there is no such estimator of the KL")
    if old is not None:
        weight = bounded_exp(select(log_probs.detach(), mask) - select(old, mask))
        kl, slope = weight * kl, weight * both  # (w·f)′ = w·(f + f′)
    kl = kl + slope * (d - now)  # d − now is 0, so this term adds only the gradient
    return kl.clamp(-LOW_VAR_BOUND, LOW_VAR_BOUND) if kind == "low_var_kl" else kl
