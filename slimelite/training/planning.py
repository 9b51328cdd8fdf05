"""Plans training: rows -> optimizer steps -> ranks -> micro-batches.

Tokens are counted as they are computed: a prefix that rows of a micro-batch share counts once (*tree tokens*). A *unit*
is a set of rows that must stay together, usually a single row. If a unit has several rows, only the prefix of all its
rows counts as shared, so its tree tokens are at most those of the plan.

Invariants (tests/training/test_planning.py asserts each):

1. Every row is in exactly one step. Steps take rollouts in the order of their first rows.
2. A step has at least ``global_batch_size`` rollouts, except the last, which has the remaining ones (at least one). It
   has more only where it would otherwise split rows that belong together (3).
3. Rows with equal rollout id (siblings of a fan-out) or equal unit id (a preference pair) are in one step.
4. Within a step every computed row is in exactly one micro-batch of one rank; rows with equal unit id share it.
5. A micro-batch exceeds ``max_tokens``, in tree tokens or in response tokens, only when it is a single unit; without
   ``max_tokens`` it holds ``micro_batch_size`` rows, fewer if it is its rank's last, more only to keep a unit whole.
6. All ranks have the same number of micro-batches, at least one; a rank with fewer rows gets empty ones.
7. Ranks differ in tree tokens, each rank's rows taken together, by at most the tokens of the largest unit.
8. Rows that share a prefix are apart only where 5 or 7 asks for it: with one rank, rows whose tree tokens are within
   ``max_tokens`` share a micro-batch.
9. The result depends only on the arguments, so that every rank computes the same one.

Planning takes n log n steps for n rows.

Shared prefixes are found by sorting rows by their token ids; the longest common prefix of two rows is then the smallest
of the common prefixes of the neighbours between them. A prefix is shared up to a *branch*: a depth at which rows part.
Branches are chosen for the whole table. Two branches of one path are at least ``SHORTEST`` tokens apart, because the
calls for a shorter node cost more than its tokens save. (If three of eight answers begin with "The", they still part
where the prompt ends.) So the tokens that two rows share do not depend on their micro-batch, and the tokens of a
micro-batch can be counted before it is made.
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

# fewest tokens of a shared prefix, and fewest tokens between it and the shared prefix that it continues
SHORTEST = 16

# token ids compared at a time, over all rows that are still alike
CHUNK_ELEMENTS = 2**18


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step. The loss divides by all ``rows``. ``micro_batches[rank]``: the rows that a rank computes."""

    rows: np.ndarray
    micro_batches: list[list[np.ndarray]]


@dataclass(frozen=True, slots=True)
class PackingLimits:
    """How large a micro-batch may be: ``max_tokens`` tokens or, if that is None, ``micro_batch_size`` rows."""

    max_tokens: int | None
    micro_batch_size: int = 1


