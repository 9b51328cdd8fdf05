"""Supervised fine-tuning."""

from __future__ import annotations

from torch import Tensor

from slimelite.algorithms.packed import select


def sft_loss(log_probs: Tensor, mask: Tensor) -> Tensor:
    """[T] negative log-likelihood −log_probs, 0 where masked.

    ``log_probs``: [T] at temperature 1, whatever the rollout temperature is (slime divides by it); ``mask``: [T] bool.
    """
    return -select(log_probs, mask)
