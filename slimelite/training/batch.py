"""A micro-batch: rows of a rollout that share a forward pass, with the data that a model and a loss need.

The tokens of a micro-batch form a tree of shared prefixes, or are sequences one after the other. In a tree, the rows
are sorted by their token ids. Each row adds only the tokens that it does not share with the row before it. So the
tokens are in depth-first order. A *node* is a range of tokens that the same rows share. The tokens after a node, up to
its position ``until``, belong to its descendants. An example is a prompt of 5 tokens with answers of 3 and 2 tokens::

    position   0 1 2 3 4 | 5 6 7 | 8 9      nodes [0, 5) until 10, [5, 8) until 8, [8, 10) until 10
    depth      0 1 2 3 4 | 5 6 7 | 5 6

Rows without a shared prefix are nodes without descendants, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from slimelite.samples.sample import COLUMNS
from slimelite.training.columns import TokenColumns, pairs_of
from slimelite.training.planning import Prefixes, ranges, tokens_at
from slimelite.training.replay import KeptIds

# the columns of a rollout that a loss reads
READ = ("mask", "rollout_log_probs", "weights", "pg_weights", "advantages", "old", "ref")
# number of (query, key) pairs that take about as long as one more call of a CPU kernel
CALL = 2000
# number of padding tokens that take about as long as one more call of a scan
SCAN_CALL = 256


class MicroBatch:
    """A micro-batch on the device: R response tokens of some rows, the T tokens from which a model predicts them, and
    the data of the R tokens.

    A prefix that rows share is included once (see the docstring of this file). So one position may predict several
    response tokens, for example the first tokens of a prompt's answers. The gradients of these tokens are added at this
    position.

    ``columns``: the columns of the whole rollout. ``rows``: [n] int64, the micro-batch's rows in the rollout's table.
    ``lengths``: the number of prompt and response tokens of each row. ``input_ids``, ``position_ids``: [1, T]; one
    dummy token if there are no rows. ``response_index``: [R], for each response token, the position whose hidden state
    predicts it. ``targets``: [R], the response tokens. ``segments``: [R], the index of each token's row in ``rows``.
    ``token_index``: [R] int64 on the CPU, the position of each token in the table's response columns. ``kept``: the
    kept ids of the tokens; None if all log-probs are over the whole vocabulary. After `fetch`, the columns that
    ``READ`` names are attributes too, [R] each, see `TokenColumns`. In a rollout's first step, the current log-probs
    replace the missing values of ``old``.

    This is not a dataclass: FSDP would look into a dataclass that is passed to ``forward``, and would cast its columns
    to bf16 in each pass.
    """

    mask: Tensor
    rollout_log_probs: Tensor
    weights: Tensor
    pg_weights: Tensor
    advantages: Tensor
    old: Tensor
    ref: Tensor

    def __init__(
        self, columns: TokenColumns, rows: np.ndarray, device: torch.device | str = "cpu", *, shares: bool = False
    ) -> None:
        """Pack ``rows`` of a rollout. Without rows the micro-batch is empty.

        Args:
            shares: whether a prefix that rows share is included once. If it is False, the rows follow each other in
                their order.

        Raises:
            ValueError: a row has no prompt, so no position predicts its first response token.
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
        one = np.ones(1, np.int64)  # length of the dummy token
        nodes, leaves = Nodes.of_rows(lengths[order], shared) if len(rows) else Nodes.of_rows(one, 0 * one)
        depths = ranges(prompts, responses)  # depths of the response tokens
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
        self.kept = None
        if table.kept_counts is not None and table.kept_ids is not None and table.kept_offsets is not None:
            places = ranges(table.kept_offsets[rows], np.diff(table.kept_offsets)[rows])
            self.kept = KeptIds(table.kept_ids[places], table.kept_counts[token_index], device)

    def padded(self) -> MicroBatch:
        """The same micro-batch, with each of its n sequences in its own row, padded on the right to the longest row.

        The sequences must not share prefixes. In causal layers, this padding does not change the outputs of other
        tokens. ``input_ids`` and ``position_ids`` are [n, longest]. ``response_index`` has indices into the flattened
        [n · longest] positions.
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
        """[R] the values of ``column`` for this micro-batch's tokens, on the micro-batch's device. ``column``: [N], a
        column of the rollout."""
        return column[self.token_index].to(self.targets.device)

    @cached_property
    def pairs(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """The P pairs for a loss that compares two replies, as (chosen rows, rejected rows, weights of the pairs). The
        chosen and rejected rows are indices [P] int64; the weights are [P] float64. None for other losses.
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
        """(mask, segments, number of rows). Most functions of `slimelite.algorithms` take these three arguments in this
        order."""
        return self.mask, self.segments, len(self.rows)

    def fetch(self) -> MicroBatch:
        """Copy the columns ``READ``, which the loss needs, to the device. Call this method before the model's pass. On
        a GPU, a later copy would wait for the end of the pass."""
        for name in READ:
            setattr(self, name, self.take(getattr(self.columns, name)))
        if self.columns.pair_weights is not None:
            _ = self.pairs
        return self

    def column(self, name: str) -> Tensor:
        """A numeric column of the table, for example a column that you added (see `sample.COLUMNS`). The result is [R]
        if the column has a value for each token, or [n] if it has a value for each sample.

        Raises:
            ValueError: the table does not have the column.
        """
        column, values = COLUMNS[name], getattr(self.columns.table, name)
        if values is None:
            raise ValueError(f"the samples have no {name}: set sample.{name} in the function that creates the samples")
        if column.per == "token":
            return self.take(torch.from_numpy(values))
        return torch.from_numpy(values[self.rows]).to(self.targets.device)


