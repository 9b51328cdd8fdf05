"""Continuous batching of the generic decoder. The scheduler decides which rows share a pass, and caches results for
prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slimelite.engines.embedded.batching import Batching
from slimelite.engines.embedded.caches import begun, is_cut, joined, with_rows
from slimelite.engines.embedded.generic import PREFILL_TOKENS, GenericDecoder
from slimelite.engines.embedded.rows import Running
from slimelite.engines.embedded.sampler import Scoring
from slimelite.engines.embedded.ways import Rows
from slimelite.engines.protocol import Decode, OnTokens, Scores

# the most prompt tokens that are prefilled before a decoding step while rows wait for this step
STEP_TOKENS = 2 * PREFILL_TOKENS
# if prompts share fewer tokens at the beginning, these tokens are computed for each prompt
ALIKE = 16
# when a row ends, its results are cached if the response has at least this many tokens
KEEP = 64


@dataclass(eq=False)
class Batch:
    """Rows that are computed in the same forward pass. ``cache``: the cache of these rows, in the order of ``members``.
    ``width``: the number of tokens of the longest row."""

    members: list[Running]
    cache: Any
    width: int


@dataclass(eq=False)
class Known:
    """The cached results for ``tokens``: a cache of one row, and the logits [1, vocab] after the last token, if the
    logits were kept."""

    tokens: np.ndarray
    cache: Any
    logits: Tensor | None


@dataclass(eq=False)
class Prompt:
    """Tokens to prefill, and the sequences that begin with these tokens. The results for the tokens before position
    ``start`` are in ``known``."""

    tokens: np.ndarray
    members: list[Running] = field(default_factory=list)
    start: int = 0
    known: Known | None = None


class GenericScheduler(Batching):
    """Batching of a `GenericDecoder`.

    The cache of a row has all tokens except the last one, which is the input of the next step. The pass that finishes a
    prompt also gives the logits of the first new token. If the family allows it (`ways.Rows`), rows of all lengths are
    one batch. Otherwise only rows of equal length are one batch. ``tokens``: the largest number of tokens in all
    caches, with padding and cached prompts. A row that runs without other rows may use more tokens. ``row_tokens``: the
    memory of a row's states, counted in tokens.
    """

    def __init__(
        self,
        decoder: GenericDecoder,
        tokens: int,
        row_tokens: int,
        max_rows: int,
        decode: Decode | None,
        listeners: Mapping[str, OnTokens] | None = None,
    ) -> None:
        super().__init__(decoder.vocab_size, decoder.model.device, max_rows, decode, listeners)
        self._decoder, self._passes, self._ways = decoder, decoder.passes, decoder.ways
        self._tokens, self._row_tokens = tokens, row_tokens
        self._batches: list[Batch] = []
        # ordered by last use
        self._known: list[Known] = []

    def release_cache(self) -> None:
        self.waiting.extendleft(reversed([*self.rows.sequences, *self.filling]))
        for row in reversed(range(len(self.rows))):
            self.rows.remove(row)
        self.filling.clear()
        self._batches.clear()
        self._known.clear()

    def _stop_filling(self, sequence: Running) -> None:
        """Do nothing, because a prefill takes no memory here."""

    def _scores(self, group: Sequence[Scoring]) -> list[Scores]:
        scores = []
        for scoring in group:
            ids, count = torch.tensor([scoring.tokens], device=self._device), len(scoring.tokens) - scoring.start
            logits = self._passes.whole(ids, count + 1)[0, :-1]
            scores.append(scoring.read(lambda states: states, self._decoder.vocab_size, logits))
        return scores

    def _advance_rows(self) -> None:
        self._admit()
        if self._ways.rows is Rows.WHOLE:
            while self.filling:
                self.rows.add(self.filling.pop(0))
            if self.rows.sequences:
                self._draw(self._whole())
            return
        self._grow()
        row = {sequence: index for index, sequence in enumerate(self.rows.sequences)}
        logits = [self._decode_batch(batch, [row[sequence] for sequence in batch.members]) for batch in self._batches]
        logits += self._prefill()
        if logits:
            row = {sequence: index for index, sequence in enumerate(self.rows.sequences)}
            rows = [row[sequence] for batch in self._batches for sequence in batch.members]
            self._join()
            together = logits[0] if len(logits) == 1 else torch.cat(logits)
            if rows != sorted(rows):
                together = together[torch.from_numpy(np.argsort(rows)).to(self._device)]
            self._draw(together)

    def _whole(self) -> Tensor:
        """[rows, vocab] logits, computed from all tokens of each row. Rows of one length share a pass."""
        lengths, parts = self.rows.state["length"][: len(self.rows)], []
        order = np.argsort(lengths, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1):
            ids = torch.from_numpy(self.rows.tokens[rows, : lengths[rows[0]]]).to(self._device)
            parts.append(self._passes.whole(ids, 1)[:, 0])
        return torch.cat(parts)[torch.from_numpy(np.argsort(order)).to(self._device)]

    def _decode_batch(self, batch: Batch, rows: list[int]) -> Tensor:
        """[members, vocab] logits after the last token of each member. ``rows``: the rows of the members in the
        table."""
        fed = torch.from_numpy(self.rows.last_tokens()[rows])[:, None].to(self._device)
        lengths = torch.from_numpy(self.rows.state["length"][rows] - 1)
        logits, batch.cache = self._passes.decode(fed, batch.cache, lengths, batch.width)
        batch.width += 1
        return logits

    @property
    def _row_tokens_used(self) -> int:
        return sum(len(batch.members) * (batch.width + self._row_tokens) for batch in self._batches)

    def _make_room(self, tokens: int) -> bool:
        """Drop cached prompts until ``tokens`` fit; False if they do not fit."""
        while (known := sum(len(known.tokens) + self._row_tokens for known in self._known)) + (
            self._row_tokens_used + tokens
        ) > self._tokens:
            if not known:
                return False
            del self._known[0]
        return True

    def _admit(self) -> None:
        """Let waiting sequences fill in the order of arrival, as long as rows and memory are free."""
        widest = max((batch.width for batch in self._batches), default=0) if self._ways.rows is Rows.PADDED else 0
        expected = self._row_tokens_used
        while self.waiting and len(self.rows) + len(self.filling) < self._max_rows:
            sequence = self.waiting[0]
            expected += max(len(sequence.tokens) + min(sequence.remaining, KEEP), widest) + self._row_tokens
            if (self.filling or self.rows.sequences) and (self._full or expected > self._tokens):
                return
            self._let_fill(sequence)

    def _grow(self) -> None:
        """Make room for one more token of each row. If there is no room, the last rows wait again."""
        while not self._make_room(len(self.rows)) and len(self.rows) > 1:
            self._preempt()

    def _prefill(self) -> list[Tensor]:
        """Prefill prompts, at most about `STEP_TOKENS` tokens if rows wait for a decoding step. Returns the logits of
        the new rows."""
        logits: list[Tensor] = []
        budget = STEP_TOKENS if self.rows.sequences else None
        by_tokens: dict[bytes, Prompt] = {}
        for sequence in self.filling:
            by_tokens.setdefault(sequence.tokens.tobytes(), Prompt(sequence.tokens)).members.append(sequence)
        prompts = list(by_tokens.values())
        while prompts and (budget is None or budget > 0):
            group = self._next(prompts)
            tokens = sum(len(prompt.tokens) - prompt.start for prompt in group)
            logits.append(self._start(group))
            prompts = [prompt for prompt in prompts if prompt not in group]
            budget = None if budget is None else budget - tokens
        self.filling = [sequence for prompt in prompts for sequence in prompt.members]
        return logits

    def _next(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The first of ``prompts``, and other prompts of the same length that the same pass can compute."""
        first, *others = prompts
        self._find(first)
        group = [first]
        if first.start:
            return group
        begins = {first.tokens[:ALIKE].tobytes()}
        for prompt in others:
            if (len(group) + 1) * len(first.tokens) > self._decoder.prefill_tokens:
                break
            if len(prompt.tokens) != len(first.tokens):
                continue
            begin = prompt.tokens[:ALIKE].tobytes()
            if begin in begins and self._ways.extends and len(prompt.tokens) > ALIKE:
                continue  # this prompt will continue from the results of the pass
            self._find(prompt)
            if not prompt.start:
                begins.add(begin)
                group.append(prompt)
        return group

    def _find(self, prompt: Prompt) -> None:
        """Find the longest cached beginning from which ``prompt`` can continue."""
        wanted, best = prompt.tokens, None
        prompt.start = 0
        for known in self._known:
            count = min(len(wanted), len(known.tokens))
            if (apart := known.tokens[:count] != wanted[:count]).any():
                count = int(apart.argmax())
            whole = count == len(known.tokens)
            if not (whole and count == len(wanted) and known.logits is not None):
                cut = min(count, len(wanted) - 1)
                if cut <= prompt.start or cut < min(ALIKE, len(wanted) - 1):
                    continue  # this check comes first, because a look at the cache takes longer
                may_cut = (whole and cut == count) or is_cut(known.cache, len(known.tokens))
                may_go_on = cut == len(wanted) - 1 or self._ways.extends
                count = cut if may_cut and may_go_on else 0
            if count > prompt.start:
                prompt.start, best = count, known
        if best is not None:
            self._known.remove(best)
            self._known.append(best)
            prompt.known = best

    def _start(self, group: list[Prompt]) -> Tensor:
        """Compute the tokens of ``group`` that are not cached, and turn its members into rows. Returns the logits of
        these rows [rows, vocab]."""
        first, cache, logits = group[0], None, None
        length, start = len(first.tokens), first.start
        if first.known is not None:
            cache, logits = first.known.cache, first.known.logits
            if start < length:
                cut = start < len(first.known.tokens)
                cache = begun(cache, start) if cut else with_rows(cache, self._indices([0]))
        step = PREFILL_TOKENS if self._ways.extends else length
        for done in range(start, length, step):
            ids = np.stack([prompt.tokens[done : done + step] for prompt in group])
            logits, cache = self._passes.extend(torch.from_numpy(ids).to(self._device), cache, done)
        assert logits is not None
        for number, prompt in enumerate(group):
            self._keep(prompt.tokens, cache, number, logits, new=start < length)
            for sequence in prompt.members:
                if sequence.cached_tokens is None:
                    sequence.cached_tokens = min(start if sequence is prompt.members[0] else length, length - 1)
                self.rows.add(sequence)
        members = [sequence for prompt in group for sequence in prompt.members]
        rows = self._indices([number for number, prompt in enumerate(group) for _ in prompt.members])
        self._batches.append(Batch(members, with_rows(cache, rows), length))
        return logits.index_select(0, rows)

    def _indices(self, rows: list[int]) -> Tensor:
        return torch.tensor(rows, device=self._device)

    def _keep(self, tokens: np.ndarray, cache: Any, row: int, logits: Tensor | None, *, new: bool = True) -> None:
        """Cache the results for ``tokens`` if memory is free. The results are in row ``row`` of ``cache``."""
        if not new or len(self._known) >= self._max_rows or not self._make_room(len(tokens) + self._row_tokens):
            return
        kept = with_rows(cache, self._indices([row]), len(tokens))
        self._known.append(Known(tokens, kept, None if logits is None else logits[row : row + 1].clone()))

    def _join(self) -> None:
        """Join batches that may share a pass."""
        alike: dict[int, list[Batch]] = {}
        for batch in self._batches:
            alike.setdefault(0 if self._ways.rows is Rows.PADDED else batch.width, []).append(batch)
        self._batches = [
            Batch(
                [sequence for batch in batches for sequence in batch.members],
                joined([batch.cache for batch in batches]),
                max(batch.width for batch in batches),
            )
            for batches in alike.values()
        ]

    def _retire(self, sequences: Sequence[Running], *, keep: bool) -> None:
        """Remove rows from their batches. The remaining rows are then in the table's order."""
        gone = set(sequences)
        order = {sequence: row for row, sequence in enumerate(self.rows.sequences)}
        for batch in [batch for batch in self._batches if gone.intersection(batch.members)]:
            staying = sorted((s for s in batch.members if s not in gone), key=order.__getitem__)
            for row, sequence in enumerate(batch.members):
                if keep and sequence in gone and len(sequence.log_probs) >= KEEP:
                    self._keep(sequence.tokens[:-1], batch.cache, row, None)
            if not staying:
                self._batches.remove(batch)
                continue
            rows = self._indices([batch.members.index(sequence) for sequence in staying])
            batch.members = staying
            batch.width = int(self.rows.state["length"][[order[sequence] for sequence in staying]].max()) - 1
            batch.cache = with_rows(batch.cache, rows, batch.width)
