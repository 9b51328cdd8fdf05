"""Forward passes without gradient."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from slimelite.table import SampleTable
from slimelite.training.batch import MicroBatch
from slimelite.training.model import PolicyModel
from slimelite.training.parallel import World, reshard


class Scores:
    """What a model says of a table's response tokens (log-prob and entropy, or value), put together from micro-batches
    and then from ranks.

    They stay on their device until `gather`, so that adding never waits for a GPU.
    """

    def __init__(self, tokens: int, world: World) -> None:
        self._tokens, self._world = tokens, world
        self._parts: list[tuple[Tensor, Tensor]] = []

    def add(self, batch: MicroBatch, *values: Tensor) -> None:
        """What the model said of one micro-batch; each [R]."""
        self._parts.append((batch.token_index, torch.stack([v.detach() for v in values])))

    def gather(self) -> tuple[Tensor, ...]:
        """[tokens] of each on the CPU, the same on every rank (collective); NaN where nobody added."""
        assert self._parts, "every rank has a micro-batch, if only an empty one"
        first = self._parts[0][1]
        found = torch.zeros(len(first) + 1, self._tokens, dtype=first.dtype)
        for index, values in self._parts:
            found[:-1, index] = values.cpu()
            found[-1, index] = 1
        *columns, seen = self._world.all_reduce(found)
        return tuple(column.masked_fill(seen == 0, torch.nan) for column in columns)


@torch.no_grad()
def table_scores(
    model: PolicyModel, table: SampleTable, dealt: list[list[np.ndarray]], world: World, temperature: float
) -> tuple[Tensor, Tensor]:
    """`Scores.gather` of a pass over ``dealt``, the micro-batches of rows of each rank (collective)."""
    scores = Scores(len(table.response_tokens), world)
    for rows in dealt[world.rank]:
        batch = MicroBatch.from_table(table, rows, world.device)
        scores.add(batch, *model(batch, temperature))
    reshard(model)
    log_probs, entropy = scores.gather()
    return log_probs, entropy
