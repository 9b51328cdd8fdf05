"""Continuous batching of the dense decoder. The scheduler decides which tokens are prefilled, and where keys and values
are stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slimelite.engines.embedded.attention import DecodePlan, Piece, PrefillPlan, Sharing
from slimelite.engines.embedded.batching import Batching
from slimelite.engines.embedded.memory import KVMemory, Slab, class_length
from slimelite.engines.embedded.model import Decoder
from slimelite.engines.embedded.prefixes import Node, PrefixTree
from slimelite.engines.embedded.rows import Fill, Running
from slimelite.engines.embedded.sampler import Scoring, compute
from slimelite.engines.protocol import Decode, OnTokens, Scores

# the most prompt tokens in one prefill call; this limits the memory of its activations
PREFILL_TOKENS = 1024
# the most prompt tokens that are prefilled before a decoding step while rows wait for this step
STEP_TOKENS = 2 * PREFILL_TOKENS
# a prompt with more tokens to prefill than this gets one prefill call per step even if no row waits, because other
# requests may arrive
LONG_PROMPT = 4 * PREFILL_TOKENS
# if at least this many next tokens of several requests are equal, the other requests wait until the first request is
# prefilled. A shorter cached prefix is not used, unless it is the whole prompt
ALIKE = 16
# a shared prefix with fewer tokens is copied into its rows, because reading copies costs less than separate products of
# a few queries with the prefix
REFERENCE = 128
# when a row ends, segments with fewer tokens are not cached
KEEP = 64


@dataclass(frozen=True, slots=True)
class Layout:
    """The batch of a decoding step: the rows of ``slabs``, and the prefixes that they share. Row i of this batch is row
    ``order[i]`` of the table.

    ``back``: for each row of the table, the index of this row in the batch. ``splits``: the value of
    `PrefixTree.splits` when ``sharing`` was made.
    """

    slabs: list[Slab]
    order: np.ndarray
    back: torch.Tensor
    sharing: list[list[Sharing]]
    splits: int


class Scheduler(Batching):
    """Batching of the dense decoder. Rows are in slabs, and prefixes are in a tree. The memory limits the number of
    rows.

    All tokens of a sequence except the last one are read from the prefix tree or prefilled. A row's last token is never
    in the cache, because it is the input of the next decoding step. So the same decoding step serves a new prompt, a
    copied prompt, a continued response and a recomputed row.
    """

    def __init__(
        self,
        decoder: Decoder,
        memory: KVMemory,
        max_rows: int,
        decode: Decode | None,
        listeners: Mapping[str, OnTokens] | None = None,
    ) -> None:
        super().__init__(decoder.weights.shape.vocab_size, memory.device, max_rows, decode, listeners)
        self.prefixes = PrefixTree(memory)
        self._memory, self._decoder = memory, decoder
        self._fills: dict[object, Fill] = {}
        # None after a row was added, removed or moved
        self._layout: Layout | None = None

    def release_cache(self) -> None:
        for row in reversed(range(len(self.rows))):
            self.filling.insert(0, self.rows.remove(row))
        for sequence in self.filling:
            sequence.place.slab = sequence.leaf = None
            self._end_fill(sequence)
        for slab in list(self._memory.slabs.values()):
            self._memory.drop(slab)
        self.prefixes.clear()
        self._memory.segment_tokens = 0
        self._layout = None

    def _advance_rows(self) -> None:
        self._admit()
        self._prefill()
        self._grow()
        if self.rows.sequences:
            self._decode_step()

    def _scores(self, group: Sequence[Scoring]) -> list[Scores]:
        return compute(group, self._decoder)

    def _admit(self) -> None:
        """Admit waiting sequences in the order of their arrival, as long as rows and memory are free."""
        memory, previous = self._memory, self.filling[-1].request.input_ids if self.filling else ()
        expected = sum(class_length(len(s.tokens)) for s in self.filling)
        while self.waiting and len(self.rows) + len(self.filling) < self._max_rows:
            sequence = self.waiting[0]
            shared = sequence.request.input_ids == previous
            expected += class_length(_headroom(sequence) + (0 if shared else len(sequence.tokens)))
            busy = bool(self.filling or self.rows.sequences)
            if busy and (self._full or expected > memory.free + self.prefixes.idle_tokens):
                break
            previous = sequence.request.input_ids
            self._let_fill(sequence)

    def _prefill(self) -> None:
        """Prefill tokens, at most `STEP_TOKENS` if rows wait for a decoding step. Prefilled sequences become rows."""
        budget = STEP_TOKENS if self.rows.sequences else None
        while self.filling:
            batch, ready = self._pick(PREFILL_TOKENS if budget is None else min(budget, PREFILL_TOKENS))
            self._place(ready)
            if not batch:
                if self.rows.sequences or not ready:
                    return
                continue
            pieces = [piece for _, piece in batch]
            tokens = torch.from_numpy(np.concatenate([piece.tokens for piece in pieces])).to(self._memory.device)
            self._decoder.forward(tokens, PrefillPlan(self._memory, pieces), cache_only=True)
            for sequence, piece in batch:
                self._advance(sequence, len(piece.tokens))
            if budget is not None:
                budget -= len(tokens)

    def _pick(self, room: int) -> tuple[list[tuple[Running, Piece]], list[Running]]:
        """The pieces for the next prefill call (at most ``room`` tokens), and the sequences that are ready without a
        prefill."""
        batch: list[tuple[Running, Piece]] = []
        ready: list[Running] = []
        for sequence in self.filling:
            target = len(sequence.tokens) - 1
            if sequence.fill is None and not (sequence.behind and not sequence.behind.ended):
                self._find(sequence)
            if sequence.fill is None:
                if sequence.leaf is not None and sequence.leaf.end == target:
                    ready.append(sequence)
                continue
            fill = sequence.fill
            left = fill.end - fill.done
            if fill.step == self._steps and left > LONG_PROMPT:
                continue
            if room <= 0 or (left > room and (batch or (room < PREFILL_TOKENS and left <= PREFILL_TOKENS))):
                break
            fill.step = self._steps
            piece_tokens = sequence.tokens[fill.done : fill.done + min(left, room)]
            assert sequence.leaf is not None
            batch.append((sequence, Piece(piece_tokens, sequence.leaf, fill.kv, fill.start, fill.done)))
            room -= len(piece_tokens)
        return batch, ready

    def _find(self, sequence: Running) -> None:
        """Find the cached prefix of a sequence. Then prefill the rest, or wait for another prefill of the same
        tokens."""
        prompt = sequence.tokens[:-1]
        leaf = self.prefixes.match(prompt, sequence.leaf)
        if leaf.end < min(ALIKE, len(prompt)):
            # prompts with no cached prefix are prefilled together, which saves more time than the use of a short prefix
            leaf = self.prefixes.root
        if sequence.leaf is not None:
            self.prefixes.leave(sequence.leaf)
        sequence.leaf, sequence.behind = leaf, None
        self.prefixes.use(leaf)
        start, end = leaf.end, len(prompt)
        if start < end:
            key = (leaf, prompt[start : start + ALIKE].tobytes())
            if key in self._fills:
                sequence.behind = self._fills[key]
                return
            if not self._make_room(end - start) and self.rows.sequences:
                return
            sequence.fill = self._fills[key] = Fill(key, self._memory.segment(end - start), start, end)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = start

    def _advance(self, sequence: Running, count: int) -> None:
        """Record that ``count`` more tokens are prefilled. A finished prefill becomes a node that others may use."""
        fill, leaf = sequence.fill, sequence.leaf
        assert fill is not None
        assert leaf is not None
        fill.done += count
        if fill.done == fill.end:
            del self._fills[fill.key]
            fill.ended, sequence.fill = True, None
            sequence.leaf = self.prefixes.add(sequence.tokens[:-1], fill.kv, fill.start, leaf)
            self.prefixes.use(sequence.leaf)
            self.prefixes.leave(leaf)

    def _end_fill(self, sequence: Running) -> None:
        """Drop the unfinished prefill of a sequence, so that other sequences no longer wait for it."""
        if (fill := sequence.fill) is not None:
            self._memory.give_back(fill.kv)
            del self._fills[fill.key]
            fill.ended, sequence.fill = True, None
        sequence.behind = None

    def _stop_filling(self, sequence: Running) -> None:
        self._end_fill(sequence)
        if sequence.leaf is not None:
            self.prefixes.leave(sequence.leaf)
            sequence.leaf = None

    def _place(self, ready: list[Running]) -> None:
        """Turn sequences into rows once all their tokens before the last one are cached."""
        together: dict[tuple[Node, int], list[Running]] = {}
        for sequence in ready:
            assert sequence.leaf is not None
            shared = self._shared(sequence.leaf)
            sequence.place.base = shared[-1].end if shared else 0
            length = class_length(len(sequence.tokens) - sequence.place.base + _headroom(sequence))
            together.setdefault((sequence.leaf, length), []).append(sequence)
        # one allocation for these sequences and for the sequences that will probably follow them into the same slab
        lengths = Counter(class_length(len(s.tokens) - s.place.base + _headroom(s)) for s in self.filling)
        for length in {length for _, length in together}:
            if self._make_room((slab := self._memory.slab(length)).growth(lengths[length])):
                slab.reserve(lengths[length])
        placed: set[Running] = set()
        for (leaf, length), members in together.items():
            slab = self._memory.slab(length)
            if not self._make_room(slab.growth(len(members))) and (self.rows.sequences or placed):
                continue
            path, base = leaf.path(), members[0].place.base
            for node in path:
                if node.end <= base:
                    self.prefixes.own(node)
            copied = [node for node in path if node.end > base]
            slots = slab.extend([sequence.place for sequence in members])
            for layer in range(self._memory.num_layers):
                for node in copied:
                    slab.layers[layer][:, slots, :, node.start - base : node.end - base] = node.at(layer)[:, None]
            for node in copied:
                if node.users == 1 and node.kv is not None:
                    self.prefixes.lend(node, members[0].place)
            for sequence in members:
                self.rows.add(sequence, slab.length)
            placed.update(members)
        if placed:
            self.filling = [sequence for sequence in self.filling if sequence not in placed]
            self._layout = None

    def _shared(self, leaf: Node) -> list[Node]:
        """The nodes on the path to ``leaf`` that are read in place, because several sequences pass through them."""
        # in lower precisions, no attention function here returns its mass without rounding the scores
        if self._memory.dtype != torch.float32:
            return []
        shared = [node for node in leaf.path() if node.users > 1]
        return shared if shared and shared[-1].end >= REFERENCE else []

    def _make_room(self, tokens: int) -> bool:
        """Evict cached prefixes until ``tokens`` fit. Returns False if they do not fit."""
        while tokens > self._memory.free:
            if not self.prefixes.evict():
                return False
        return True

    def _grow(self) -> None:
        """Move each row with a full place to a longer place. If there is no memory, the last rows wait again."""
        state = self.rows.state[: len(self.rows)]
        full = np.flatnonzero(state["length"] - state["base"] > state["room"])
        for room in np.unique(state["room"][full]).tolist():
            moving = [row for row in full.tolist() if self.rows.state["room"][row] == room]
            longer = class_length(room + 1)
            while not self._make_room(self._memory.slab(longer).growth(len(moving))) and len(self.rows) > 1:
                self._preempt()  # a slab is dropped together with its last row
                moving = [row for row in moving if row < len(self.rows)]
            moving = [row for row in moving if row < len(self.rows)]
            if not moving:
                continue
            new, old = self._memory.slab(longer), self._memory.slabs[room]
            members = [self.rows.sequences[row].place for row in moving]
            left = [place.slot for place in members]
            source, slots = torch.tensor(left, device=self._memory.device), new.extend(members)
            for layer in range(self._memory.num_layers):
                new.layers[layer][:, slots, :, :room] = old.layers[layer][:, source]
            old.remove(left)
            self.rows.state["room"][moving] = new.length
            self._layout = None

    def _arrange(self) -> Layout:
        """The order of the batch: slab after slab, so that the keys and values of each slab are read in place."""
        slabs = [slab for slab in self._memory.slabs.values() if slab.rows]
        index = {sequence.place: row for row, sequence in enumerate(self.rows.sequences)}
        order = np.array([index[place] for slab in slabs for place in slab.rows])
        levels: list[dict[Node, list[int]]] = []
        for number, row in enumerate(order.tolist()):
            sequence = self.rows.sequences[row]
            if (base := sequence.place.base) and sequence.leaf is not None:
                for depth, node in enumerate(node for node in sequence.leaf.path() if node.end <= base):
                    if depth == len(levels):
                        levels.append({})
                    levels[depth].setdefault(node, []).append(number)
        sharing = [[Sharing(node, rows) for node, rows in level.items()] for level in levels]
        back = torch.from_numpy(np.argsort(order)).to(self._memory.device)
        return Layout(slabs, order, back, sharing, self.prefixes.splits)

    def _decode_step(self) -> None:
        rows = self.rows
        state = rows.state[: len(rows)]
        lengths = state["length"]
        if self._layout is None or self._layout.splits != self.prefixes.splits:
            self._layout = self._arrange()
        layout = self._layout
        fed = torch.from_numpy(rows.last_tokens()[layout.order]).to(self._device)
        plan = DecodePlan(
            self._memory, layout.slabs, lengths[layout.order] - 1, state["base"][layout.order], layout.sharing
        )
        hidden = self._decoder.forward(fed, plan)[layout.back]
        self._draw(self._decoder.logits(hidden))

    def _retire(self, sequences: Sequence[Running], *, keep: bool) -> None:
        """Release the nodes and places of these sequences. Results that only a row has, and that other sequences may
        use, are copied into segments."""
        places: dict[Slab, list[int]] = {}
        for sequence in sequences:
            self._retire_one(sequence, keep=keep, places=places)
        for slab, slots in places.items():
            slab.remove(slots)
        self._layout = None

    def _retire_one(self, sequence: Running, *, keep: bool, places: dict[Slab, list[int]]) -> None:
        """Release the nodes of a sequence, and note its place in ``places``."""
        leaf, place = sequence.leaf, sequence.place
        assert leaf is not None
        assert place.slab is not None
        known, count = sequence.tokens[:-1], len(sequence.tokens) - 1 - leaf.end
        if keep and count >= KEEP and self._make_room(count):
            kv = self._memory.segment(count)
            for layer in range(self._memory.num_layers):
                kv[layer] = place.at(layer)[:, :, leaf.end - place.base : len(known) - place.base]
            self.prefixes.add(known, kv, leaf.end, leaf)
        for node in reversed(leaf.path()):
            if node.holder is not place:
                continue
            size = len(node.tokens)
            if node.users > 1 or node.children or (keep and size >= KEEP and self._make_room(size)):
                self.prefixes.own(node)
        self.prefixes.leave(leaf)
        places.setdefault(place.slab, []).append(place.slot)
        sequence.leaf = place.slab = None


def _headroom(sequence: Running) -> int:
    """The number of additional tokens that a new place has room for. A row that needs more room moves later."""
    return min(sequence.remaining, 8 + len(sequence.tokens) // 4)