@dataclass(frozen=True, slots=True)
class Nodes:
    """The N nodes of a tree, in the order of their tokens. Each field is [N] int64.

    ``starts``, ``ends``: the node's first position, and the position after its last token. ``until``: the position
    after the node's last descendant. ``depths``: the depth of the node's first token in its row. ``levels``: the number
    of nodes above the node. ``parents``: the index of the node directly above, -1 for a root.
    """

    starts: np.ndarray
    ends: np.ndarray
    until: np.ndarray
    depths: np.ndarray
    levels: np.ndarray
    parents: np.ndarray

    @classmethod
    def of_rows(cls, lengths: np.ndarray, shared: np.ndarray) -> tuple[Nodes, np.ndarray]:
        """The nodes of sorted rows, and the last node of each row [n]. ``lengths``: [n], the number of tokens of each
        row. ``shared``: [n], the number of tokens that each row shares with the row before it.
        """
        begins = np.concatenate([[0], np.cumsum(lengths - shared)])
        padded = np.append(shared, 0)
        # runs of rows that are equal so far: the first row, the row after the last one, the depth up to which they are
        # equal
        first, last, depth = np.zeros(1, np.int64), np.full(1, len(lengths)), np.zeros(1, np.int64)
        parent, leaf = np.full(1, -1), np.full(len(lengths), -1)
        nodes: list[np.ndarray] = []
        count = level = 0
        while len(first):
            to = lengths[first]
            many = np.flatnonzero(last - first > 1)
            if len(many):
                to[many] = np.minimum.reduceat(padded, np.stack([first[many] + 1, last[many]], 1).ravel())[::2]
            there = to > depth
            own = np.where(there, count + np.cumsum(there) - 1, parent)
            start = begins[first] + depth - shared[first]
            columns = [start, start + to - depth, begins[last], depth, np.full(len(first), level), parent]
            nodes.append(np.stack(columns)[:, there])
            single = last - first == 1
            leaf[first[single]] = own[single]
            count, level = count + int(there.sum()), level + bool(there.any())
            rows, run = ranges(first[many], (last - first)[many]), np.repeat(many, (last - first)[many])
            parts = np.flatnonzero((rows == first[run]) | (shared[rows] == to[run]))
            first, depth, parent = rows[parts], to[run[parts]], own[run[parts]]
            last = first + np.diff(np.append(parts, len(rows)))
        columns = np.concatenate(nodes, axis=1)
        order = np.argsort(columns[0], kind="stable")
        place = np.append(np.argsort(order), -1)  # the last entry maps -1 to -1
        columns = columns[:, order]
        columns[5] = place[columns[5]]
        return cls(*columns), place[leaf]

    def positions(self, leaves: np.ndarray, depths: np.ndarray) -> np.ndarray:
        """[m] the positions of m tokens. Token i is at depth ``depths[i]`` of the row whose last node is
        ``leaves[i]``."""
        nodes, above = leaves.copy(), np.flatnonzero(depths < self.depths[leaves])
        while len(above):
            nodes[above] = self.parents[nodes[above]]
            above = above[depths[above] < self.depths[nodes[above]]]
        return self.starts[nodes] + depths - self.depths[nodes]


