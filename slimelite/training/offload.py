"""A trainer's device memory, given back and taken again."""

from __future__ import annotations

import torch
from torch import Tensor

from slimelite.training.model import PolicyModel
from slimelite.training.optimizer import Optimizers


def move(model: PolicyModel, optimizers: Optimizers, device: torch.device) -> None:
    """Shards of the weights and of the optimizer state to ``device``; gradients are dropped between rollouts."""
    model.to(device)
    for optimizer in optimizers.all:
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    state[key] = value.to(device)
    torch.cuda.empty_cache()
