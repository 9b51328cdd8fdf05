"""Where the tokens of a packed micro-batch lie: a tree of shared prefixes, or sequences end to end.

Rows are laid out in the order of their sorted token ids, and of each row only what it does not share with the row
before. That is the tree's depth-first order: the tokens after a *node* (a stretch that the same rows share) belong to
its descendants, up to the node's ``until``. For a prompt of 5 tokens with answers of 3 and 2::

    position   0 1 2 3 4 | 5 6 7 | 8 9      nodes [0, 5) until 10, [5, 8) until 8, [8, 10) until 10
    depth      0 1 2 3 4 | 5 6 7 | 5 6

Rows that share nothing are nodes without descendants: sequences end to end.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

# pairs of a query and a key that cost about as much as one more call of a CPU kernel
CALL = 2000


@dataclass(frozen=True, slots=True)
class Nodes:
    """The N nodes of a tree in the order of their tokens; each [N] int64.

    ``starts``, ``ends``: their first position and the one after the last; ``until``: the position after the last of
    their descendants; ``depths``: of their first token in its row; ``levels``: nodes above them; ``parents``: index of
    the node right above, -1 at a root.
    """

    starts: np.ndarray
    ends: np.ndarray
    until: np.ndarray
    depths: np.ndarray
    levels: np.ndarray
    parents: np.ndarray

    @classmethod
    def of_rows(cls, lengths: np.ndarray, shared: np.ndarray) -> tuple[Nodes, np.ndarray]:
        """The nodes of sorted rows of ``lengths`` [n] tokens that share ``shared`` [n] with the row before; and the
        last node of each row [n].
        """
        begins = np.concatenate([[0], np.cumsum(lengths - shared)])
        padded = np.append(shared, 0)
        # the runs of rows that are together so far: first row, row after the last, and the depth up to which they are
        first, last, depth = np.zeros(1, np.int64), np.full(1, len(lengths)), np.zeros(1, np.int64)
        parent, leaf = np.full(1, -1), np.full(len(lengths), -1)
        found: list[np.ndarray] = []
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
            found.append(np.stack(columns)[:, there])
            single = last - first == 1
            leaf[first[single]] = own[single]
            count, level = count + int(there.sum()), level + bool(there.any())
            rows, run = ranges(first[many], (last - first)[many]), np.repeat(many, (last - first)[many])
            parts = np.flatnonzero((rows == first[run]) | (shared[rows] == to[run]))
            first, depth, parent = rows[parts], to[run[parts]], own[run[parts]]
            last = first + np.diff(np.append(parts, len(rows)))
        columns = np.concatenate(found, axis=1)
        order = np.argsort(columns[0], kind="stable")
        place = np.append(np.argsort(order), -1)  # of -1 too
        columns = columns[:, order]
        columns[5] = place[columns[5]]
        return cls(*columns), place[leaf]

    def positions(self, leaves: np.ndarray, depths: np.ndarray) -> np.ndarray:
        """[m] the position of the token at ``depths`` [m] of a row whose last node is ``leaves`` [m]."""
        nodes, above = leaves.copy(), np.flatnonzero(depths < self.depths[leaves])
        while len(above):
            nodes[above] = self.parents[nodes[above]]
            above = above[depths[above] < self.depths[nodes[above]]]
        return self.starts[nodes] + depths - self.depths[nodes]


# first positions of stretches of tokens, and their lengths
Stretches = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Blocks of queries and their keys, of similar sizes, padded to the largest: one call of a CPU kernel.

    ``count`` blocks; ``queries``: [count · longest] positions of the queries, padding repeats one; ``real``: [m] which
    of them are none; ``rows``: [m] their positions. ``keys``: [count · longest] likewise; ``hidden``: [count, 1, 1,
    longest] bool, the padding among them, None if there is none.
    """

    count: int
    queries: Tensor
    real: Tensor
    rows: Tensor
    keys: Tensor
    hidden: Tensor | None

    @classmethod
    def of(cls, queries: Stretches, keys: Stretches, blocks: np.ndarray) -> Bucket:
        """The ``blocks`` (index) among those whose queries and keys are these stretches."""
        rows, real = _padded(queries[0][blocks], queries[1][blocks])
        columns, there = _padded(keys[0][blocks], keys[1][blocks])
        hidden = None if there.all() else torch.from_numpy(~there)[:, None, None]
        flat, places, at = (torch.from_numpy(x) for x in (rows.ravel(), columns.ravel(), np.flatnonzero(real)))
        return cls(len(rows), flat, at, flat[at], places, hidden)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of queries and their keys, end to end: one call of a GPU kernel.

    ``queries``, ``keys``: positions of the queries and keys of all blocks; ``cu_queries``, ``cu_keys``: [blocks + 1]
    int32, where each block begins among them; ``longest``: queries of the largest block, and keys.
    """

    queries: Tensor
    keys: Tensor
    cu_queries: Tensor
    cu_keys: Tensor
    longest: tuple[int, int]


class PackedSequences:
    """Where the rows of a micro-batch of T tokens lie, and which tokens attend to which.

    ``cu_seqlens``: [nodes + 1] int32, the first position of each node, and T; ``max_length``: tokens of the longest;
    ``longest_row``: tokens of the longest row.
    What a kernel needs of the tree is made when a layer first asks for it.
    """

    def __init__(self, nodes: Nodes, device: torch.device | str = "cpu") -> None:
        self.nodes = nodes
        self.device = torch.device(device)
        self.sizes = nodes.ends - nodes.starts
        self.cu_seqlens = self.offsets(self.sizes)
        self.max_length = int(self.sizes.max())
        self.longest_row = int((nodes.depths + self.sizes).max())
        self._windows: dict[int | None, Window] = {}

    @classmethod
    def from_lengths(cls, lengths: list[int] | np.ndarray, device: torch.device | str = "cpu") -> PackedSequences:
        """Sequences of these lengths (each at least 1), end to end."""
        sizes = np.asarray(lengths, np.int64)
        assert (sizes > 0).all(), f"every packed sequence has tokens, not {sizes.tolist()}"
        return cls(Nodes.of_rows(sizes, np.zeros_like(sizes))[0], device)

    @cached_property
    def shared(self) -> list[np.ndarray]:
        """The nodes that others share, [m] index into ``nodes``, by their level: tokens below attend to them whole."""
        inner = self.nodes.until > self.nodes.ends
        return [np.flatnonzero(inner & (self.nodes.levels == level)) for level in np.unique(self.nodes.levels[inner])]

    @cached_property
    def own_buckets(self) -> list[Bucket]:
        """Each node, whose tokens attend to themselves and to those before them in it."""
        stretches = self.nodes.starts, self.sizes
        return [Bucket.of(stretches, stretches, group) for group in _groups(self.sizes, self.sizes)]

    @cached_property
    def shared_buckets(self) -> list[Bucket]:
        """Level by level, the descendants of shared nodes, which attend to all of its tokens."""
        found = []
        for nodes in self.shared:
            queries, keys = self._below(nodes)
            found += [Bucket.of(queries, keys, group) for group in _groups(queries[1], keys[1])]
        return found

    @cached_property
    def own_blocks(self) -> Blocks:
        """All nodes in the order of their tokens; nothing needs to be gathered."""
        none, longest = self.cu_seqlens[:0], (self.max_length, self.max_length)
        return Blocks(none, none, self.cu_seqlens, self.cu_seqlens, longest)

    @cached_property
    def shared_blocks(self) -> list[Blocks]:
        """By level, the descendants of each shared node, which attend to all of its tokens."""
        return [self._blocks(*self._below(nodes)) for nodes in self.shared]

    def window(self, size: int | None) -> Window:
        """Each node with the keys of its path that a window of so many tokens reaches; None: with all of them."""
        if size not in self._windows:
            self._windows[size] = Window(self, size)
        return self._windows[size]

    def _below(self, nodes: np.ndarray) -> tuple[Stretches, Stretches]:
        """The descendants of ``nodes``, and the nodes."""
        below = self.nodes.ends[nodes], (self.nodes.until - self.nodes.ends)[nodes]
        return below, (self.nodes.starts[nodes], self.sizes[nodes])

    def _blocks(self, queries: Stretches, keys: Stretches) -> Blocks:
        rows, columns = (torch.from_numpy(ranges(*stretches)).to(self.device) for stretches in (queries, keys))
        longest = int(queries[1].max()), int(keys[1].max())
        return Blocks(rows, columns, self.offsets(queries[1]), self.offsets(keys[1]), longest)

    def offsets(self, sizes: np.ndarray) -> Tensor:
        """[n + 1] int32 where each of n parts of these sizes begins, and the end."""
        ends = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        return torch.from_numpy(ends).to(self.device)


class Window:
    """The nodes of a layout as queries, with as many keys of their paths as a window of ``size`` tokens reaches."""

    def __init__(self, sequences: PackedSequences, size: int | None) -> None:
        self._sequences, self._size = sequences, size
        nodes, sizes = sequences.nodes, sequences.sizes
        self._reach = nodes.depths if size is None else np.minimum(nodes.depths, size - 1)
        # the nodes themselves, then the ends of the nodes above, and of those above them, while there is more in reach
        each, left, above = np.arange(len(sizes)), self._reach, nodes.parents
        pieces = [(each, nodes.starts, sizes)]
        while (left > 0).any():
            each, above, left = each[left > 0], above[left > 0], left[left > 0]
            taken = np.minimum(left, sizes[above])
            pieces.insert(0, (each, nodes.ends[above] - taken, taken))
            above, left = nodes.parents[above], left - taken
        whose, first, count = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
        order = np.argsort(whose, kind="stable")
        self._keys = ranges(first[order], count[order])

    @cached_property
    def blocks(self) -> Blocks:
        """All nodes in the order of their tokens."""
        cu_queries, count = self._sequences.cu_seqlens, self._reach + self._sequences.sizes
        longest = self._sequences.max_length, int(count.max())
        keys = torch.from_numpy(self._keys).to(self._sequences.device)
        return Blocks(cu_queries[:0], keys, cu_queries, self._sequences.offsets(count), longest)

    @cached_property
    def buckets(self) -> list[tuple[Bucket, Tensor | None]]:
        """The nodes by size, each bucket with what its queries see: [count, 1, queries, keys] bool, or None for
        causal attention.
        """
        nodes, sizes, device = self._sequences.nodes, self._sequences.sizes, self._sequences.device
        count, depths, found = self._reach + sizes, ranges(nodes.depths, sizes), []
        for group in _groups(sizes, count):
            rows, real = _padded(nodes.starts[group], sizes[group])
            columns, there = _padded((np.cumsum(count) - count)[group], count[group])
            keys = self._keys[columns]
            seen = depths[keys][:, None] <= depths[rows][..., None]
            if self._size is not None:
                seen &= depths[keys][:, None] > depths[rows][..., None] - self._size
            seen &= there[:, None]
            plain = self._size is None and not self._reach[group].any()
            arrays = (rows.ravel(), keys.ravel(), np.flatnonzero(real), seen[:, None])
            queries, places, at, mask = (torch.from_numpy(array).to(device) for array in arrays)
            bucket = Bucket(len(group), queries, at, queries[at], places, None)
            found.append((bucket, None if plain else mask))
        return found

    @cached_property
    def inverse(self) -> Tensor:
        """[T] the place of each token among the rows of the buckets."""
        return torch.cat([bucket.rows for bucket, _ in self.buckets]).argsort()


def _groups(queries: np.ndarray, keys: np.ndarray) -> list[np.ndarray]:
    """Blocks of so many queries and keys by size, each group to be padded to its largest: index into both.

    A group takes another block while all its padding costs less than one more call, or a tenth of its work.
    """
    groups: list[list[int]] = []
    longest = widest = work = 0
    for i in np.lexsort((-queries, -keys)).tolist():
        wider = max(widest, int(queries[i]))
        more = int(queries[i]) * int(keys[i])
        if groups and longest * wider * (len(groups[-1]) + 1) - (work + more) <= CALL + (work + more) // 10:
            groups[-1].append(i)
            widest, work = wider, work + more
        else:
            groups.append([i])
            longest, widest, work = int(keys[i]), int(queries[i]), more
    return [np.array(group) for group in groups]


def _padded(starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[n, longest] the positions of stretches of tokens, padded with their first, and which are none."""
    position = np.arange(lengths.max())[None]
    real = position < lengths[:, None]
    return starts[:, None] + np.where(real, position, 0), real


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[sum(lengths)] int64: starts[i], starts[i] + 1, … for each i."""
    ends = np.cumsum(lengths)
    return (np.arange(lengths.sum()) + np.repeat(starts - (ends - lengths), lengths)).astype(np.int64)
