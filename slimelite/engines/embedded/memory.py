"""Memory for keys and values. The keys and values of running rows are in slabs, one slab for each class of row lengths.
The keys and values of cached prefixes are in segments."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from slimelite.engines.embedded.model import DecoderShape

# the shortest row length [tokens]; the next lengths are 1.5 and 2 times this one, then 3 and 4 times, and so on
SHORTEST = 64


def class_length(tokens: int) -> int:
    """The smallest row length with room for ``tokens`` tokens: 64, 96, 128, 192, 256, 384, …"""
    length = SHORTEST
    while 2 * length < tokens:
        length *= 2
    return next(size for size in (length, length * 3 // 2, 2 * length) if size >= tokens)


@dataclass(slots=True, eq=False)
class Place:
    """Where the keys and values of a running row are: in ``slot`` of ``slab``. ``slab`` is None while the row does not
    run.

    ``base``: the slab has the keys and values from this position of the row on. Those of earlier tokens are in
    segments, which other rows may share.
    """

    base: int = 0
    slab: Slab | None = None
    slot: int = 0

    def at(self, layer: int) -> torch.Tensor:
        """The row's keys and values in the slab [2, kv heads, class length, head dim]."""
        assert self.slab is not None
        return self.slab.layers[layer][:, self.slot]


class Slab:
    """Rows of ``length`` positions, one for each of the places in ``rows``.

    ``layers``: for each layer, the keys and then the values: [2, capacity, kv heads, length, head dim].
    """

    def __init__(self, memory: KVMemory, length: int) -> None:
        self.length = length
        self.rows: list[Place] = []
        self.capacity = 0
        self._memory = memory
        self.layers = [memory.zeros(2, 0, memory.kv_heads, length, memory.head_dim) for _ in range(memory.num_layers)]

    def growth(self, rows: int) -> int:
        """The additional memory [tokens] that the slab needs for ``rows`` more rows."""
        return max(0, len(self.rows) + rows - self.capacity) * self.length

    def reserve(self, rows: int) -> None:
        """Allocate the memory for ``rows`` more rows at once. If memory allows, the slab grows by at least half."""
        if (wanted := len(self.rows) + rows) > self.capacity:
            more = min(self.capacity // 2, self._memory.free // self.length)
            self._resize(max(wanted, self.capacity + more))

    def extend(self, places: list[Place]) -> slice:
        """Put ``places`` into this slab. Returns their slots. The content of these slots is undefined but finite."""
        self.reserve(len(places))
        first = len(self.rows)
        for slot, place in enumerate(places, first):
            place.slab, place.slot = self, slot
        self.rows += places
        return slice(first, len(self.rows))

    def remove(self, slots: Collection[int]) -> None:
        """Remove the places at ``slots``. The last rows move into the gaps, and memory is freed."""
        gone = set(slots)
        count = len(self.rows) - len(gone)
        moving = [slot for slot in range(count, len(self.rows)) if slot not in gone]
        gaps = sorted(slot for slot in gone if slot < count)
        if moving:
            source = torch.tensor(moving, device=self._memory.device)
            target = torch.tensor(gaps, device=self._memory.device)
            for layer in self.layers:
                layer[:, target] = layer[:, source]
        for slot, moved in zip(gaps, moving, strict=True):
            self.rows[slot] = self.rows[moved]
            self.rows[slot].slot = slot
        del self.rows[count:]
        if not self.rows:
            self._memory.drop(self)
        elif 2 * count < self.capacity:
            self._resize(count)

    def _resize(self, capacity: int) -> None:
        """Change the capacity layer by layer, so that only one layer exists twice at any time."""
        kept = min(len(self.rows), capacity)
        self._memory.slab_tokens += (capacity - self.capacity) * self.length
        self.capacity = capacity
        for index, old in enumerate(self.layers):
            new = self._memory.zeros(2, capacity, *old.shape[2:])
            new[:, :kept] = old[:, :kept]
            self.layers[index] = new


class KVMemory:
    """All keys and values. Rows are admitted and prefixes are cached only while they have at most ``tokens`` tokens in
    total.

    Two things may exceed this limit: (1) a prefix whose row has ended, while other rows still read it; (2) the place of
    a row that is the only row. So the memory can exceed ``tokens`` by about one prompt. ``slabs``: the slabs, by
    length. ``slab_tokens``, ``segment_tokens``: the total size of all slabs and of all segments [tokens].
    """

    def __init__(self, shape: DecoderShape, tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        self.tokens, self.device, self.dtype = tokens, device, dtype
        self.num_layers, self.kv_heads, self.head_dim = shape.num_layers, shape.num_kv_heads, shape.head_dim
        self.slabs: dict[int, Slab] = {}
        self.slab_tokens = self.segment_tokens = 0

    @property
    def free(self) -> int:
        """The number of tokens that fit into the free memory."""
        return max(0, self.tokens - self.slab_tokens - self.segment_tokens)

    def zeros(self, *size: int) -> torch.Tensor:
        # zeros, because unwritten positions must be finite: their attention weight is 0, and 0 * NaN is NaN
        return torch.zeros(size, device=self.device, dtype=self.dtype)

    def slab(self, length: int) -> Slab:
        """The slab with rows of this length."""
        if length not in self.slabs:
            self.slabs[length] = Slab(self, length)
        return self.slabs[length]

    def drop(self, slab: Slab) -> None:
        """Free a slab with all its rows."""
        self.slab_tokens -= slab.capacity * slab.length
        del self.slabs[slab.length]

    def segment(self, tokens: int) -> torch.Tensor:
        """Uninitialised memory for a segment [layers, 2, kv heads, tokens, head dim]. The segment counts as used until
        `give_back` is called with it."""
        self.segment_tokens += tokens
        size = (self.num_layers, 2, self.kv_heads, tokens, self.head_dim)
        return torch.empty(size, device=self.device, dtype=self.dtype)

    def give_back(self, segment: torch.Tensor) -> None:
        """Stop counting ``segment`` as used."""
        self.segment_tokens -= segment.shape[3]
