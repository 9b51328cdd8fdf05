"""Continuous batching: decides which sequences run, what is prefilled, and when a sequence ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from slimelite.engines.checks import holds_stop
from slimelite.engines.embedded.attention import DecodePlan, KVCache, PrefillPlan, ScorePlan, round_up
from slimelite.engines.embedded.model import Decoder
from slimelite.engines.embedded.sampler import SamplingBatch, sample, stream_of, uniforms
from slimelite.engines.protocol import Decode, FinishReason, GenerateRequest, GenerateResult

ROW = np.dtype(
    [
        ("length", np.int64),  # tokens so far; the last one is not in the KV cache yet
        ("start", np.int64),  # number of input_ids
        ("limit", np.int64),  # length at which max_new_tokens is reached
        ("min_length", np.int64),  # length below which stop ids are not drawn
        ("stream", np.uint64),  # start of the row's random stream
        ("stream_shift", np.int64),  # add it to the length for the position in the stream
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("top_k", np.int64),
        ("has_stop_strings", np.bool_),
    ]
)


@dataclass(slots=True, eq=False)
class Running:
    """A waiting or running request. ``versions``: (index of a generated token, weight version from that token on)."""

    request: GenerateRequest
    seed: int
    stop_ids: tuple[int, ...]
    future: Future[GenerateResult] = field(default_factory=Future)
    versions: list[tuple[int, int]] = field(default_factory=list)
    cached_tokens: int = 0

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens, without the response tokens that ``input_ids`` may end with."""
        return len(self.request.input_ids) - self.request.position

    @property
    def need(self) -> int:
        """Cache positions that the request may use at most."""
        return len(self.request.input_ids) + self.request.params.max_new_tokens

    def shares_prompt(self, other: Running) -> bool:
        """Whether both start with the same prompt."""
        mine = self.request.input_ids[: self.prompt_length]
        return mine == other.request.input_ids[: other.prompt_length]

    def result(self, tokens: np.ndarray, log_probs: np.ndarray, reason: FinishReason) -> GenerateResult:
        """The result for the caller, from the generated tokens."""
        starts = np.array([start for start, _ in self.versions], np.int64)
        counts = np.diff(starts, append=len(tokens))
        versions = np.repeat([version for _, version in self.versions], counts)
        columns: dict[str, Any] = {"output_ids": tokens, "log_probs": log_probs, "weight_versions": versions}
        return GenerateResult(
            self.request.request_id, finish_reason=reason, cached_tokens=self.cached_tokens, **columns
        ).packed()


