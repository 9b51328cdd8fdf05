"""A trainer's memory, given back and taken again."""

from __future__ import annotations

import ctypes
import sys

import psutil
import torch
from torch import Tensor

from slimelite.training.model import LanguageModel
from slimelite.training.optimizer import Optimizers


def move(model: LanguageModel, optimizers: Optimizers, device: torch.device) -> None:
    """Shards of the weights and of the optimizer state to ``device``; gradients are dropped between rollouts."""
    model.to(device)
    for optimizer in optimizers.all:
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    state[key] = value.to(device)
    torch.cuda.empty_cache()


def return_freed_memory() -> None:
    """Give back to the system what this process has freed: glibc keeps activations below its mmap threshold (up to
    32 MiB a tensor) in its heap, gigabytes after a large micro-batch, while engines need them. Without glibc, nothing.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None and hasattr(libc, "malloc_trim"):  # musl has none
        libc.malloc_trim(0)


def memory_used(device: torch.device) -> float:
    """GB (1e9 bytes) in use: of a GPU, by everybody on it, engines too; on a CPU, resident in this process."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return (total - free) / 1e9
    return float(psutil.Process().memory_info().rss) / 1e9
