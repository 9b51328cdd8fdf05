"""Plans training: rows -> optimizer steps -> ranks -> micro-batches.

The plan counts *tree tokens*, the tokens that are computed. A prefix that several rows of a micro-batch share is
computed once. A *unit* is a set of rows that must stay together, usually a single row. If a unit has several rows, only
the prefix that all of them share counts as shared. So the plan may overestimate the tree tokens of a unit, but never
underestimates them.

Invariants (tests/training/test_planning.py tests each of them):

1. Every row is in exactly one step. Rollouts are assigned to steps in the order of their first rows.
2. A step has at least ``global_batch_size`` rollouts. Only the last step may have fewer (at least one). A step has more
   rollouts only to keep rows together that belong together (invariant 3).
3. Rows with equal rollout id (siblings of a fan-out) or equal unit id (a preference pair) are in one step.
4. Within a step, every computed row is in exactly one micro-batch of one rank. Rows with equal unit id are in the same
   micro-batch.
5. With ``max_tokens``, the tree tokens and the response tokens of a micro-batch are at most ``max_tokens``. Only a
   micro-batch with a single unit may exceed this limit. Without ``max_tokens``, a micro-batch has ``micro_batch_size``
   rows. A micro-batch has more rows only to keep a unit whole, and only the last micro-batch of a rank may have fewer
   rows.
6. All ranks have the same number of micro-batches, at least one. A rank with fewer rows gets empty micro-batches.
7. The numbers of tree tokens of any two ranks differ by at most the number of tokens of the largest unit.
8. Rows that share a prefix are in the same micro-batch, unless invariant 5 or 7 prevents this. With one rank, they are
   in one micro-batch if they have at most ``max_tokens`` tree tokens in total.
9. The result depends only on the arguments. So every rank computes the same plan.

The running time for n rows is proportional to n log n.

To find shared prefixes, the rows are sorted by their token ids. Two rows share as many tokens as the pair of successive
rows that shares the fewest, among the pairs from the first of the two rows to the second. A prefix is shared up to a
*branch*: a depth at which the token ids of rows begin to differ. Two branches of one path are at least ``SHORTEST``
tokens apart: a shorter node would save less time than its additional kernel calls take. Example: three of eight answers
begin with "The". This token is not shared: all eight rows separate at the end of the prompt. Branches are chosen once
for the whole table. So the number of tokens that two rows share does not depend on their micro-batch, and the tokens of
a micro-batch can be counted before it is built.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import pairwise
from weakref import WeakKeyDictionary

import numpy as np

from slimelite.base.best_fit import best_fit
from slimelite.samples.table import SampleTable

# smallest length of a shared prefix, and smallest distance between two branches of a path [tokens]
SHORTEST = 16

# number of token ids that are compared at a time, in all rows that are still equal
CHUNK_ELEMENTS = 2**18


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step. ``rows``: all rows of the step; the divisor of the loss is computed from all of them.
    ``micro_batches[rank]``: the rows of each micro-batch of a rank."""

    rows: np.ndarray
    micro_batches: list[list[np.ndarray]]


@dataclass(frozen=True, slots=True)
class PackingLimits:
    """The largest size of a micro-batch: ``max_tokens`` tokens, or ``micro_batch_size`` rows if max_tokens is None."""

    max_tokens: int | None
    micro_batch_size: int = 1


def split_steps(rollout_ids: np.ndarray, unit_ids: np.ndarray, global_batch_size: int) -> list[np.ndarray]:
    """For each optimizer step, its rows (int64, ascending). See invariants 1 to 3: a step usually has rows of
    ``global_batch_size`` different rollout ids."""
    labels = np.unique(_connected(rollout_ids, unit_ids), return_inverse=True)[1]
    rollouts = np.bincount(labels[np.unique(rollout_ids, return_index=True)[1]])
    step_of, count, step = np.zeros(len(rollouts), np.int64), 0, 0
    for label, more in enumerate(rollouts.tolist()):
        if count >= global_batch_size:
            count, step = 0, step + 1
        step_of[label] = step
        count += more
    order = np.argsort(step_of[labels], kind="stable")
    return np.split(order, np.cumsum(np.bincount(step_of[labels]))[:-1]) if len(order) else []