class RowTable:
    """Per-row state; rows 0..count-1 are running, and removing a row moves the last one into its place.

    ``tokens``: [rows, context] prompt and response; ``log_probs``: the same shape, filled in for the response only.
    """

    def __init__(self, max_rows: int, max_context_len: int, vocab_size: int, device: torch.device) -> None:
        self.sequences: list[Running] = []
        self.state = np.zeros(max_rows, ROW)
        self.tokens = np.zeros((max_rows, max_context_len), np.int64)
        self.log_probs = np.zeros((max_rows, max_context_len), np.float32)
        self.stop_ids = np.full((max_rows, 4), -1, np.int64)
        self._row_ids = np.arange(max_rows)
        self._vocab_size, self._device = vocab_size, device
        self._sampling: SamplingBatch | None = None

    def __len__(self) -> int:
        return len(self.sequences)

    def add(self, sequence: Running) -> None:
        """Start a row for ``sequence``."""
        request, params = sequence.request, sequence.request.params
        row, length = len(self.sequences), len(request.input_ids)
        self.sequences.append(sequence)
        self.state[row] = (
            length,
            length,
            length + params.max_new_tokens,
            length + params.min_new_tokens,
            stream_of(sequence.seed),
            request.position - length,
            params.temperature,
            params.top_p,
            params.top_k,
            bool(params.stop),
        )
        self.tokens[row, :length] = request.input_ids
        if (extra := len(sequence.stop_ids) - self.stop_ids.shape[1]) > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, extra)), constant_values=-1)
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(sequence.stop_ids)] = sequence.stop_ids
        self._sampling = None

    def remove(self, row: int, reason: FinishReason) -> None:
        """Deliver the row's result and move the last row into its place; the caller moves its cache."""
        sequence = self.sequences[row]
        length, start = int(self.state["length"][row]), int(self.state["start"][row])
        tokens, log_probs = self.tokens[row, start:length], self.log_probs[row, start:length]
        sequence.future.set_result(sequence.result(tokens, log_probs, reason))
        last = len(self.sequences) - 1
        if row != last:
            used = int(self.state["length"][last])
            self.state[row] = self.state[last]
            self.tokens[row, :used] = self.tokens[last, :used]
            self.log_probs[row, :used] = self.log_probs[last, :used]
            self.stop_ids[row] = self.stop_ids[last]
            self.sequences[row] = self.sequences[last]
        self.sequences.pop()
        self._sampling = None

    def last_tokens(self) -> np.ndarray:
        """[rows] the last token of each row, which the next step feeds to the model."""
        rows = len(self)
        return self.tokens[self._row_ids[:rows], self.state["length"][:rows] - 1]

    def append(self, tokens: np.ndarray, log_probs: np.ndarray) -> None:
        """Add one generated token to every row."""
        rows = len(self)
        lengths = self.state["length"][:rows]
        self.tokens[self._row_ids[:rows], lengths] = tokens
        self.log_probs[self._row_ids[:rows], lengths] = log_probs
        lengths += 1

    def sampling(self) -> SamplingBatch:
        """How to sample the rows; recomputed only after a row is added or removed."""
        if self._sampling is None:
            state = self.state[: len(self)]
            columns = (state["temperature"], state["top_p"], state["top_k"])
            self._sampling = SamplingBatch.build(*columns, self._vocab_size, self._device)
        return self._sampling

    def banned(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(rows, tokens): stop ids of rows that have not reached min_new_tokens; None if there are none."""
        state = self.state[: len(self)]
        early = state["length"] < state["min_length"]
        if not early.any():
            return None
        rows, columns = np.nonzero((self.stop_ids[: len(self)] >= 0) & early[:, None])
        tokens = self.stop_ids[rows, columns]
        return torch.from_numpy(rows).to(self._device), torch.from_numpy(tokens).to(self._device)

    def stopped(self, tokens: np.ndarray) -> np.ndarray:
        """[rows] bool: the new token is a stop id of the row; `banned` prevents that before min_new_tokens."""
        return (tokens[:, None] == self.stop_ids[: len(self)]).any(1)


# most padded prompt tokens in one prefill call, which bounds the memory of its activations and mask
PREFILL_TOKENS = 1024
NOT_FINITE = "the model's logits are not finite: its weights (or the last ones sent) hold inf or NaN"
# (row, first token, end): a range of tokens whose keys and values are to be computed
Piece = tuple[int, int, int]
# most logits that scoring holds at a time
SCORE_ELEMENTS = 2**24


@dataclass(slots=True)
class Scoring:
    """A waiting `Engine.score` call: the log-probs of ``tokens[start:]`` are wanted."""

    tokens: list[int]
    start: int
    temperature: float
    future: Future[list[float]] = field(default_factory=Future)


class Scheduler:
    """Runs sequences in submission order, at most ``max_rows`` at a time and as many as the cache holds.

    A row's last token is never in the cache: prefill covers the tokens before it, and the next decoding step feeds
    it. So a new prompt, a copied prompt, a continued response and a recomputed row all need the same decoding step.
    """

    def __init__(
        self,
        decoder: Decoder,
        new_cache: Callable[[], KVCache],
        max_rows: int,
        max_context_len: int,
        decode: Decode | None,
    ) -> None:
        device = decoder.weights.embed.device
        self.rows = RowTable(max_rows, max_context_len, decoder.weights.shape.vocab_size, device)
        self.waiting: deque[Running] = deque()
        self.scoring: deque[Scoring] = deque()
        self.weight_version = 0
        self._cache: KVCache | None = new_cache()
        self._new_cache = new_cache
        self._decoder, self._decode, self._device = decoder, decode, device
        self._max_rows = max_rows
        # True: the running rows must be prefilled again, after a weight update or a release of the cache
        self._stale = False

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self.waiting or self.rows.sequences or self.scoring)

    def request_ids(self) -> set[str]:
        """Ids of all running and waiting requests."""
        return {sequence.request.request_id for sequence in (*self.rows.sequences, *self.waiting)}

    def set_weight_version(self, version: int) -> None:
        """Note that the weights have changed: new tokens carry ``version``, and running rows are prefilled again."""
        self.weight_version = version
        self._stale = True
        generated = self.rows.state["length"] - self.rows.state["start"]
        for row, sequence in enumerate(self.rows.sequences):
            sequence.versions.append((int(generated[row]), version))

    def release_cache(self) -> None:
        """Free the cache; running rows keep their tokens and wait for `allocate_cache`."""
        self._cache = None
        self._stale = True

    def allocate_cache(self) -> None:
        """Allocate an empty cache if there is none; the next step prefills the running rows again."""
        self._cache = self._cache or self._new_cache()

    def step(self) -> None:
        """Score one waiting sequence, admit the requests that fit, then decode one token for every row."""
        cache = self._cache
        assert cache is not None, "no step while the cache is released"
        if self.scoring:
            scoring = self.scoring.popleft()
            try:
                scoring.future.set_result(self._score(scoring))
            except Exception as error:  # scoring changes no row, so the requests go on
                scoring.future.set_exception(error)
        if self._stale and self.rows.sequences:
            cache.set_row_len(round_up(max(s.need for s in self.rows.sequences)), self._cached_lengths()[:0])
            self._fill(cache, 0)
        self._stale = False
        self._admit(cache)
        if self.rows.sequences:
            self._decode_step(cache)

    def abort(self, request_ids: Collection[str] | None) -> None:
        """End these sequences (all, if None); each returns the tokens it has so far."""

        def meant(sequence: Running) -> bool:
            return request_ids is None or sequence.request.request_id in request_ids

        for row in reversed(range(len(self.rows))):
            if meant(self.rows.sequences[row]):
                self._remove(row, "abort")
        stay = deque(sequence for sequence in self.waiting if not meant(sequence))
        for sequence in self.waiting:
            if meant(sequence):
                sequence.future.set_result(sequence.result(np.zeros(0, np.int64), np.zeros(0, np.float32), "abort"))
        self.waiting = stay

    def fail(self, error: Exception) -> None:
        """Pass ``error`` to every caller and drop all requests, so that the engine can serve new ones."""
        for sequence in (*self.rows.sequences, *self.waiting):
            sequence.future.set_exception(error)
        for scoring in self.scoring:
            scoring.future.set_exception(error)
        self.rows.sequences.clear()
        self.waiting.clear()
        self.scoring.clear()
        if self._cache is not None:
            # the old cache may hold NaN, and a masked NaN still makes the attention output NaN
            self.release_cache()
            self.allocate_cache()

    def _cached_lengths(self) -> np.ndarray:
        return self.rows.state["length"][: len(self.rows)] - 1

    def _admit(self, cache: KVCache) -> None:
        """Start waiting sequences, first come first served, while a row and its cache positions are free."""
        first = len(self.rows)
        row_len = cache.row_len if first else 0
        while self.waiting and len(self.rows) < self._max_rows:
            longer = max(row_len, round_up(self.waiting[0].need))
            if not cache.fits(len(self.rows) + 1, longer):
                break
            row_len = longer
            sequence = self.waiting.popleft()
            sequence.versions.append((0, self.weight_version))
            self.rows.add(sequence)
        if len(self.rows) > first:
            cache.set_row_len(row_len, self._cached_lengths()[:first])
            self._fill(cache, first)

    def _fill(self, cache: KVCache, first: int) -> None:
        """Prefill rows ``first`` and up; a prompt that several rows share is computed once and copied."""
        lengths = self._cached_lengths()
        sequences = self.rows.sequences
        leaders: dict[str | None, int] = {}
        leading: list[Piece] = []
        following: list[Piece] = []
        for row, sequence in enumerate(sequences):
            key = sequence.request.prefix_key
            leader = row if key is None else leaders.setdefault(key, row)
            if row < first:
                continue
            if leader == row or not sequence.shares_prompt(sequences[leader]):
                leading.append((row, 0, int(lengths[row])))
            else:
                # the last prompt token of a new leader is not cached yet, so one token less can be copied
                following.append((row, sequence.prompt_length - 1, int(lengths[row])))
                sequence.cached_tokens = sequence.prompt_length - 1
        self._prefill(cache, leading)
        for row, shared, _ in following:
            cache.copy(leaders[sequences[row].request.prefix_key], row, shared)
        self._prefill(cache, following)

    def _prefill(self, cache: KVCache, pieces: list[Piece]) -> None:
        """Compute keys and values of ``pieces`` in batches of at most `PREFILL_TOKENS` tokens, padding included."""
        batch: list[Piece] = []
        for row, start, end in sorted(pieces, key=lambda piece: piece[1] - piece[2]):
            while end - start > PREFILL_TOKENS:
                self._prefill_batch(cache, [(row, start, start + PREFILL_TOKENS)])
                start += PREFILL_TOKENS
            widest = max((e - s for _, s, e in batch), default=0)
            if (len(batch) + 1) * max(widest, end - start) > PREFILL_TOKENS:
                self._prefill_batch(cache, batch)
                batch = []
            if end > start:
                batch.append((row, start, end))
        if batch:
            self._prefill_batch(cache, batch)

    def _prefill_batch(self, cache: KVCache, batch: list[Piece]) -> None:
        rows, starts, ends = np.array(batch, np.int64).T
        tokens = np.concatenate([self.rows.tokens[row, start:end] for row, start, end in batch])
        plan = PrefillPlan(cache, rows, starts, ends - starts)
        self._decoder.forward(torch.from_numpy(tokens).to(self._device), plan, cache_only=True)

    def _score(self, scoring: Scoring) -> list[float]:
        tokens = torch.tensor(scoring.tokens, device=self._device)
        hidden = self._decoder.forward(tokens, ScorePlan(len(tokens), self._device))[scoring.start - 1 : -1]
        rows = max(1, SCORE_ELEMENTS // len(self._decoder.weights.head))
        found: list[float] = []
        for states, targets in zip(hidden.split(rows), tokens[scoring.start :].split(rows), strict=True):
            log_probs = (self._decoder.logits(states) / scoring.temperature).log_softmax(-1)
            found += log_probs.gather(-1, targets[:, None])[:, 0].tolist()
        if not np.isfinite(found).all():
            raise RuntimeError(NOT_FINITE)
        return found

    def _decode_step(self, cache: KVCache) -> None:
        rows = self.rows
        state = rows.state[: len(rows)]
        lengths = state["length"]
        fed = torch.from_numpy(rows.last_tokens()).to(self._device)
        hidden = self._decoder.forward(fed, DecodePlan(cache, lengths - 1))
        uniform = uniforms(state["stream"], lengths + state["stream_shift"])
        sampled, sampled_log_probs = sample(
            self._decoder.logits(hidden), rows.sampling(), torch.from_numpy(uniform).to(self._device), rows.banned()
        )
        tokens, log_probs = sampled.cpu().numpy(), sampled_log_probs.cpu().numpy()
        if not np.isfinite(log_probs).all():
            raise RuntimeError(NOT_FINITE)
        rows.append(tokens, log_probs)
        stopped = rows.stopped(tokens)
        for row in np.flatnonzero(state["has_stop_strings"] & ~stopped):
            stopped[row] = self._completes_stop_string(int(row))
        for row in np.flatnonzero(stopped | (lengths >= state["limit"]))[::-1]:
            self._remove(int(row), "stop" if stopped[row] else "length")

    def _completes_stop_string(self, row: int) -> bool:
        """Whether the end of the response, including tokens from before a continuation, holds a stop string."""
        params, state = self.rows.sequences[row].request.params, self.rows.state[row]
        length = int(state["length"])
        if length < state["min_length"]:
            return False
        assert self._decode is not None, "the engine takes no stop strings without a decode function"
        prompt = self.rows.sequences[row].prompt_length
        return holds_stop(self._decode, self.rows.tokens[row, prompt:length], params.stop)

    def _remove(self, row: int, reason: FinishReason) -> None:
        """End a row and move the last row into its place, in the cache too."""
        last = len(self.rows) - 1
        length = int(self._cached_lengths()[last])
        self.rows.remove(row, reason)
        if row != last and self._cache is not None and not self._stale:
            self._cache.copy(last, row, length)
