"""Per-token estimators of KL(π ‖ base) from the log-probs of sampled tokens (Schulman, http://joschu.net/blog/kl-approx.html)."""

from __future__ import annotations

import torch
from torch import Tensor

from slimelite.algorithms.packed import MAX_LOG_RATIO, bounded_exp, select

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
