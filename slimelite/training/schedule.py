"""Which rows are trained together: rows -> optimizer steps -> ranks -> micro-batches.

Invariants (tests/training/test_schedule.py asserts each):

1. Every row is in exactly one step. Steps take rollouts in the order of their first rows.
2. A step has at least ``global_batch_size`` rollouts, except the last, which has what is left (at least one). It has
   more only where rows that belong together would have to be split.
3. Rows with equal rollout id (siblings of a fan-out) or equal unit id (a preference pair) are in one step.
4. Within a step every computed row is in exactly one micro-batch of one rank; rows with equal unit id share it.
5. A micro-batch exceeds ``max_tokens`` only when it is a single unit; without ``max_tokens`` it holds
   ``micro_batch_size`` rows, fewer if it is its rank's last, more only to keep a unit whole.
6. All ranks have the same number of micro-batches, at least one; where a rank has less to do some are empty.
7. Ranks differ in tokens by at most the largest unit.
8. The result depends on the arguments alone: every rank computes the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step: ``rows`` counts in its denominators; ``micro_batches[rank]`` is what a rank computes."""

    rows: np.ndarray
    micro_batches: list[list[np.ndarray]]


@dataclass(frozen=True, slots=True)
class PackingLimits:
    """How large a micro-batch may be: ``max_tokens`` (None: no limit), else ``micro_batch_size`` rows."""

    max_tokens: int | None
    micro_batch_size: int = 1


def split_steps(rollout_ids: np.ndarray, unit_ids: np.ndarray, global_batch_size: int) -> list[np.ndarray]:
    """The rows [int64, ascending] of each optimizer step of ``global_batch_size`` rollouts."""
    together = _connected(rollout_ids, unit_ids)
    steps: list[list[np.ndarray]] = [[]]
    count = 0
    for label in np.unique(together):
        if count >= global_batch_size:
            steps.append([])
            count = 0
        rows = np.flatnonzero(together == label)
        steps[-1].append(rows)
        count += len(np.unique(rollout_ids[rows]))
    return [np.sort(np.concatenate(parts)) for parts in steps if parts]


def deal(
    rows: np.ndarray, lengths: np.ndarray, unit_ids: np.ndarray, dp_size: int, limits: PackingLimits
) -> list[list[np.ndarray]]:
    """Deal ``rows`` to ranks and pack each rank's share into micro-batches: [rank][micro-batch] -> rows.

    Longest units first, each to the rank with the fewest tokens; then first-fit decreasing within the rank.

    Args:
        rows: [n] int64 rows of the table.
        lengths: tokens of every row of the table; ``unit_ids``: its units.
        dp_size: ranks.
        limits: of a micro-batch.
    """
    units: dict[int, list[int]] = {}
    for row in rows.tolist():
        units.setdefault(int(unit_ids[row]), []).append(row)
    sized = sorted(((int(lengths[unit].sum()), unit) for unit in units.values()), key=lambda u: (-u[0], u[1]))
    shares: list[list[tuple[int, list[int]]]] = [[] for _ in range(dp_size)]
    loads = [0] * dp_size
    for tokens, unit in sized:
        rank = loads.index(min(loads))
        shares[rank].append((tokens, unit))
        loads[rank] += tokens
    packed = [_pack(share, limits) for share in shares]
    count = max(1, *(len(p) for p in packed))
    return [[np.array(rows, np.int64) for rows in p + [[]] * (count - len(p))] for p in packed]


def _pack(units: Sequence[tuple[int, list[int]]], limits: PackingLimits) -> list[list[int]]:
    bins: list[list[int]] = []
    tokens_in: list[int] = []
    for tokens, unit in units:
        if limits.max_tokens is None:
            fits = [i for i, rows in enumerate(bins) if len(rows) < limits.micro_batch_size]
        else:
            fits = [i for i, used in enumerate(tokens_in) if used + tokens <= limits.max_tokens]
        if fits:
            bins[fits[0]] += unit
            tokens_in[fits[0]] += tokens
        else:
            bins.append(list(unit))
            tokens_in.append(tokens)
    return bins


def _connected(*ids: np.ndarray) -> np.ndarray:
    """[rows] label of the rows that share an id in any column, directly or through others: their first row."""
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
