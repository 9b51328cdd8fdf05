"""Frozen policies beside the one that trains: the reference of the KL, the teacher of distillation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from slimelite.arguments import Args
from slimelite.training.model import PolicyModel, build_policy
from slimelite.training.parallel import World


class FrozenPolicy:
    """The policy at ``path``, sharded like the one that trains and never updated.

    On a GPU its shards wait in host memory between uses.
    """

    def __init__(self, args: Args, world: World, path: str | None) -> None:
        self._world = world
        self.model = build_policy(args, world, path, trainable=False)
        self._rest()

    @contextmanager
    def weights(self) -> Iterator[PolicyModel]:
        """The policy as a model to call, for the length of the context."""
        self.model.to(self._world.device)
        try:
            yield self.model
        finally:
            self._rest()

    @torch.no_grad()
    def copy_from(self, policy: PolicyModel) -> None:
        """Become what ``policy`` is now (``--ref-update-interval``)."""
        with self.weights() as model:
            for (_, mine), (_, theirs) in zip(model.named_weights(), policy.named_weights(), strict=True):
                mine.copy_(theirs)

    def _rest(self) -> None:
        if self._world.device.type == "cuda":
            self.model.cpu()
            torch.cuda.empty_cache()