# ranges of tokens: (first positions, lengths)
Stretches = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Blocks of queries and their keys, for one call of a CPU kernel. The blocks have similar sizes, and are padded to
    the largest block.

    ``count``: the number of blocks. ``queries``: [count · longest], the positions of the queries; padding repeats a
    block's first position. ``real``: [m], the indices of the m entries of ``queries`` that are not padding. ``rows``:
    [m], ``queries`` without the padding. ``keys``: [count · longest], the positions of the keys, padded like
    ``queries``. ``hidden``: [count, 1, 1, longest] bool, True for keys that are padding; None if there is no padding.
    """

    count: int
    queries: Tensor
    real: Tensor
    rows: Tensor
    keys: Tensor
    hidden: Tensor | None


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of queries and their keys, one block after the other, for one call of a GPU kernel.

    ``queries``, ``keys``: the positions of the queries and keys of all blocks. ``cu_queries``, ``cu_keys``: [blocks +
    1] int32, the start of each block, and the end of the last block. ``longest``: the largest number of queries in a
    block, and the largest number of keys.
    """

    queries: Tensor
    keys: Tensor
    cu_queries: Tensor
    cu_keys: Tensor
    longest: tuple[int, int]


@dataclass(frozen=True, slots=True)
class LevelPart:
    """Nodes of one level, for one call of a scan. The nodes have similar lengths, and are padded at their ends to the
    longest node.

    ``count``: the number of nodes. ``positions``: [count · longest], the positions of the nodes' tokens. Padding has
    position T, the number of tokens in the micro-batch.
    ``real``: [m], the indices of the m entries of ``positions`` that are not padding; None if there is no padding.
    ``parents``: [count], the index of each node's parent among the nodes of the level above, in the order of that
    level's parts; None in the first level.
    """

    count: int
    positions: Tensor
    real: Tensor | None
    parents: Tensor | None


