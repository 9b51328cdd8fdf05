"""Finds the tokens that rows of a table begin with in common, so that training computes them once.

Rows are sorted by their token ids; the longest common prefix of two rows is then the smallest of the common prefixes
of the neighbours between them. A prefix is shared up to a *branch*: a depth at which rows part. Branches are chosen for
the whole table: two of one path are at least ``SHORTEST`` tokens apart, because a shorter node costs more calls than
its tokens are worth (of eight answers three may begin with "The", and still part where the prompt ends). So what two
rows share does not depend on the micro-batch that they meet in, whose tokens can be counted before it is made.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np

from slimelite.samples.table import SampleTable

# tokens that a shared prefix has at least, and that it has more than the shared prefix before it
SHORTEST = 16

# token ids compared at a time, over all rows that are still alike
CHUNK_ELEMENTS = 2**18


class Prefixes:
    """The shared prefixes of the n rows of a table.

    ``rank``: [n] int64, the place of each row among the sorted rows; ``shared``: [n] int32, by rank, the tokens that a
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
        """The prefixes of the rows of ``table``, none if not ``shares``; the first call for a table computes them."""
        known = _found.setdefault(table, {})
        key = shortest if shares else 0
        if key not in known:
            order, common = _sorted(table) if shares else (np.arange(len(table)), np.zeros(len(table), np.int64))
            known[key] = cls(np.argsort(order), _branches(common, shortest))
        return known[key]

    def between(self, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """[m] int64 the tokens that all rows of the ranks ``first`` [m] to ``last`` [m] share; ``first`` < ``last``."""
        level = np.frexp(last - first)[1] - 1
        found = np.zeros(len(first), np.int64)
        for k in np.unique(level):
            at = np.flatnonzero(level == k)
            smallest = self._smallest[k]
            found[at] = np.minimum(smallest[first[at] + 1], smallest[last[at] + 1 - 2**k])
        return found

    def within(self, rows: np.ndarray, parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``rows`` [m] sorted by part and then by token ids, and the tokens that each shares with the one before it in
        its part: index into ``rows`` [m] and [m] int64. ``parts``: [m] int64, such as its micro-batch.
        """
        ranks = self.rank[rows]
        order = np.lexsort((ranks, parts))
        ranks, parts = ranks[order], parts[order]
        shared, again = np.zeros(len(rows), np.int64), np.flatnonzero(np.diff(parts) == 0)
        shared[again + 1] = self.between(ranks[again], ranks[again + 1])
        return order, shared


# by table, and `shortest` or 0; every pass of a rollout asks
_found: WeakKeyDictionary[SampleTable, dict[int, Prefixes]] = WeakKeyDictionary()


def _sorted(table: SampleTable) -> tuple[np.ndarray, np.ndarray]:
    """The rows sorted by token ids, and the length of the prefix that each has in common with the one before it.

    All rows that are still alike are compared a chunk of tokens at a time; one whose neighbours differ is out of it.
    So every shared token is read about once, and little of what comes after.
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
    """[n] the tokens that neighbours share: ``common`` [n] lowered to branches that are ``shortest`` apart.

    From the root down: rows that have less than a branch and ``shortest`` tokens in common part at that branch; the
    rest stay together up to the next branch, the shortest common prefix among them.
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
