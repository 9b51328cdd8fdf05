"""Groups rows for training and makes tensors of them: rows -> optimizer steps -> ranks -> micro-batches.

Invariants (tests/training/test_batch.py asserts each):

1. Every row is in exactly one step. Steps take rollouts in the order of their first rows.
2. A step has at least ``global_batch_size`` rollouts, except the last, which has the remaining ones (at least one). It
   has more only where it would otherwise split rows that belong together (3).
3. Rows with equal rollout id (siblings of a fan-out) or equal unit id (a preference pair) are in one step.
4. Within a step every computed row is in exactly one micro-batch of one rank; rows with equal unit id share it.
5. A micro-batch exceeds ``max_tokens`` only when it is a single unit; without ``max_tokens`` it holds
   ``micro_batch_size`` rows, fewer if it is its rank's last, more only to keep a unit whole.
6. All ranks have the same number of micro-batches, at least one; a rank with fewer rows gets empty ones.
7. Ranks differ in tokens by at most the largest unit.
8. The result depends only on the arguments, so that every rank computes the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from slimelite.table import SampleTable
from slimelite.training.attention import PackedSequences


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step: the loss divides by all ``rows``; ``micro_batches[rank]``: the rows that a rank computes."""

    rows: np.ndarray
    micro_batches: list[list[np.ndarray]]


@dataclass(frozen=True, slots=True)
class PackingLimits:
    """How large a micro-batch may be: ``max_tokens`` tokens or, if that is None, ``micro_batch_size`` rows."""

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
        lengths: tokens of every row of the table; ``unit_ids``: unit of every row.
        dp_size: number of ranks.
        limits: how large a micro-batch may be.
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
    """[rows] the first row of each row's group: rows that share an id in any column, directly or through other rows."""
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


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """R response tokens of some rows and the T tokens that predict them.

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
    def from_table(cls, table: SampleTable, rows: np.ndarray, device: torch.device) -> MicroBatch:
        """Pack ``rows`` of ``table``; no rows give an empty micro-batch.

        Raises:
            ValueError: a row has no prompt, so that no position predicts its first response token.
        """
        prompts, responses = np.diff(table.prompt_offsets)[rows], table.response_lengths[rows]
        if (prompts == 0).any():
            ids = table.sample_id[rows[prompts == 0]].tolist()
            raise ValueError(f"samples {ids[:8]} have no prompt tokens; a response needs at least one token before it")
        columns = [table.row_slice(c, r) for r in rows.tolist() for c in ("prompt_tokens", "response_tokens")]
        lengths = prompts + responses
        ends = np.cumsum(lengths)
        ids = np.concatenate(columns or [np.zeros(1)]).astype(np.int64)
        positions = np.arange(len(ids)) - np.repeat(ends - lengths, lengths) if len(rows) else np.zeros(1, np.int64)
        place = _ranges(ends - responses, responses)  # of the response tokens
        if not len(rows):
            lengths = np.ones(1, np.int64)

        def to_device(values: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(device)

        return cls(
            rows=rows,
            lengths=(prompts + responses).tolist(),
            tokens=len(ids) if len(rows) else 0,
            input_ids=to_device(ids[None]),
            position_ids=to_device(positions[None]),
            sequences=PackedSequences.from_lengths(lengths, device),
            response_index=to_device(place - 1),
            targets=to_device(ids[place]),
            segments=to_device(np.repeat(np.arange(len(rows)), responses)),
            token_index=torch.from_numpy(_ranges(table.response_offsets[rows], responses)),
        )

    def padded(self) -> MicroBatch:
        """The same micro-batch with each of its n sequences in a row of its own, padded on the right to the longest.

        Causal layers never see the padding. ``input_ids`` and ``position_ids`` are [n, longest], and
        ``response_index`` points into them, flattened row by row.
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


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[sum(lengths)] int64: starts[i], starts[i] + 1, … for each i."""
    ends = np.cumsum(lengths)
    return (np.arange(lengths.sum()) + np.repeat(starts - (ends - lengths), lengths)).astype(np.int64)


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