def deal(
    table: SampleTable, rows: np.ndarray, dp_size: int, limits: PackingLimits, *, shares: bool
) -> list[list[np.ndarray]]:
    """Distribute ``rows`` to ranks, and pack each rank's share into micro-batches: [rank][micro-batch] -> rows.

    Units that share a prefix form a *clump*, and a clump goes to one rank. Clumps are distributed from the largest to
    the smallest, each to the rank with the fewest tokens. Then the last units of clumps are moved from the rank with
    the most tokens to the rank with the fewest, as long as this improves the balance. Within a rank, a clump that is
    too large for a micro-batch is cut at its shortest shared prefixes. The pieces are packed with the algorithm
    best-fit decreasing.

    Args:
        rows: [n] int64 rows of ``table``.
        dp_size: number of ranks.
        limits: the largest size of a micro-batch.
        shares: whether a shared prefix is in a micro-batch only once.
    """
    units = _Units(table, rows, Prefixes.of(table, shares=shares))
    packed = [_pack(units, share, limits) for share in _level(_spread(units, dp_size), units)]
    count = max(1, *map(len, packed))
    return [list(map(units.rows_of, parts + [[]] * (count - len(parts)))) for parts in packed]


def tokens_shared(table: SampleTable, dealt: Iterable[np.ndarray], *, shares: bool) -> tuple[np.ndarray, np.ndarray]:
    """The rows [n] of all micro-batches in ``dealt``. Also [n], for each row, the length of the prefix that it shares
    with an earlier row of its micro-batch."""
    parts = list(dealt)
    rows = np.concatenate([np.zeros(0, np.int64), *parts])
    whose = np.repeat(np.arange(len(parts)), list(map(len, parts)))
    order, shared = Prefixes.of(table, shares=shares).within(rows, whose)
    return rows[order], shared


class _Units:
    """The units, sorted by the token ids of their first rows.

    ``tokens``: [u], the number of tree tokens that each unit has if it is alone. ``responses``: [u], the number of
    response tokens of each unit.
    """

    def __init__(self, table: SampleTable, rows: np.ndarray, prefixes: Prefixes) -> None:
        self._prefixes = prefixes
        inverse = np.unique(table.unit_id[rows], return_inverse=True)[1]
        order, shared = prefixes.within(rows, inverse)
        begins = np.flatnonzero(np.diff(inverse[order], prepend=-1))
        rows, ends = rows[order], np.append(begins, len(rows))[1:]
        # sort the units by their first rows
        first = prefixes.rank[rows[begins]]
        by_first = np.argsort(first)
        self._rows, self._begins, self._ends = rows, begins[by_first], ends[by_first]
        self._first, self._last = first[by_first], prefixes.rank[rows[ends - 1]][by_first]
        self.tokens, self.responses = table.total_lengths[rows] - shared, table.response_lengths[rows]
        if len(rows):
            self.tokens = np.add.reduceat(self.tokens, begins)[by_first]
            self.responses = np.add.reduceat(self.responses, begins)[by_first]

    def shared(self, share: np.ndarray) -> np.ndarray:
        """[m] the length of the prefix that each unit in ``share`` [m] has in common with the unit before it. ``share``
        is ascending."""
        tokens = np.zeros(len(share), np.int64)
        last = np.maximum(self._last[share[:-1]], self._last[share[1:]])
        tokens[1:] = self._prefixes.between(self._first[share[:-1]], last)
        return tokens

    def rows_in(self, unit: int) -> int:
        """The number of rows of ``unit``."""
        return int(self._ends[unit] - self._begins[unit])

    def rows_of(self, units: list[int]) -> np.ndarray:
        """The rows of ``units``."""
        begins = self._begins[units]
        return self._rows[ranges(begins, self._ends[units] - begins)]


