"""Plans for a batch of packed tokens. A plan defines where keys and values are written, and which tokens each token
attends to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F

from slimelite.engines.embedded.memory import KVMemory, Slab
from slimelite.engines.embedded.prefixes import Node

# lengths of attention are rounded up to a multiple of this number; this aligns masks and lets the allocator reuse
# memory
LENGTH_BUCKET = 16
# number of queries in one block of `causal_attention`
QUERY_BLOCK = 64


@dataclass(slots=True)
class Sharing:
    """A prefix that several rows read from the same memory. ``rows``: the indices of these rows in the batch."""

    node: Node
    rows: list[int]


class SlabPart:
    """One slab's part of a decoding step. Rows ``first``, ``first`` + 1, … of the batch are the rows of the slab."""

    def __init__(self, memory: KVMemory, slab: Slab, first: int, positions: np.ndarray) -> None:
        count, device, heads = len(positions), memory.device, memory.kv_heads
        self.rows = slice(first, first + count)
        self._slab, self._length = slab, -(-(int(positions.max()) + 1) // LENGTH_BUCKET) * LENGTH_BUCKET
        keys = (np.arange(count)[:, None] * heads + np.arange(heads)) * slab.length + positions[:, None]
        slots = np.concatenate((keys, keys + slab.capacity * heads * slab.length), axis=1).ravel()
        self._slots = torch.from_numpy(slots).to(device)
        hidden = torch.arange(self._length, device=device) > torch.from_numpy(positions).to(device)[:, None]
        mask = torch.zeros(hidden.shape, dtype=memory.dtype, device=device).masked_fill_(hidden, -torch.inf)
        self._exact = memory.dtype == torch.float32
        self._mask = (mask.repeat_interleave(heads, 0) if self._exact else mask[:, None])[..., None, :]

    def write(self, layer: int, key_value: torch.Tensor) -> None:
        """Store the keys and values ``key_value`` [rows, 2 * kv heads, head dim] of one new token in each row."""
        stored = self._slab.layers[layer]
        stored.view(-1, stored.shape[-1]).index_copy_(0, self._slots, key_value.flatten(0, 1))

    def attend(self, layer: int, query: torch.Tensor, with_mass: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The attention output [rows, heads, head dim] of ``query``, which has the same shape. ``with_mass``: also
        return the log of the sum of the attention weights [rows, heads]."""
        rows, heads, head_dim = query.shape
        keys, values = self._slab.layers[layer][:, :rows, :, : self._length]
        # the query heads of one kv head are treated as several queries of this head, so the cache need not be copied
        if not self._exact:
            grouped = query.view(rows, keys.shape[1], -1, head_dim)
            return F.scaled_dot_product_attention(grouped, keys, values, self._mask).view(query.shape), None
        # in fp32 on a CPU, this code is up to twice as fast at these sizes; in lower precisions, this code would round
        # the scores
        grouped = query.reshape(len(self._mask), -1, head_dim)
        scores = torch.baddbmm(self._mask, grouped, keys.flatten(0, 1).transpose(1, 2), alpha=head_dim**-0.5)
        mass = scores.logsumexp(-1).view(rows, heads) if with_mass else None
        return torch.bmm(scores.softmax(-1), values.flatten(0, 1)).view(query.shape), mass


class DecodePlan:
    """The plan of a decoding step. Each row of ``slabs``, in this order, has one token, at ``positions`` [T].

    ``bases`` [T]: for each row, the number of tokens that come before its part of the slab. The keys and values of
    these tokens are read through ``sharing``. Each list in ``sharing`` has at most one entry for a row. Each prefix is
    multiplied once with the queries of all its rows. A row attends to several parts: its prefixes, and its part of the
    slab. Each part has its own softmax, and the results are weighted by the softmax masses of the parts. The result
    differs from that of a single softmax by a relative rounding error of about 1e-6 in fp32.
    """

    def __init__(
        self,
        memory: KVMemory,
        slabs: Sequence[Slab],
        positions: np.ndarray,
        bases: np.ndarray,
        sharing: Sequence[Sequence[Sharing]],
    ) -> None:
        own, first = positions - bases, 0
        self._parts: list[SlabPart] = []
        for slab in slabs:
            self._parts.append(SlabPart(memory, slab, first, own[first : first + len(slab.rows)]))
            first += len(slab.rows)
        self.positions = torch.from_numpy(positions).to(memory.device)
        self._sharing = [
            (torch.tensor([row for shared in level for row in shared.rows], device=memory.device), level)
            for level in sharing
        ]

    def write(self, layer: int, key_value: torch.Tensor) -> None:
        for part in self._parts:
            part.write(layer, key_value[part.rows])

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        with_mass = bool(self._sharing)
        results = [part.attend(layer, query[part.rows], with_mass) for part in self._parts]
        out = results[0][0] if len(results) == 1 else torch.cat([part for part, _ in results])
        if with_mass:
            mass = torch.cat([part for _, part in results if part is not None])
            for rows, level in self._sharing:
                _add_shared(layer, rows, level, query, out, mass)
        return out.flatten(1)


def _add_shared(
    layer: int, rows: torch.Tensor, level: Sequence[Sharing], query: torch.Tensor, out: torch.Tensor, mass: torch.Tensor
) -> None:
    """Merge the attention of ``rows`` to the prefixes of ``level`` into ``out`` and ``mass``."""
    heads, head_dim = query.shape[1:]
    queries = (query[rows] * head_dim**-0.5).split([len(shared.rows) for shared in level])
    outs, masses = [], []
    for shared, part in zip(level, queries, strict=True):
        keys, values = shared.node.at(layer)
        grouped = part.view(len(part), len(keys), -1, head_dim).transpose(0, 1)
        scores = torch.bmm(grouped.flatten(1, 2), keys.transpose(1, 2))
        masses.append(scores.logsumexp(-1).view(grouped.shape[:-1]).transpose(0, 1).reshape(-1, heads))
        outs.append(torch.bmm(scores.softmax(-1), values).view(grouped.shape).transpose(0, 1).reshape(part.shape))
    shared_out, shared_mass, own_mass = torch.cat(outs), torch.cat(masses), mass[rows]
    share = torch.sigmoid(shared_mass - own_mass)
    out[rows] = torch.lerp(out[rows], shared_out, share[..., None])
    mass[rows] = torch.logaddexp(shared_mass, own_mass)


@dataclass(slots=True)
class Piece:
    """The tokens of one sequence that a prefill computes next. ``tokens`` begin at position ``done``.

    ``kv``: the segment for the sequence's keys and values from position ``start`` on. ``leaf``: the node of the prefix
    tree that ends at ``start``.
    """

    tokens: np.ndarray
    leaf: Node
    kv: torch.Tensor
    start: int
    done: int


class PrefillPlan:
    """The plan of a prefill of ``pieces``, packed one after the other. The tokens of a piece attend causally to each
    other, and to the earlier tokens of their own sequence."""

    def __init__(self, memory: KVMemory, pieces: list[Piece]) -> None:
        self._pieces, self._heads = pieces, memory.kv_heads
        self._paths = {piece.leaf: piece.leaf.path() for piece in pieces}
        self._counts = [len(piece.tokens) for piece in pieces]
        positions = [
            np.arange(piece.done, piece.done + count) for piece, count in zip(pieces, self._counts, strict=True)
        ]
        self.positions = torch.from_numpy(np.concatenate(positions)).to(memory.device)
        # [count, past + count] for each piece with tokens before it in the cache
        self._masks = [
            _causal_mask(count, piece.done, memory) for piece, count in zip(pieces, self._counts, strict=True)
        ]
        self._key_value = torch.empty(0)
        self._blocks = memory.device.type == "cpu" and memory.dtype == torch.float32

    def write(self, layer: int, key_value: torch.Tensor) -> None:
        self._key_value = key_value.unflatten(1, (2, self._heads)).permute(1, 2, 0, 3)
        for piece, part in zip(self._pieces, self._key_value.split(self._counts, 2), strict=True):
            first = piece.done - piece.start
            piece.kv[layer, :, :, first : first + part.shape[2]] = part

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        out, first = torch.empty_like(query), 0
        numbered = zip(self._pieces, self._counts, self._masks, strict=True)
        for (count, past), group in groupby(numbered, lambda entry: (entry[1], entry[0].done)):
            members = list(group)
            # pieces of the same length that have no past share one call; every other piece needs its own call
            for batch in [members] if not past else [[member] for member in members]:
                last = first + count * len(batch)
                queries = query[first:last].unflatten(0, (len(batch), count)).transpose(1, 2)
                keys, values = self._key_value[:, :, first:last].unflatten(2, (len(batch), count)).transpose(1, 2)
                if past:
                    piece = batch[0][0]
                    before = [node.at(layer) for node in self._paths[piece.leaf]]
                    before.append(piece.kv[layer, :, :, : past - piece.start])
                    keys, values = torch.cat((*(part[:, None] for part in before), torch.stack((keys, values))), 3)
                if not past and self._blocks:
                    attended = causal_attention(queries, keys, values)
                else:
                    attended = F.scaled_dot_product_attention(
                        queries, keys, values, batch[0][2], is_causal=not past, enable_gqa=True
                    )
                out[first:last] = attended.transpose(1, 2).flatten(0, 1)
                first = last
        return out.flatten(1)


def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention of ``query`` [n, heads, T, head dim] over ``key`` and ``value`` [n, kv heads, T, head dim].

    Each block of queries is multiplied only with the keys up to its end. In fp32 on a CPU this takes about 20 % less
    time than PyTorch's flash attention. The results differ from those of flash attention only by rounding (1e-6).
    """
    _, heads, tokens, head_dim = query.shape
    groups = heads // key.shape[1]
    queries = query.unflatten(1, (-1, groups))
    keys, values = key.flatten(0, 1), value.flatten(0, 1)
    out = torch.empty_like(query)
    blocks = out.view(queries.shape)
    for first in range(0, tokens, QUERY_BLOCK):
        last = min(tokens, first + QUERY_BLOCK)
        rows = queries[:, :, :, first:last]
        mask = query.new_full((last - first, last), -torch.inf).triu_(first + 1).repeat(groups, 1)
        scores = torch.baddbmm(
            mask, rows.reshape(len(keys), -1, head_dim), keys[:, :last].transpose(1, 2), alpha=head_dim**-0.5
        )
        blocks[:, :, :, first:last] = torch.bmm(scores.softmax(-1), values[:, :last]).view(rows.shape)
    return out


class ScorePlan:
    """The plan of a scoring pass, which caches no keys and values. The packed tokens begin with a prefix of
    ``counts[0]`` tokens. The other counts are the lengths of the branches after the prefix, and each branch continues
    the prefix.
    """

    def __init__(self, counts: Sequence[int], device: torch.device) -> None:
        self._past, *self._counts = counts
        parts = [torch.arange(self._past), *(torch.arange(self._past, self._past + count) for count in self._counts)]
        self.positions = torch.cat(parts).to(device)
        seen = ((count, torch.ones(count, self._past + count, dtype=torch.bool)) for count in self._counts)
        self._masks = [mask.tril(self._past).to(device) if count > 1 else None for count, mask in seen]
        self._keys = self._values = torch.empty(0)

    def write(self, layer: int, key_value: torch.Tensor) -> None:  # noqa: ARG002
        self._keys, self._values = key_value.transpose(0, 1)[None].chunk(2, dim=1)

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        sizes = [self._past, *self._counts]
        (query, *queries), (key, *keys), (value, *values) = (
            packed.split(sizes, 2) for packed in (query.transpose(0, 1)[None], self._keys, self._values)
        )
        outs = [F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)]
        for own, more_keys, more_values, mask in zip(queries, keys, values, self._masks, strict=True):
            seen = torch.cat((key, more_keys), 2), torch.cat((value, more_values), 2)
            outs.append(F.scaled_dot_product_attention(own, *seen, mask, enable_gqa=True))
        return torch.cat(outs, 2)[0].transpose(0, 1).flatten(1)


def _causal_mask(count: int, past: int, memory: KVMemory) -> torch.Tensor | None:
    """The additive mask of ``count`` tokens, which attend to the past tokens and causally to each other; None if there
    are no past tokens."""
    if not past:
        return None
    hidden = torch.full((count, past + count), -torch.inf, dtype=memory.dtype, device=memory.device)
    return hidden.triu_(past + 1)
