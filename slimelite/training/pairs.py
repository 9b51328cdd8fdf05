"""Preference pairs: which rows of a table are compared with each other, and what a pair weighs in its step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slimelite.table import SampleTable


@dataclass(frozen=True, slots=True)
class BatchPairs:
    """The P pairs of a micro-batch: ``chosen``, ``rejected`` [P] int64 index of its rows; ``weights`` [P] float64."""

    chosen: Tensor
    rejected: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs of a table with n rows.

    ``rejected_of``: [n] int64, for the chosen row of a pair the row of its other reply, else -1; ``weights``: [n] what
    the pair of each row weighs, 1 / pairs of its optimizer step, those without a token to train on included.
    """

    rejected_of: np.ndarray
    weights: np.ndarray

    @classmethod
    def from_table(cls, table: SampleTable, steps: list[np.ndarray]) -> Pairs:
        """A pair is the two rows of a unit; the one with the higher reward is the chosen one.

        Raises:
            ValueError: a unit is no such pair, or one of its two rows alone has tokens to train on.
        """
        order = np.lexsort((-table.reward, table.unit_id))
        units, sizes = np.unique(table.unit_id, return_counts=True)
        if (sizes != 2).any():
            odd = units[sizes != 2].tolist()
            raise ValueError(
                f"--loss-type dpo_loss trains on pairs: units {odd[:8]} do not have two rows; a rollout function gives "
                "the two samples of a pair one unit_id"
            )
        chosen, rejected = order[0::2], order[1::2]
        trained = table.mask_sums > 0
        wrong = ~(table.reward[chosen] > table.reward[rejected]) | (trained[chosen] != trained[rejected])
        if wrong.any():
            raise ValueError(
                f"--loss-type dpo_loss trains on pairs: in units {units[wrong].tolist()[:8]} no row has the higher "
                "reward, or one row alone has tokens to train on; mark both with remove_sample"
            )
        rejected_of, weights = np.full(len(table), -1), np.zeros(len(table))
        rejected_of[chosen] = rejected
        for rows in steps:
            weights[rows] = 2 / len(rows)
        return cls(rejected_of, weights)

    def of(self, rows: np.ndarray, device: torch.device) -> BatchPairs:
        """The pairs among ``rows`` of the table, which hold them whole."""
        place = {row: i for i, row in enumerate(rows.tolist())}
        chosen = rows[self.rejected_of[rows] >= 0]
        rejected = self.rejected_of[chosen]
        return BatchPairs(
            chosen=torch.tensor([place[row] for row in chosen.tolist()], dtype=torch.int64, device=device),
            rejected=torch.tensor([place[row] for row in rejected.tolist()], dtype=torch.int64, device=device),
            weights=torch.from_numpy(self.weights[chosen]).to(device),
        )