def _spread(units: _Units, dp_size: int) -> list[np.ndarray]:
    """For each rank, its units [m] in ascending order. Clumps are not split."""
    everyone = np.arange(len(units.tokens))
    shared = units.shared(everyone)
    clumps = np.split(everyone, np.flatnonzero(shared == 0)[1:])
    sizes = np.add.reduceat(units.tokens - shared, np.flatnonzero(shared == 0)) if len(everyone) else np.zeros(0)
    parts: list[list[np.ndarray]] = [[np.zeros(0, np.int64)] for _ in range(dp_size)]
    loads = [(0, rank) for rank in range(dp_size)]
    heapify(loads)
    for i in np.argsort(-sizes, kind="stable").tolist():
        load, rank = loads[0]
        parts[rank].append(clumps[i])
        heapreplace(loads, (load + int(sizes[i]), rank))
    return [np.sort(np.concatenate(part)) for part in parts]


def _level(shares: list[np.ndarray], units: _Units) -> list[np.ndarray]:
    """Balance ``shares``, the units of each rank: move the last units of clumps from the rank with the most tokens
    to the rank with the fewest.

    Each move reduces the larger number of tokens of the two ranks. If the two numbers differ by more than the tokens of
    the last unit of a clump, a move is possible. So at the end they do not differ by more than that.
    """
    loads = [int((units.tokens[share] - units.shared(share)).sum()) for share in shares]
    while True:
        full, empty = loads.index(max(loads)), loads.index(min(loads))
        share = shares[full]
        shared = units.shared(share)
        steps = units.tokens[share] - shared
        ends = np.append(np.flatnonzero(shared == 0)[1:], len(share))
        end = np.repeat(ends, np.diff(ends, prepend=0))
        before = np.concatenate([[0], np.cumsum(steps)])
        # tokens that the rank loses if it gives away the units from this one to the end of its clump
        moved = before[end] - before[:-1]
        worse = np.maximum(loads[full] - moved, loads[empty] + moved + shared)
        if not len(share) or worse.min() >= loads[full]:
            return shares
        best = np.lexsort((shared, worse))[0]
        part = slice(best, end[best])
        shares[empty] = np.sort(np.concatenate([shares[empty], share[part]]))
        shares[full] = np.delete(share, part)
        for rank in (full, empty):
            loads[rank] = int((units.tokens[shares[rank]] - units.shared(shares[rank])).sum())


def _pack(units: _Units, share: np.ndarray, limits: PackingLimits) -> list[list[int]]:
    """The units of each micro-batch of a rank. ``share``: the units of the rank."""
    if limits.max_tokens is None:
        return _by_rows(units, share, limits.micro_batch_size)
    pieces = sorted(_pieces(units, share, limits.max_tokens))
    bins = best_fit([-negative for negative, _ in pieces], limits.max_tokens)
    return [[unit for number in numbers for unit in pieces[number][1]] for numbers in bins]


def _by_rows(units: _Units, share: np.ndarray, micro_batch_size: int) -> list[list[int]]:
    """Split the units of ``share``, in their order, into micro-batches of ``micro_batch_size`` rows."""
    bins: list[list[int]] = []
    rows = micro_batch_size
    for unit in share.tolist():
        if rows >= micro_batch_size:
            bins.append([])
            rows = 0
        bins[-1].append(unit)
        rows += units.rows_in(unit)
    return bins


def _pieces(units: _Units, share: np.ndarray, max_tokens: int) -> list[tuple[int, list[int]]]:
    """(-size, units) of each piece of the clumps of ``share``. Clumps larger than ``max_tokens`` are cut at their
    shortest shared prefixes.

    The size is the larger of tree tokens and response tokens. Response tokens count too, because equal responses share
    their tree tokens, but each response has its own log-probs.
    """
    shared = units.shared(share)
    steps = np.concatenate([[0], np.cumsum(units.tokens[share] - shared)]).tolist()
    responses = np.concatenate([[0], np.cumsum(units.responses[share])]).tolist()
    again = shared.tolist()

    def size(first: int, end: int) -> int:
        tree = steps[end] - steps[first] + again[first]
        return int(max(tree, responses[end] - responses[first]))

    clumps = [*np.flatnonzero(shared == 0).tolist(), len(share)]
    left = list(pairwise(clumps))[::-1]
    pieces: list[tuple[int, int]] = []
    while left:
        first, end = left.pop()
        if end - first > 1 and size(first, end) > max_tokens:
            inner = shared[first + 1 : end]
            cuts = [first, *(first + 1 + np.flatnonzero(inner == inner.min())).tolist(), end]
            left += list(pairwise(cuts))[::-1]
        elif pieces and again[first] and size(pieces[-1][0], end) <= max_tokens:
            pieces[-1] = (pieces[-1][0], end)
        else:
            pieces.append((first, end))
    return [(-size(first, end), share[first:end].tolist()) for first, end in pieces]


