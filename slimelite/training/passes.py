"""Forward passes without gradient."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from slimelite.table import SampleTable
from slimelite.training.batch import MicroBatch
from slimelite.training.model import PolicyModel
from slimelite.training.parallel import World, reshard


@torch.no_grad()
def table_log_probs(
    model: PolicyModel, table: SampleTable, dealt: list[list[np.ndarray]], world: World, temperature: float
) -> Tensor:
    """[response tokens of the table] log-probs on the CPU, the same on every rank (collective).

    ``dealt``: the micro-batches of rows of each rank; tokens of rows in none of them get NaN.
    """
    found: Tensor | None = None
    for rows in dealt[world.rank]:
        batch = MicroBatch.from_table(table, rows, world.device)
        log_probs, _ = model(batch, temperature)
        if found is None:
            found = torch.zeros(len(table.response_tokens), dtype=log_probs.dtype)
        found[batch.token_index] = log_probs.cpu()
    reshard(model)
    assert found is not None, "every rank has a micro-batch, if only an empty one"
    computed = np.zeros(len(table), bool)
    computed[np.concatenate([rows for parts in dealt for rows in parts])] = True
    absent = torch.from_numpy(np.repeat(~computed, table.response_lengths))
    return world.all_reduce(found).masked_fill(absent, torch.nan)
