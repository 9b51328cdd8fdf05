"""The critic's loss."""

from __future__ import annotations

from torch import Tensor

from slimelite.algorithms.packed import Metrics, mean_metric, select


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, value_clip: float
) -> tuple[Tensor, Metrics]:
    """PPO's clipped value loss (arXiv:1707.06347, as in OpenAI baselines; no factor ½, like slime), 0 where masked:

    max((V_clip − G)², (V − G)²),  V_clip = V_old + clamp(V − V_old, ±value_clip)

    All [T]: ``values`` with gradient, ``old_values`` before this rollout's training, ``returns`` from
    `advantages.gae`. Metrics: ``value_clipfrac``, share of tokens whose first term is the larger, and ``values``.
    """
    values, old_values, returns = select(values, mask), select(old_values, mask), select(returns, mask)
    bounded = old_values + (values - old_values).clamp(-value_clip, value_clip)
    clipped, unclipped = (bounded - returns).square(), (values - returns).square()
    # where, not maximum: inside the clip range both are equal and maximum would split the gradient
    losses = clipped.where(clipped > unclipped, unclipped)
    return losses, {"value_clipfrac": mean_metric(clipped > unclipped, mask), "values": mean_metric(values, mask)}
