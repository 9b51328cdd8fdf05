"""Tensors of a micro-batch: rows of a table, packed into one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from slimelite.table import SampleTable
from slimelite.training.layout import Nodes, PackedSequences, ranges
from slimelite.training.prefixes import Prefixes, tokens_at


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """R response tokens of some rows and the T tokens that predict them.

    A prefix that rows share is in it once (`slimelite.training.layout`). So several response tokens may be predicted
    by one position, the first ones of a prompt's answers for example; their gradients add up there.

    ``rows``: [n] int64 of the table; ``lengths``: prompt and response tokens of each; ``tokens``: T, 0 for an empty
    micro-batch, whose row is one dummy token. ``input_ids``, ``position_ids``: [1, T]; ``response_index``: [R] position
    whose hidden state predicts each response token; ``targets``: [R] those tokens. ``segments``: [R] index into
    ``rows``; ``token_index``: [R] int64 on the CPU, position in the table's response columns.
    """

    rows: np.ndarray
    lengths: list[int]
    tokens: int
    input_ids: Tensor
    position_ids: Tensor
    sequences: PackedSequences
    response_index: Tensor
    targets: Tensor
    segments: Tensor
    token_index: Tensor

    @classmethod
    def from_table(
        cls, table: SampleTable, rows: np.ndarray, device: torch.device, *, shares: bool = False
    ) -> MicroBatch:
        """Pack ``rows`` of ``table``; no rows give an empty micro-batch.

        Args:
            shares: whether a prefix that rows share is in it once; else the rows are end to end in their order.

        Raises:
            ValueError: a row has no prompt, so that no position predicts its first response token.
        """
        prompts, responses = np.diff(table.prompt_offsets)[rows], table.response_lengths[rows]
        if (prompts == 0).any():
            ids = table.sample_id[rows[prompts == 0]].tolist()
            raise ValueError(f"samples {ids[:8]} have no prompt tokens; a response needs at least one token before it")
        lengths = prompts + responses
        order, shared = np.arange(len(rows)), np.zeros(len(rows), np.int64)
        if shares:
            order, shared = Prefixes.of(table, shares=True).within(rows, np.zeros_like(rows))
        own = lengths[order] - shared
        positions = ranges(shared, own)
        ids = tokens_at(table, np.repeat(rows[order], own), positions)
        if not len(rows):
            ids = positions = np.zeros(1, np.int64)
        one = np.ones(1, np.int64)  # the dummy token's
        nodes, leaves = Nodes.of_rows(lengths[order], shared) if len(rows) else Nodes.of_rows(one, 0 * one)
        depths = ranges(prompts, responses)  # of the response tokens
        leaf = np.empty_like(rows)
        leaf[order] = leaves[: len(rows)]
        token_index = ranges(table.response_offsets[rows], responses)

        def to_device(values: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(device)

        return cls(
            rows=rows,
            lengths=lengths.tolist(),
            tokens=len(ids) if len(rows) else 0,
            input_ids=to_device(ids[None]),
            position_ids=to_device(positions[None]),
            sequences=PackedSequences(nodes, device),
            response_index=to_device(nodes.positions(np.repeat(leaf, responses), depths - 1)),
            targets=to_device(table.response_tokens[token_index]),
            segments=to_device(np.repeat(np.arange(len(rows)), responses)),
            token_index=torch.from_numpy(token_index),
        )

    def padded(self) -> MicroBatch:
        """The same micro-batch with each of its n sequences in a row of its own, padded on the right to the longest.

        Causal layers never see the padding. The sequences share nothing. ``input_ids`` and ``position_ids`` are
        [n, longest], and ``response_index`` points into them, flattened row by row.
        """
        longest, device = max(self.lengths), self.input_ids.device
        lengths = torch.tensor(self.lengths, device=device)
        positions = torch.arange(longest, device=device).expand(len(lengths), -1).contiguous()
        input_ids = torch.zeros_like(positions)
        input_ids[positions < lengths[:, None]] = self.input_ids[0]
        shift = torch.arange(len(lengths), device=device) * longest - (lengths.cumsum(0) - lengths)
        return replace(
            self,
            input_ids=input_ids,
            position_ids=positions,
            sequences=PackedSequences.from_lengths([longest] * len(lengths), device),
            response_index=self.response_index + shift[self.segments],
        )

    def take(self, column: Tensor) -> Tensor:
        """[R] values of a per-token column of the table, on this micro-batch's device."""
        return column[self.token_index].to(self.targets.device)


@dataclass(frozen=True, slots=True)
class Pairs:
    """The P pairs of a micro-batch: ``chosen``, ``rejected`` [P] int64 index of its rows; ``weights`` [P] float64."""

    chosen: Tensor
    rejected: Tensor
    weights: Tensor

    @classmethod
    def of(cls, table: SampleTable, weights: np.ndarray, batch: MicroBatch) -> Pairs:
        """The pairs of ``batch``, which has both rows of each; ``weights``: see `pair_weights`."""
        chosen, rejected = _pairs(table, batch.rows)
        order, device = np.argsort(chosen), batch.targets.device
        found = (chosen[order], rejected[order], weights[batch.rows[chosen[order]]])
        return cls(*(torch.from_numpy(values).to(device) for values in found))


def pair_weights(table: SampleTable, steps: list[np.ndarray]) -> np.ndarray:
    """[n] the weight of each row's pair: 1 / number of pairs in its optimizer step, including pairs not trained on.

    A pair is the two rows of a unit; the one with the higher reward is the chosen one.

    Raises:
        ValueError: a unit does not have two rows of different rewards, or only one of them has tokens to train on.
    """
    units, sizes = np.unique(table.unit_id, return_counts=True)
    if (sizes != 2).any():
        raise ValueError(
            f"--loss-type dpo_loss trains on pairs: units {units[sizes != 2].tolist()[:8]} do not have two rows; a "
            "rollout function gives the two samples of a pair one unit_id"
        )
    chosen, rejected = _pairs(table, np.arange(len(table)))
    trained = table.mask_sums > 0
    wrong = ~(table.reward[chosen] > table.reward[rejected]) | (trained[chosen] != trained[rejected])
    if wrong.any():
        raise ValueError(
            f"--loss-type dpo_loss trains on pairs: in units {units[wrong].tolist()[:8]} no row has the higher "
            "reward, or one row alone has tokens to train on; mark both with remove_sample"
        )
    weights = np.zeros(len(table))
    for rows in steps:
        weights[rows] = 2 / len(rows)
    return weights


def _pairs(table: SampleTable, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Index into ``rows`` of the chosen and of the rejected row of each unit, by unit."""
    order = np.lexsort((-table.reward[rows], table.unit_id[rows]))
    return order[0::2], order[1::2]