def split_steps(rollout_ids: np.ndarray, unit_ids: np.ndarray, global_batch_size: int) -> list[np.ndarray]:
    """The rows [int64, ascending] of each optimizer step of ``global_batch_size`` rollouts."""
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

    Units that share a prefix form a *clump* and go to one rank. The largest clump is first, and each goes to the rank
    with the fewest tokens. Then the fullest rank gives the end of a clump to the emptiest one, as long as that helps.
    Within a rank, a clump that is too large for a micro-batch is cut where it shares least. The pieces are packed
    best-fit decreasing.

    Args:
        rows: [n] int64 rows of ``table``.
        dp_size: number of ranks.
        limits: how large a micro-batch may be.
        shares: whether a prefix that rows share is in a micro-batch once.
    """
    units = _Units(table, rows, Prefixes.of(table, shares=shares))
    packed = [_pack(units, share, limits) for share in _level(_spread(units, dp_size), units)]
    count = max(1, *map(len, packed))
    return [list(map(units.rows_of, parts + [[]] * (count - len(parts)))) for parts in packed]


def tokens_shared(table: SampleTable, dealt: Iterable[np.ndarray], *, shares: bool) -> tuple[np.ndarray, np.ndarray]:
    """The rows [n] of all micro-batches in ``dealt``, and for each row the tokens [n] that another row of its
    micro-batch computes."""
    parts = list(dealt)
    rows = np.concatenate([np.zeros(0, np.int64), *parts])
    whose = np.repeat(np.arange(len(parts)), list(map(len, parts)))
    order, shared = Prefixes.of(table, shares=shares).within(rows, whose)
    return rows[order], shared


class _Units:
    """The units, in the order of their first rows among the sorted rows.

    ``tokens``: [u] tree tokens of each unit alone. ``responses``: [u] its response tokens.
    """

    def __init__(self, table: SampleTable, rows: np.ndarray, prefixes: Prefixes) -> None:
        self._prefixes = prefixes
        inverse = np.unique(table.unit_id[rows], return_inverse=True)[1]
        order, shared = prefixes.within(rows, inverse)
        begins = np.flatnonzero(np.diff(inverse[order], prepend=-1))
        rows, ends = rows[order], np.append(begins, len(rows))[1:]
        # by the first row of each
        first = prefixes.rank[rows[begins]]
        by_first = np.argsort(first)
        self._rows, self._begins, self._ends = rows, begins[by_first], ends[by_first]
        self._first, self._last = first[by_first], prefixes.rank[rows[ends - 1]][by_first]
        self.tokens, self.responses = table.total_lengths[rows] - shared, table.response_lengths[rows]
        if len(rows):
            self.tokens = np.add.reduceat(self.tokens, begins)[by_first]
            self.responses = np.add.reduceat(self.responses, begins)[by_first]

    def shared(self, share: np.ndarray) -> np.ndarray:
        """[m] the tokens that each unit of ``share`` [m], in ascending order, has in common with the unit before it."""
        tokens = np.zeros(len(share), np.int64)
        last = np.maximum(self._last[share[:-1]], self._last[share[1:]])
        tokens[1:] = self._prefixes.between(self._first[share[:-1]], last)
        return tokens

    def rows_in(self, unit: int) -> int:
        """How many rows ``unit`` has."""
        return int(self._ends[unit] - self._begins[unit])

    def rows_of(self, units: list[int]) -> np.ndarray:
        """The rows of ``units``."""
        begins = self._begins[units]
        return self._rows[ranges(begins, self._ends[units] - begins)]


def _spread(units: _Units, dp_size: int) -> list[np.ndarray]:
    """The units [m] of each rank, in ascending order. Clumps stay whole."""
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
    """``shares``, the units of each rank, after moving ends of clumps from the fullest rank to the emptiest one.

    Each move makes the fuller of the two ranks less full. A move is possible while the two differ by more than the
    tokens of the last unit of any clump. So this ends only when they do not.
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
        moved = before[end] - before[:-1]  # by giving away the units from this one to the end of its clump
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
    """The units of each micro-batch of a rank with the units ``share``."""
    if limits.max_tokens is None:
        return _by_rows(units, share, limits.micro_batch_size)
    pieces = sorted(_pieces(units, share, limits.max_tokens))
    bins = best_fit([-negative for negative, _ in pieces], limits.max_tokens)
    return [[unit for number in numbers for unit in pieces[number][1]] for numbers in bins]