class PackedSequences:
    """The layout of the T tokens of a micro-batch. The layout determines which tokens each token attends to.

    ``cu_seqlens``: [nodes + 1] int32, the first position of each node, then T. ``max_length``: the number of tokens of
    the longest node. ``longest_row``: the number of tokens of the longest row. The data for a kernel is created when a
    layer first reads it.
    """

    def __init__(self, nodes: Nodes, device: torch.device | str = "cpu") -> None:
        self.nodes = nodes
        self.device = torch.device(device)
        self.sizes = nodes.ends - nodes.starts
        self.cu_seqlens = self.offsets(self.sizes)
        self.max_length = int(self.sizes.max())
        self.longest_row = int((nodes.depths + self.sizes).max())
        self._windows: dict[int | None, Window] = {}
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    @classmethod
    def from_lengths(cls, lengths: list[int] | np.ndarray, device: torch.device | str = "cpu") -> PackedSequences:
        """The layout of sequences of these lengths (each at least 1), one after the other."""
        sizes = np.asarray(lengths, np.int64)
        assert (sizes > 0).all(), f"every packed sequence needs tokens; the lengths are {sizes.tolist()}"
        return cls(Nodes.of_rows(sizes, np.zeros_like(sizes))[0], device)

    @cached_property
    def shared(self) -> list[np.ndarray]:
        """For each level, its shared nodes as indices [m] into ``nodes``. The tokens below a shared node attend to all
        tokens of the node."""
        inner = self.nodes.until > self.nodes.ends
        return [np.flatnonzero(inner & (self.nodes.levels == level)) for level in np.unique(self.nodes.levels[inner])]

    @cached_property
    def own_buckets(self) -> list[Bucket]:
        """Buckets of all nodes, for the attention of each token to itself and to the earlier tokens of its node."""
        stretches = self.nodes.starts, self.sizes
        return _buckets(stretches, stretches)

    @cached_property
    def shared_buckets(self) -> list[Bucket]:
        """Buckets of all shared nodes, level by level: the queries are the tokens of a node's descendants, and the keys
        are the node's own tokens."""
        buckets = []
        for nodes in self.shared:
            buckets += _buckets(*self._below(nodes))
        return buckets

    @cached_property
    def own_blocks(self) -> Blocks:
        """One block for each node, in the order of the tokens. ``queries`` and ``keys`` are empty, because no token has
        to be moved: the blocks contain all tokens in their order."""
        none, longest = self.cu_seqlens[:0], (self.max_length, self.max_length)
        return Blocks(none, none, self.cu_seqlens, self.cu_seqlens, longest)

    @cached_property
    def shared_blocks(self) -> list[Blocks]:
        """For each level, one block for each shared node: the queries are the tokens of its descendants, and the keys
        are its own tokens."""
        return [self._blocks(*self._below(nodes)) for nodes in self.shared]

    def window(self, size: int | None) -> Window:
        """The `Window` for an attention window of ``size`` tokens. If ``size`` is None, the window includes whole
        rows."""
        if size not in self._windows:
            self._windows[size] = Window(self, size)
        return self._windows[size]

    @cached_property
    def levels(self) -> list[list[LevelPart]]:
        """The nodes by level, for layers with a state that goes from token to token. A node starts from the last state
        of its parent."""
        levels: list[list[LevelPart]] = []
        places = np.full(len(self.sizes), -1)
        for level in range(int(self.nodes.levels.max()) + 1):
            nodes = np.flatnonzero(self.nodes.levels == level)
            parts, order = [], [nodes[group] for group in _groups(np.ones_like(nodes), self.sizes[nodes], SCAN_CALL)]
            for group in order:
                positions, real = _padded(self.nodes.starts[group], self.sizes[group])
                positions[~real] = self.sizes.sum()
                parents = self._to_device(places[self.nodes.parents[group]]) if level else None
                at = None if real.all() else self._to_device(np.flatnonzero(real))
                parts.append(LevelPart(len(group), self._to_device(positions.ravel()), at, parents))
            places[np.concatenate(order)] = np.arange(len(nodes))
            levels.append(parts)
        return levels

    @cached_property
    def from_levels(self) -> Tensor:
        """[T] the index of each token in the order of `levels`: level by level, part by part, without padding."""
        parts = [part for level in self.levels for part in level]
        return torch.cat([x.positions if x.real is None else x.positions[x.real] for x in parts]).argsort()

    def with_tokens_before(self, count: int) -> tuple[Tensor, Tensor]:
        """The inputs of a convolution over each token and the ``count`` tokens before it on its path.

        Returns two results. (1) The positions of the inputs, node by node: the ``count`` tokens before the node, then
        the node's own tokens. T stands for a token that is missing before the start of the row. (2) [T], the index of
        each token's first input. The ``count`` + 1 inputs of a token are consecutive, and the token is the last of
        them.
        """
        if count not in self._before:
            window, sizes = self.window(count + 1), self.sizes + count
            begins = np.cumsum(sizes) - sizes
            positions = np.full(sizes.sum(), self.sizes.sum())
            positions[ranges(begins + count - window.reach, window.reach + self.sizes)] = window.keys
            self._before[count] = self._to_device(positions), self._to_device(ranges(begins, self.sizes))
        return self._before[count]

    def _to_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device)

    def _below(self, nodes: np.ndarray) -> tuple[Stretches, Stretches]:
        """The ranges of the descendants of each of ``nodes``, and the ranges of the nodes themselves."""
        below = self.nodes.ends[nodes], (self.nodes.until - self.nodes.ends)[nodes]
        return below, (self.nodes.starts[nodes], self.sizes[nodes])

    def _blocks(self, queries: Stretches, keys: Stretches) -> Blocks:
        rows, columns = (torch.from_numpy(ranges(*stretches)).to(self.device) for stretches in (queries, keys))
        longest = int(queries[1].max()), int(keys[1].max())
        return Blocks(rows, columns, self.offsets(queries[1]), self.offsets(keys[1]), longest)

    def offsets(self, sizes: np.ndarray) -> Tensor:
        """[n + 1] int32: the start of each of n parts with these ``sizes``, and the end of the last part."""
        ends = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        return torch.from_numpy(ends).to(self.device)


