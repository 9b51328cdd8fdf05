"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from slimelite.algorithms.packed import Metric, Metrics, mean_metric, select


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
