"""Tables of rows that are given by their token ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slimelite.samples.sample import Sample, Status
from slimelite.samples.table import SampleTable

Rows = Sequence[tuple[Sequence[int], Sequence[int]]]


def tree_table(rows: Rows, unit_id: np.ndarray | None = None, *, seed: int = 0) -> SampleTable:
    """Rows of (prompt, response) with random advantages, masks and engine log-probs; each is a unit unless
    ``unit_id`` [n] says otherwise.
    """
    rng, samples = np.random.default_rng(seed), []
    for i, (prompt, response) in enumerate(rows):
        sample = Sample(group_index=i, index=i, tokens=[int(t) for t in prompt], reward=float(rng.random()))
        log_probs = (-rng.random(len(response)) - 3.5).tolist()
        sample.append_response_tokens([int(t) for t in response], log_probs=log_probs)
        sample.loss_mask = [int(rng.random() > 0.2) for _ in response]
        sample.status = Status.COMPLETED
        samples.append(sample)
    table = SampleTable.from_samples([samples])
    table.advantage = rng.normal(size=len(table))
    if unit_id is not None:
        table.unit_id = unit_id
    return table


def tokens_of(table: SampleTable) -> list[tuple[list[int], list[int]]]:
    """The (prompt, response) of each row."""
    names = ("prompt_tokens", "response_tokens")
    found = [tuple(table.row_slice(name, row).tolist() for name in names) for row in range(len(table))]
    return [(prompt, response) for prompt, response in found]
