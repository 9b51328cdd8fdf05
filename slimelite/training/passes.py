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
    """Log-probs and entropies of a table's response tokens, put together from micro-batches and then from ranks.

    They stay on their device until `gather`, so that adding never waits for a GPU.
    """

    def __init__(self, tokens: int, world: World) -> None:
        self._tokens, self._world = tokens, world
        self._parts: list[tuple[Tensor, Tensor]] = []

    def add(self, batch: MicroBatch, log_probs: Tensor, entropy: Tensor) -> None:
        """What the model said of one micro-batch; both [R]."""
        self._parts.append((batch.token_index, torch.stack([log_probs.detach(), entropy.detach()])))

    def gather(self) -> tuple[Tensor, Tensor]:
        """[tokens] log-probs and entropies on the CPU, the same on every rank (collective); NaN where nobody added."""
        assert self._parts, "every rank has a micro-batch, if only an empty one"
        found = torch.zeros(3, self._tokens, dtype=self._parts[0][1].dtype)
        for index, values in self._parts:
            found[:2, index] = values.cpu()
            found[2, index] = 1
        *columns, seen = self._world.all_reduce(found)
        log_probs, entropy = (column.masked_fill(seen == 0, torch.nan) for column in columns)
        return log_probs, entropy


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
    return scores.gather()