def _connected(*ids: np.ndarray) -> np.ndarray:
    """[rows] the first row of each row's group. Two rows are in one group if they have an equal id in any column, or if
    a chain of such rows connects them."""
    labels = np.arange(len(ids[0]))
    inverses = [np.unique(column, return_inverse=True)[1] for column in ids]
    while True:
        before = labels
        for inverse in inverses:
            lowest = np.full(inverse.max(initial=0) + 1, len(labels))
            np.minimum.at(lowest, inverse, labels)
            labels = lowest[inverse]
        if (labels == before).all():
            return labels


class Prefixes:
    """The shared prefixes of the n rows of a table.

    ``rank``: [n] int64, the index of each row among the sorted rows. ``shared``: [n] int32, for each sorted row, the
    number of tokens that it shares with the sorted row before it (0 for the first row).
    """

    def __init__(self, rank: np.ndarray, shared: np.ndarray) -> None:
        self.rank, self.shared = rank, shared.astype(np.int32)
        # _smallest[k][i]: the smallest of the 2^k values from i on. Two such values give the smallest of any range
        self._smallest = [self.shared]
        for width in 2 ** np.arange(max(len(rank), 1).bit_length() - 1):
            before, after = self._smallest[-1][:-width], self._smallest[-1][width:]
            self._smallest.append(np.minimum(before, after))

    @classmethod
    def of(cls, table: SampleTable, *, shares: bool, shortest: int = SHORTEST) -> Prefixes:
        """The shared prefixes of ``table``. If ``shares`` is False, no prefix counts as shared. The result is computed
        once for each table."""
        known = _prefixes.setdefault(table, {})
        key = shortest if shares else 0
        if key not in known:
            order, common = _sorted(table) if shares else (np.arange(len(table)), np.zeros(len(table), np.int64))
            known[key] = cls(np.argsort(order), _branches(common, shortest))
        return known[key]

    def between(self, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """[m] int64: the number of tokens that all sorted rows from index ``first`` [m] to index ``last`` [m] share.
        ``first`` must be less than ``last``."""
        level = np.frexp(last - first)[1] - 1
        tokens = np.zeros(len(first), np.int64)
        for k in np.unique(level):
            at = np.flatnonzero(level == k)
            smallest = self._smallest[k]
            tokens[at] = np.minimum(smallest[first[at] + 1], smallest[last[at] + 1 - 2**k])
        return tokens

    def within(self, rows: np.ndarray, parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sort ``rows`` [m] by part and then by token ids. ``parts``: [m] int64, the part of each row, such as its
        micro-batch.

        Returns the order [m], as indices into ``rows``. Also returns [m] int64: for each sorted row, the number of
        tokens that it shares with the row before it in its part.
        """
        ranks = self.rank[rows]
        order = np.lexsort((ranks, parts))
        ranks, parts = ranks[order], parts[order]
        shared, again = np.zeros(len(rows), np.int64), np.flatnonzero(np.diff(parts) == 0)
        shared[again + 1] = self.between(ranks[again], ranks[again + 1])
        return order, shared


# table -> `shortest` (0: nothing is shared) -> prefixes. A cache, because every pass of a rollout needs the prefixes
_prefixes: WeakKeyDictionary[SampleTable, dict[int, Prefixes]] = WeakKeyDictionary()


def _sorted(table: SampleTable) -> tuple[np.ndarray, np.ndarray]:
    """The rows sorted by token ids, and the length of the prefix that each row shares with the row before it.

    All rows that are still equal are compared one chunk of tokens at a time. A row that differs from its neighbours is
    not compared any further. So every shared token is read about once, and few other tokens are read.
    """
    rows = len(table)
    order, common = np.arange(rows), np.zeros(rows, np.int64)
    lengths = table.total_lengths
    # positions in `order` of the rows that are equal to a neighbour so far. Equal rows form a run; `runs` has the
    # number of each row's run
    places, runs = np.arange(rows), np.zeros(rows, np.int64)
    depth, size = 0, 16
    while len(places) > 1:
        tokens = _chunk(table, order[places], depth, size)
        starts = np.concatenate([[0], np.flatnonzero(np.diff(runs)) + 1])
        sizes = np.diff(np.append(starts, len(runs)))
        alike = (tokens == np.repeat(tokens[starts], sizes, axis=0)).all(1)
        mixed = np.flatnonzero(np.repeat(~np.logical_and.reduceat(alike, starts), sizes))
        if len(mixed):
            keys = np.ascontiguousarray(np.concatenate([runs[mixed, None], tokens[mixed]], axis=1).astype(">u4"))
            by_key = mixed[np.argsort(keys.view(f"S{keys.shape[1] * 4}")[:, 0], kind="stable")]
            order[places[mixed]], tokens[mixed] = order[places[by_key]], tokens[by_key]
        linked = np.flatnonzero(np.diff(runs) == 0) + 1  # rows in the same run as the row before
        differ = tokens[linked] != tokens[linked - 1]
        parted = differ.any(1)
        length = lengths[order[places[linked]]]
        common[places[linked]] = np.where(parted, depth + differ.argmax(1), length)
        on = linked[~parted & (length >= depth + size)]  # a row that ends here has only zeros in the next chunk
        stays = np.zeros(len(places), bool)
        stays[on] = stays[on - 1] = True
        begins = np.ones(len(places), bool)
        begins[on] = False
        places, runs = places[stays], np.cumsum(begins)[stays]
        depth += size
        size = max(16, min(2 * size, CHUNK_ELEMENTS // max(1, len(places))))
    return order, common


def _chunk(table: SampleTable, rows: np.ndarray, depth: int, size: int) -> np.ndarray:
    """[m, size] int64: (token id + 1) of ``rows`` [m] from ``depth`` on; 0 after the end of a row."""
    tokens = np.zeros((len(rows), size), np.int64)
    at = np.nonzero(depth + np.arange(size) < table.total_lengths[rows, None])
    tokens[at] = tokens_at(table, rows[at[0]], depth + at[1]) + 1
    return tokens


def tokens_at(table: SampleTable, rows: np.ndarray, depths: np.ndarray) -> np.ndarray:
    """[m] int64 the token ids of ``rows`` [m] at ``depths`` [m]. Depths count from the start of the prompt."""
    offsets, prompts = table.response_offsets[rows], np.diff(table.prompt_offsets)[rows]
    tokens, first = np.empty(len(rows), np.int64), depths < prompts
    tokens[first] = table.prompt_tokens[(table.prompt_offsets[rows] + depths)[first]]
    tokens[~first] = table.response_tokens[(offsets + depths - prompts)[~first]]
    return tokens


def _branches(common: np.ndarray, shortest: int) -> np.ndarray:
    """[n] the number of tokens that neighbours share: ``common`` [n], reduced to branches that are at least
    ``shortest`` tokens apart.

    The loop goes from the root down. If the common prefix of two rows is shorter than a branch plus ``shortest``, they
    separate at this branch. The other rows stay together up to the next branch, the shortest common prefix among them.
    """
    shared = np.zeros(len(common), np.int64)
    links = np.arange(1, len(common))  # links between a row and the row before it
    branch = np.zeros(len(links), np.int64)
    while len(links):
        parts = common[links] < branch + shortest
        shared[links[parts]] = branch[parts]
        links = links[~parts]
        if len(links):
            begins = np.concatenate([[True], np.diff(links) > 1])
            branch = np.minimum.reduceat(common[links], np.flatnonzero(begins))[np.cumsum(begins) - 1]
    return shared


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[sum(lengths)] int64: starts[i], starts[i] + 1, … for each i."""
    ends = np.cumsum(lengths)
    return (np.arange(lengths.sum()) + np.repeat(starts - (ends - lengths), lengths)).astype(np.int64)
