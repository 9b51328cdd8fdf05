"""Frozen policies beside the one that trains: the reference of the KL, the teacher of distillation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from slimelite.arguments import Args
from slimelite.training.loading import build_policy
from slimelite.training.model import PolicyModel
from slimelite.training.offload import HostMemory
from slimelite.training.parallel import World, reshard


class FrozenPolicy:
    """The policy at ``path``, sharded like the one that trains and never updated.

    On a GPU its shards wait in host memory between uses.
    """

    def __init__(self, args: Args, world: World, path: str | None) -> None:
        self.model = build_policy(args, world, path, trainable=False)
        self._memory = HostMemory(self.model.parameters, world.device) if world.device.type == "cuda" else None
        if self._memory is not None:
            self._memory.offload()

    @contextmanager
    def weights(self, *, unchanged: bool = True) -> Iterator[PolicyModel]:
        """The policy as a model to call, for the length of the context; ``unchanged``: nobody writes to it there."""
        if self._memory is not None:
            self._memory.onload()
        try:
            yield self.model
        finally:
            if self._memory is not None:
                reshard(self.model)
                self._memory.offload(unchanged=unchanged)

    @torch.no_grad()
    def copy_from(self, policy: PolicyModel) -> None:
        """Become what ``policy`` is now (``--ref-update-interval``)."""
        with self.weights(unchanged=False) as model:
            for (_, mine), (_, theirs) in zip(model.named_weights(), policy.named_weights(), strict=True):
                mine.copy_(theirs)
