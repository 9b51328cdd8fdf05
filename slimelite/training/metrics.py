"""Means that add up over micro-batches, optimizer steps and ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from slimelite.algorithms.corrections import effective_sample_size
from slimelite.algorithms.packed import Metrics
from slimelite.training.parallel import World


class MetricSums:
    """Named (sum, weight) pairs; they stay on their device until `means`, so that adding never waits for a GPU."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._pairs: dict[str, list[tuple[Tensor | float, Tensor | float]]] = {}

    def add(self, name: str, total: Tensor | float, weight: Tensor | float) -> None:
        """Add one pair to those of its name."""
        if isinstance(total, Tensor):
            total = total.detach()
        self._pairs.setdefault(name, []).append((total, weight))

    def add_all(self, metrics: Metrics) -> None:
        """Add a pair to each name."""
        for name, pair in metrics.items():
            self.add(name, *pair)

    def means(self) -> dict[str, float]:
        """sum of sums / sum of weights over all ranks (collective); a name without weight is left out."""
        sums: dict[str, tuple[float, float]] = {}
        for pairs in self._gather(self._local_sums()):
            for name, (total, weight) in pairs.items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = (before[0] + total, before[1] + weight)
        return {name: total / weight for name, (total, weight) in sums.items() if weight}

    def _local_sums(self) -> dict[str, tuple[float, float]]:
        flat = [value for pairs in self._pairs.values() for pair in pairs for value in pair]
        tensors = [torch.as_tensor(value, dtype=torch.float64, device=self._world.device) for value in flat]
        values = iter(torch.stack(tensors).tolist() if tensors else [])
        sums = {}
        for name, pairs in self._pairs.items():
            total, weight = zip(*[(next(values), next(values)) for _ in pairs], strict=True)
            sums[name] = (sum(total), sum(weight))
        return sums

    def _gather(self, local: dict[str, tuple[float, float]]) -> list[dict[str, tuple[float, float]]]:
        if self._world.size == 1:
            return [local]
        everyone: list[dict[str, tuple[float, float]]] = [{} for _ in range(self._world.size)]
        dist.all_gather_object(everyone, local)
        return everyone


def mismatch_summary(means: dict[str, float]) -> dict[str, float]:
    """``means`` with the mean squared ratio replaced by the effective sample size, which is no mean."""
    square = means.pop("mismatch_ratio_sq", None)
    if square is not None:
        means["mismatch_ess"] = effective_sample_size(means["mismatch_ratio"], square)
    return means