def _by_rows(units: _Units, share: np.ndarray, micro_batch_size: int) -> list[list[int]]:
    """The units of ``share`` in their order, in micro-batches of ``micro_batch_size`` rows."""
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
    """The clumps of ``share``, as (-size, units) of each piece. Clumps above ``max_tokens`` are cut where they share
    least.

    A size is the larger of tree tokens and response tokens. Equal responses have the same tree tokens, but each
    response has its own log-probs.
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
    """[rows] the first row of each row's group. Rows are in one group if they share an id in any column, directly or
    through other rows."""
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

    ``rank``: [n] int64, the place of each row among the sorted rows. ``shared``: [n] int32, by rank, the tokens that a
    row shares with the row before it (0 for the first row).
    """

    def __init__(self, rank: np.ndarray, shared: np.ndarray) -> None:
        self.rank, self.shared = rank, shared.astype(np.int32)
        # _smallest[k, i]: the smallest of the 2^k values from i on, so that any range is covered by two of them
        self._smallest = [self.shared]
        for width in 2 ** np.arange(max(len(rank), 1).bit_length() - 1):
            before, after = self._smallest[-1][:-width], self._smallest[-1][width:]
            self._smallest.append(np.minimum(before, after))

    @classmethod
    def of(cls, table: SampleTable, *, shares: bool, shortest: int = SHORTEST) -> Prefixes:
        """The prefixes of the rows of ``table``; none unless ``shares``. The first call for a table computes them."""
        known = _prefixes.setdefault(table, {})
        key = shortest if shares else 0
        if key not in known:
            order, common = _sorted(table) if shares else (np.arange(len(table)), np.zeros(len(table), np.int64))
            known[key] = cls(np.argsort(order), _branches(common, shortest))
        return known[key]

    def between(self, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """[m] int64: the tokens that all rows from rank ``first`` [m] to rank ``last`` [m] share. ``first`` <
        ``last``."""
        level = np.frexp(last - first)[1] - 1
        tokens = np.zeros(len(first), np.int64)
        for k in np.unique(level):
            at = np.flatnonzero(level == k)
            smallest = self._smallest[k]
            tokens[at] = np.minimum(smallest[first[at] + 1], smallest[last[at] + 1 - 2**k])
        return tokens

    def within(self, rows: np.ndarray, parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``rows`` [m] sorted by part and then by token ids, and the tokens that each row shares with the one before it
        in its part: an index into ``rows`` [m], and [m] int64. ``parts``: [m] int64, the part of each row, such as its
        micro-batch.
        """
        ranks = self.rank[rows]
        order = np.lexsort((ranks, parts))
        ranks, parts = ranks[order], parts[order]
        shared, again = np.zeros(len(rows), np.int64), np.flatnonzero(np.diff(parts) == 0)
        shared[again + 1] = self.between(ranks[again], ranks[again + 1])
        return order, shared


# the prefixes by table, and by `shortest` or 0; they are kept because every pass of a rollout needs them
_prefixes: WeakKeyDictionary[SampleTable, dict[int, Prefixes]] = WeakKeyDictionary()


def _sorted(table: SampleTable) -> tuple[np.ndarray, np.ndarray]:
    """The rows sorted by token ids, and the length of the prefix that each shares with the one before it.

    All rows that are still equal are compared one chunk of tokens at a time. A row whose neighbours differ drops out.
    So every shared token is read about once, and few of the tokens after it.
    """
    rows = len(table)
    order, common = np.arange(rows), np.zeros(rows, np.int64)
    lengths = table.total_lengths
    # places in `order` of the rows that are alike so far, and the run of such rows that each is in
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
        linked = np.flatnonzero(np.diff(runs) == 0) + 1  # to the one before
        differ = tokens[linked] != tokens[linked - 1]
        parted = differ.any(1)
        length = lengths[order[places[linked]]]
        common[places[linked]] = np.where(parted, depth + differ.argmax(1), length)
        on = linked[~parted & (length >= depth + size)]  # one that ends here is a row of zeros in the next chunk
        stays = np.zeros(len(places), bool)
        stays[on] = stays[on - 1] = True
        begins = np.ones(len(places), bool)
        begins[on] = False
        places, runs = places[stays], np.cumsum(begins)[stays]
        depth += size
        size = max(16, min(2 * size, CHUNK_ELEMENTS // max(1, len(places))))
    return order, common


def _chunk(table: SampleTable, rows: np.ndarray, depth: int, size: int) -> np.ndarray:
    """[m, size] int64 the token ids of ``rows`` [m] from ``depth`` on, plus 1; 0 after the end of a row."""
    tokens = np.zeros((len(rows), size), np.int64)
    at = np.nonzero(depth + np.arange(size) < table.total_lengths[rows, None])
    tokens[at] = tokens_at(table, rows[at[0]], depth + at[1]) + 1
    return tokens


def tokens_at(table: SampleTable, rows: np.ndarray, depths: np.ndarray) -> np.ndarray:
    """[m] int64 the token ids at ``depths`` [m], counted from the start of the prompt, of ``rows`` [m]."""
    offsets, prompts = table.response_offsets[rows], np.diff(table.prompt_offsets)[rows]
    tokens, first = np.empty(len(rows), np.int64), depths < prompts
    tokens[first] = table.prompt_tokens[(table.prompt_offsets[rows] + depths)[first]]
    tokens[~first] = table.response_tokens[(offsets + depths - prompts)[~first]]
    return tokens


def _branches(common: np.ndarray, shortest: int) -> np.ndarray:
    """[n] the tokens that neighbours share: ``common`` [n] lowered to branches that are at least ``shortest`` apart.

    It works from the root down. Rows whose common prefix is shorter than a branch plus ``shortest`` part at that
    branch. The other rows stay together up to the next branch, which is the shortest common prefix among them.
    """
    shared = np.zeros(len(common), np.int64)
    links = np.arange(1, len(common))  # between a row and the one before it
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
