"""The base class of both schedulers of the embedded engine. This class accepts requests, samples tokens and ends
responses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from itertools import chain

import numpy as np
import torch

from slimelite.engines.checks import holds_stop
from slimelite.engines.embedded.changes import changed, follow
from slimelite.engines.embedded.rows import RowTable, Running
from slimelite.engines.embedded.sampler import NOT_FINITE, Scoring, sample, uniforms
from slimelite.engines.protocol import Decode, FinishReason, OnTokens, Scores


class Batching(ABC):
    """Runs sequences in submission order, at most ``max_rows`` at a time.

    A sequence first waits. Then the sequence fills: the keys, values or states of its tokens are read from the cache,
    or computed by a prefill. Finally the sequence becomes a row of the table and decodes. A subclass manages the memory
    of the sequences and computes the logits.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        max_rows: int,
        decode: Decode | None,
        listeners: Mapping[str, OnTokens] | None = None,
    ) -> None:
        self.rows = RowTable(max_rows, vocab_size, device)
        self.waiting: deque[Running] = deque()
        self.filling: list[Running] = []
        self.scoring: deque[list[Scoring]] = deque()
        self.weight_version = 0
        self._device, self._max_rows, self._decode = device, max_rows, decode
        self._listeners = {} if listeners is None else listeners
        # True after a row had to give its memory back; no sequence is admitted until another sequence ends
        self._full = False
        self._steps = 0

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do."""
        return bool(self.waiting or self.filling or self.rows.sequences or self.scoring)

    def request_ids(self) -> set[str]:
        """Ids of all requests that have not ended."""
        return {sequence.request.request_id for sequence in self._sequences()}

    def set_weight_version(self, version: int) -> None:
        """Record that the weights have changed. All cached results are dropped, and new tokens get the weight version
        ``version``."""
        self.release_cache()
        self.weight_version = version
        for sequence in self._sequences():
            if sequence.versions:
                sequence.versions.append((len(sequence.log_probs), version))

    @abstractmethod
    def release_cache(self) -> None:
        """Free all cached results. Sequences keep their tokens, and the next step prefills them again."""

    @abstractmethod
    def _advance_rows(self) -> None:
        """Admit and prefill the requests that fit, then decode one token for every row."""

    @abstractmethod
    def _scores(self, group: Sequence[Scoring]) -> list[Scores]:
        """Make one scoring pass for ``group``, which is one list of the result of `sampler.together`."""

    @abstractmethod
    def _stop_filling(self, sequence: Running) -> None:
        """Drop the memory that a sequence's unfinished prefill has taken."""

    @abstractmethod
    def _retire(self, sequences: Sequence[Running], *, keep: bool) -> None:
        """Free the memory of sequences that were rows. ``keep``: whether results that other sequences may use stay
        cached."""

    def step(self) -> None:
        """Make one scoring pass if a call of `Engine.score` waits. Then advance the rows by one step."""
        self._steps += 1
        if self.scoring:
            group = self.scoring.popleft()
            try:
                for scoring, scores in zip(group, self._scores(group), strict=True):
                    scoring.future.set_result(scores)
            except Exception as error:  # scoring changes no row, so the requests continue
                for scoring in group:
                    scoring.future.set_exception(error)
        self._advance_rows()

    def abort(self, request_ids: Collection[str] | None) -> None:
        """End the sequences with these ids; None: all sequences. Each sequence returns the tokens that it has so
        far."""

        def meant(sequence: Running) -> bool:
            return request_ids is None or sequence.request.request_id in request_ids

        self._end([(row, "abort") for row, sequence in enumerate(self.rows.sequences) if meant(sequence)])
        for sequence in filter(meant, [*self.filling, *self.waiting]):
            self._stop_filling(sequence)
            sequence.deliver("abort")
        self.filling = [sequence for sequence in self.filling if not meant(sequence)]
        self.waiting = deque(sequence for sequence in self.waiting if not meant(sequence))

    def fail(self, error: Exception) -> None:
        """Pass ``error`` to every caller and drop all requests, so that the engine can serve new ones."""
        # the cache may hold NaN, and a masked NaN still makes the attention output NaN
        self.release_cache()
        for sequence in self._sequences():
            sequence.future.set_exception(error)
        for scoring in chain.from_iterable(self.scoring):
            scoring.future.set_exception(error)
        self.filling.clear()
        self.waiting.clear()
        self.scoring.clear()

    def _sequences(self) -> tuple[Running, ...]:
        return (*self.rows.sequences, *self.filling, *self.waiting)

    def _let_fill(self, sequence: Running) -> None:
        """Start to fill ``sequence``, which is the first of ``waiting``."""
        self._full = False
        if not sequence.versions:
            sequence.versions.append((0, self.weight_version))
        self.filling.append(self.waiting.popleft())

    def _draw(self, logits: torch.Tensor) -> None:
        """Draw a token for every row of the table from ``logits`` [rows, vocab] fp32, and end the rows that stop."""
        rows = self.rows
        state = rows.state[: len(rows)]
        lengths = state["length"]
        uniform = uniforms(state["stream"], lengths + state["stream_shift"])
        sampled, sampled_log_probs, kept = sample(
            logits, rows.sampling(), torch.from_numpy(uniform).to(self._device), changed(rows, logits)
        )
        tokens, log_probs = sampled.cpu().numpy(), sampled_log_probs.cpu().numpy()
        if not np.isfinite(log_probs).all():
            raise RuntimeError(NOT_FINITE)
        rows.append(tokens, log_probs)
        for row, ids in kept.items():
            rows.sequences[row].kept.append(ids)
        if self._listeners:
            for row, sequence in enumerate(rows.sequences):
                if (listener := self._listeners.get(sequence.request.request_id)) is not None:
                    listener(tokens[row : row + 1].tolist(), log_probs[row : row + 1].tolist())
        stopped = rows.stopped(tokens)
        if state["changes"].any():
            follow(rows, tokens, stopped)
        for row in np.flatnonzero(state["has_stop_strings"] & ~stopped):
            stopped[row] = self._completes_stop_string(int(row))
        ended = np.flatnonzero(stopped | (lengths >= state["limit"])).tolist()
        self._end([(row, "stop" if stopped[row] else "length") for row in ended])

    def _completes_stop_string(self, row: int) -> bool:
        """Whether the last tokens of the response contain a stop string. If the response continues an earlier one, the
        tokens of the earlier response count too."""
        request, state = self.rows.sequences[row].request, self.rows.state[row]
        length = int(state["length"])
        if length < state["min_length"]:
            return False
        assert self._decode is not None, "the engine needs a decode function for stop strings"
        prompt = len(request.input_ids) - request.position
        return holds_stop(self._decode, self.rows.tokens[row, prompt:length], request.params.stop)

    def _end(self, ended: Sequence[tuple[int, FinishReason]]) -> None:
        """End these rows of the table, given in ascending order. Results for long sequences stay cached."""
        if not ended:
            return
        gone = [(self.rows.remove(row), reason) for row, reason in reversed(ended)]
        self._retire([sequence for sequence, _ in gone], keep=True)
        self._full = False
        for sequence, reason in gone:
            sequence.deliver(reason)

    def _preempt(self) -> None:
        """Free the memory of the table's last row. The sequence of this row will be admitted next."""
        sequence = self.rows.remove(len(self.rows) - 1)
        self._retire([sequence], keep=False)
        self.waiting.appendleft(sequence)
        self._full = True
