"""A micro-batch: rows of a rollout packed into one, with what a model and a loss read of them."""

from __future__ import annotations

from copy import copy
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from slimelite.samples.sample import COLUMNS
from slimelite.training.columns import TokenColumns, pairs_of
from slimelite.training.layout import Nodes, PackedSequences, ranges
from slimelite.training.prefixes import Prefixes, tokens_at


class MicroBatch:
    """R response tokens of some rows, the T tokens that predict them, and the ``columns`` of those R, on their device.

    A prefix that rows share is in it once (`slimelite.training.layout`). So several response tokens may be predicted
    by one position, the first ones of a prompt's answers for example; their gradients add up there.

    ``columns``: of the whole rollout; ``rows``: [n] int64 of its table; ``lengths``: prompt and response tokens of
    each. ``input_ids``, ``position_ids``: [1, T], one dummy token if there are no rows; ``response_index``: [R]
    position whose hidden state predicts each response token; ``targets``: [R] those tokens. ``segments``: [R] index
    into ``rows``; ``token_index``: [R] int64 on the CPU, position in the table's response columns.

    It is no dataclass: FSDP looks into those that a forward pass gets, and would cast the columns to bf16 each time.
    """

    def __init__(
        self, columns: TokenColumns, rows: np.ndarray, device: torch.device | str = "cpu", *, shares: bool = False
    ) -> None:
        """Pack ``rows`` of a rollout; no rows give an empty micro-batch.

        Args:
            shares: whether a prefix that rows share is in it once; else the rows are end to end in their order.

        Raises:
            ValueError: a row has no prompt, so that no position predicts its first response token.
        """
        table = columns.table
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

        self.columns, self.rows, self.lengths = columns, rows, lengths.tolist()
        self.input_ids, self.position_ids = to_device(ids[None]), to_device(positions[None])
        self.sequences = PackedSequences(nodes, device)
        self.response_index = to_device(nodes.positions(np.repeat(leaf, responses), depths - 1))
        self.targets = to_device(table.response_tokens[token_index])
        self.segments = to_device(np.repeat(np.arange(len(rows)), responses))
        self.token_index = torch.from_numpy(token_index)

    def padded(self) -> MicroBatch:
        """The same micro-batch with each of its n sequences in a row of its own, padded on the right to the longest.

        Causal layers never see the padding. The sequences share nothing. ``input_ids`` and ``position_ids`` are
        [n, longest], and ``response_index`` points into them, flattened row by row.
        """
        longest, device = max(self.lengths), self.input_ids.device
        lengths = torch.tensor(self.lengths, device=device)
        positions = torch.arange(longest, device=device).expand(len(lengths), -1).contiguous()
        padded = copy(self)
        padded.input_ids, padded.position_ids = torch.zeros_like(positions), positions
        padded.input_ids[positions < lengths[:, None]] = self.input_ids[0]
        padded.sequences = PackedSequences.from_lengths([longest] * len(lengths), device)
        shift = torch.arange(len(lengths), device=device) * longest - (lengths.cumsum(0) - lengths)
        padded.response_index = self.response_index + shift[self.segments]
        return padded

    def take(self, column: Tensor) -> Tensor:
        """[R] values of a column [N] of the rollout, on this micro-batch's device."""
        return column[self.token_index].to(self.targets.device)

    @cached_property
    def mask(self) -> Tensor:
        """[R] see `TokenColumns`, and for the others below."""
        return self.take(self.columns.mask)

    @cached_property
    def rollout_log_probs(self) -> Tensor:
        """[R]."""
        return self.take(self.columns.rollout_log_probs)

    @cached_property
    def weights(self) -> Tensor:
        """[R]."""
        return self.take(self.columns.weights)

    @cached_property
    def pg_weights(self) -> Tensor:
        """[R]."""
        return self.take(self.columns.pg_weights)

    @cached_property
    def advantages(self) -> Tensor:
        """[R]."""
        return self.take(self.columns.advantages)

    @cached_property
    def old(self) -> Tensor:
        """[R]; in a rollout's first step, the current log-probs where no pass has computed them before."""
        return self.take(self.columns.old)

    @cached_property
    def ref(self) -> Tensor:
        """[R]."""
        return self.take(self.columns.ref)

    @cached_property
    def pairs(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """The P pairs for a loss that compares two replies, else None: [P] int64 index of the chosen row and of the
        rejected one, and [P] float64 the weight of each pair.
        """
        if self.columns.pair_weights is None:
            return None
        chosen, rejected = pairs_of(self.columns.table, self.rows)
        order, device = np.argsort(chosen), self.targets.device
        weights = self.columns.pair_weights[self.rows[chosen[order]]]
        first, second, each = (torch.from_numpy(x).to(device) for x in (chosen[order], rejected[order], weights))
        return first, second, each

    @property
    def where(self) -> tuple[Tensor, Tensor, int]:
        """Mask, segments and number of rows, which most functions of `slimelite.algorithms` take in this order."""
        return self.mask, self.segments, len(self.rows)

    def fetch(self) -> None:
        """Copy what losses read to the device now: once a GPU has begun the model's pass, a copy waits for its end."""
        _ = self.where, self.weights, self.pg_weights, self.advantages, self.pairs
        _ = self.rollout_log_probs, self.old, self.ref

    def column(self, name: str) -> Tensor:
        """A column of numbers of the table, such as one of your own (see `sample.COLUMNS`): [R], or [n] where
        a sample has one value.

        Raises:
            ValueError: the table lacks it.
        """
        column, values = COLUMNS[name], getattr(self.columns.table, name)
        if values is None:
            raise ValueError(f"no sample of this rollout has {name}: fill sample.{name} where samples are made")
        if column.per == "token":
            return self.take(torch.from_numpy(values))
        return torch.from_numpy(values[self.rows]).to(self.targets.device)