class Window:
    """The queries and keys of attention with a window of ``size`` tokens. Each node is one block of queries. The keys
    of a block are the node's own tokens, and earlier tokens of its path: those in the window of its first token.

    ``reach``: [nodes], for each node, the number of its keys that come before its first token. ``keys``: the positions
    of all keys, node by node.
    """

    def __init__(self, sequences: PackedSequences, size: int | None) -> None:
        self._sequences, self._size = sequences, size
        nodes, sizes = sequences.nodes, sequences.sizes
        self.reach = nodes.depths if size is None else np.minimum(nodes.depths, size - 1)
        # the nodes themselves, then the ends of their parents, then of the parents' parents, as far as the window goes
        each, left, above = np.arange(len(sizes)), self.reach, nodes.parents
        pieces = [(each, nodes.starts, sizes)]
        while (left > 0).any():
            each, above, left = each[left > 0], above[left > 0], left[left > 0]
            taken = np.minimum(left, sizes[above])
            pieces.insert(0, (each, nodes.ends[above] - taken, taken))
            above, left = nodes.parents[above], left - taken
        whose, first, count = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
        order = np.argsort(whose, kind="stable")
        self.keys = ranges(first[order], count[order])

    @cached_property
    def blocks(self) -> Blocks:
        """The blocks of all nodes, in the order of their tokens."""
        cu_queries, count = self._sequences.cu_seqlens, self.reach + self._sequences.sizes
        longest = self._sequences.max_length, int(count.max())
        keys = torch.from_numpy(self.keys).to(self._sequences.device)
        return Blocks(cu_queries[:0], keys, cu_queries, self._sequences.offsets(count), longest)

    @cached_property
    def buckets(self) -> list[tuple[Bucket, Tensor | None]]:
        """The nodes, grouped by size, as (bucket, mask). The mask is [count, 1, queries, keys] bool, True if the query
        attends to the key. The mask is None for causal attention.
        """
        nodes, sizes, device = self._sequences.nodes, self._sequences.sizes, self._sequences.device
        count, depths, buckets = self.reach + sizes, ranges(nodes.depths, sizes), []
        for group in _groups(sizes, count):
            rows, real = _padded(nodes.starts[group], sizes[group])
            columns, there = _padded((np.cumsum(count) - count)[group], count[group])
            keys = self.keys[columns]
            seen = depths[keys][:, None] <= depths[rows][..., None]
            if self._size is not None:
                seen &= depths[keys][:, None] > depths[rows][..., None] - self._size
            seen &= there[:, None]
            plain = self._size is None and not self.reach[group].any()
            arrays = (rows.ravel(), keys.ravel(), np.flatnonzero(real), seen[:, None])
            queries, places, at, mask = (torch.from_numpy(array).to(device) for array in arrays)
            bucket = Bucket(len(group), queries, at, queries[at], places, None)
            buckets.append((bucket, None if plain else mask))
        return buckets

    @cached_property
    def inverse(self) -> Tensor:
        """[T] the index of each token in the concatenated ``rows`` of the buckets."""
        return torch.cat([bucket.rows for bucket, _ in self.buckets]).argsort()


def _buckets(queries: Stretches, keys: Stretches) -> list[Bucket]:
    """The blocks with these queries and keys, grouped by size into buckets."""
    buckets = []
    for group in _groups(queries[1], keys[1]):
        rows, real = _padded(queries[0][group], queries[1][group])
        columns, there = _padded(keys[0][group], keys[1][group])
        hidden = None if there.all() else torch.from_numpy(~there)[:, None, None]
        flat, at = torch.from_numpy(rows.ravel()), torch.from_numpy(np.flatnonzero(real))
        buckets.append(Bucket(len(group), flat, at, flat[at], torch.from_numpy(columns.ravel()), hidden))
    return buckets


def _groups(queries: np.ndarray, keys: np.ndarray, call: int = CALL) -> list[np.ndarray]:
    """Group blocks by size. Returns the indices of the blocks of each group.

    ``queries``, ``keys``: the number of queries and of keys of each block. All blocks of a group will be padded to the
    size of its largest block. A block joins a group if the group's padding then takes at most the time of one ``call``
    plus a tenth of the group's work.
    """
    groups: list[list[int]] = []
    longest = widest = work = 0
    for i in np.lexsort((-queries, -keys)).tolist():
        wider = max(widest, int(queries[i]))
        more = int(queries[i]) * int(keys[i])
        if groups and longest * wider * (len(groups[-1]) + 1) - (work + more) <= call + (work + more) // 10:
            groups[-1].append(i)
            widest, work = wider, work + more
        else:
            groups.append([i])
            longest, widest, work = int(keys[i]), int(queries[i]), more
    return list(map(np.array, groups))


def _padded(starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[n, longest] the positions of n ranges of tokens, padded with the first position of each range. Also [n, longest]
    bool, False for padding."""
    position = np.arange(lengths.max())[None]
    real = position < lengths[:, None]
    return starts[:, None] + np.where(real, position, 0), real


_PASS: ContextVar[PackedSequences] = ContextVar("sequences of the forward pass")


@contextmanager
def laid_out(sequences: PackedSequences) -> Iterator[None]:
    """A context for a forward pass with the layout ``sequences``. During this pass, the layers get the layout from
    `sequences_of_pass`.

    If the layout were a keyword argument, it would not reach all layers, because some models of transformers do not
    pass their keyword arguments on.
    """
    token = _PASS.set(sequences)
    try:
        yield
    finally:
        _PASS.reset(token)


def sequences_of_pass() -> PackedSequences:
    """The layout of the tokens in the current forward pass, see `laid_out`."""
    return _PASS.get()
