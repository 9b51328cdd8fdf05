"""The scheduler's record of each request, and the table of the rows that decode."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch

from slimelite.engines.embedded.grammars import Held
from slimelite.engines.embedded.memory import Place
from slimelite.engines.embedded.prefixes import Node
from slimelite.engines.embedded.sampler import SHAPE, SamplingBatch, stream_of
from slimelite.engines.protocol import FinishReason, GenerateRequest, GenerateResult
from slimelite.samples.sample import Kept

ROW = np.dtype(
    [
        ("length", np.int64),  # tokens so far; the last token is not in the KV cache yet
        ("start", np.int64),  # number of input_ids
        ("limit", np.int64),  # length at which max_new_tokens is reached
        ("min_length", np.int64),  # length below which stop ids are not drawn
        ("base", np.int64),  # tokens before the row's first token in its slab
        ("room", np.int64),  # tokens that fit into the row's place in its slab
        ("stream", np.uint64),  # start of the row's random stream
        ("stream_shift", np.int64),  # length + stream_shift = position in the random stream
        ("shape", SHAPE),
        ("has_stop_strings", np.bool_),
        ("changes", np.bool_),  # whether the row's logits are changed before a token is drawn
    ]
)


class Fill:
    """An unfinished prefill. ``kv`` has room for the keys and values of tokens [start, end). The keys and values before
    position ``done`` are computed.

    ``ended``: True if the prefill is finished, or if its request has ended. ``step``: the scheduler's step that
    computed the last token of the prefill.
    """

    __slots__ = ("done", "end", "ended", "key", "kv", "start", "step")

    def __init__(self, key: object, kv: torch.Tensor, start: int, end: int) -> None:
        self.key, self.kv, self.start, self.end = key, kv, start, end
        self.done, self.ended, self.step = start, False, -1


@dataclass(slots=True, eq=False)
class Running:
    """A waiting, filling or decoding request.

    ``tokens``: prompt and generated tokens. ``log_probs``: the log-probs of the generated tokens. Both are set only
    while the request is not a row of the table. ``kept``: the ids that each generated token was drawn from, if the
    request asks for them. ``versions``: (index of a generated token, weight version from that token on). ``leaf``: the
    last node of the request's prefix in the prefix tree. ``fill``: the request's prefill. ``behind``: the prefill of
    another request that begins with the same tokens; this request waits for that prefill. ``place``: the place of the
    keys and values from token ``place.base`` on. The keys and values of earlier tokens are in nodes of the prefix tree.
    """

    request: GenerateRequest
    seed: int
    stop_ids: tuple[int, ...]
    tokens: np.ndarray
    future: Future[GenerateResult] = field(default_factory=Future)
    log_probs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    kept: list[np.ndarray] = field(default_factory=list)
    guide: Held | None = None
    constrained: list[bool] = field(default_factory=list)
    error: ValueError | None = None
    versions: list[tuple[int, int]] = field(default_factory=list)
    cached_tokens: int | None = None
    leaf: Node | None = None
    fill: Fill | None = None
    behind: Fill | None = None
    place: Place = field(default_factory=Place)

    @property
    def remaining(self) -> int:
        """The number of further tokens that the response may have."""
        return self.request.params.max_new_tokens - len(self.log_probs)

    def deliver(self, reason: FinishReason) -> None:
        """Give the caller the result. The result is the error, or the tokens, log-probs, versions and finish
        ``reason``."""
        if self.error is not None:
            self.future.set_exception(self.error)
            return
        starts = np.array([start for start, _ in self.versions], np.int64)
        counts = np.diff(starts, append=len(self.log_probs))
        versions = np.repeat([version for _, version in self.versions], counts)
        tokens = self.tokens[len(self.request.input_ids) :]
        columns = tokens, self.log_probs, versions
        kept = Kept.of(self.kept) if self.kept else None
        constrained = np.array(self.constrained, np.bool_) if self.constrained else None
        result = GenerateResult(self.request.request_id, *columns, reason, self.cached_tokens or 0, kept, constrained)
        self.future.set_result(result.packed())


class RowTable:
    """The state of all rows. Rows 0 to count-1 are decoding; the rest of the table is unused. When a row is removed,
    the last row moves into its place.

    ``tokens``: [rows, width] prompt and response of each row. ``log_probs``: [rows, width], with values only for
    response tokens. The width is at least the length of the longest row.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.sequences: list[Running] = []
        self.state = np.zeros(max_rows, ROW)
        self.tokens = np.zeros((max_rows, 256), np.int64)
        self.log_probs = np.zeros((max_rows, 256), np.float32)
        self.stop_ids = np.full((max_rows, 4), -1, np.int64)
        self._row_ids = np.arange(max_rows)
        self._vocab_size, self._device = vocab_size, device
        self._sampling: SamplingBatch | None = None

    def __len__(self) -> int:
        return len(self.sequences)

    def add(self, sequence: Running, room: int = 0) -> None:
        """Start or continue a row for ``sequence``. ``room``: the number of tokens that fit into the row's place in its
        slab."""
        request, params = sequence.request, sequence.request.params
        row, length, start = len(self.sequences), len(sequence.tokens), len(request.input_ids)
        self.sequences.append(sequence)
        self.state[row] = (
            length,
            start,
            start + params.max_new_tokens,
            start + params.min_new_tokens,
            sequence.place.base,
            room,
            stream_of(sequence.seed),
            request.position - start,
            (params.temperature, params.top_p, params.top_k, params.min_p, params.kept, sequence.guide is not None),
            bool(params.stop),
            sequence.guide is not None or bool(params.shifts()),
        )
        self._widen(length)
        self.tokens[row, :length] = sequence.tokens
        self.log_probs[row, start:length] = sequence.log_probs
        if (extra := len(sequence.stop_ids) - self.stop_ids.shape[1]) > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, extra)), constant_values=-1)
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(sequence.stop_ids)] = sequence.stop_ids
        self._sampling = None

    def remove(self, row: int) -> Running:
        """Remove a row, and return its sequence with all tokens. The last row moves into the free place."""
        sequence = self.sequences[row]
        length, start = int(self.state["length"][row]), int(self.state["start"][row])
        sequence.tokens = self.tokens[row, :length].copy()
        sequence.log_probs = self.log_probs[row, start:length].copy()
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
        return sequence

    def last_tokens(self) -> np.ndarray:
        """The last token of each row [rows], which is the model's input in the next step."""
        rows = len(self)
        return self.tokens[self._row_ids[:rows], self.state["length"][:rows] - 1]

    def append(self, tokens: np.ndarray, log_probs: np.ndarray) -> None:
        """Add one generated token to every row."""
        rows = len(self)
        lengths = self.state["length"][:rows]
        self._widen(int(lengths.max()) + 1)
        self.tokens[self._row_ids[:rows], lengths] = tokens
        self.log_probs[self._row_ids[:rows], lengths] = log_probs
        lengths += 1

    def sampling(self) -> SamplingBatch:
        """The sampling parameters of all rows. The result is recomputed only after a row is added or removed."""
        if self._sampling is None:
            self._sampling = SamplingBatch.build(self.state["shape"][: len(self)], self._vocab_size, self._device)
        return self._sampling

    def changing(self) -> np.ndarray:
        """The rows whose logits are changed before a token is drawn, for example because a grammar limits their tokens,
        or because they have not reached min_new_tokens."""
        state = self.state[: len(self)]
        return np.flatnonzero(state["changes"] | (state["length"] < state["min_length"]))

    def stopped(self, tokens: np.ndarray) -> np.ndarray:
        """Whether the new token of each row is one of its stop ids, [rows] bool. `changes.changed` prevents stop ids
        before min_new_tokens."""
        return (tokens[:, None] == self.stop_ids[: len(self)]).any(1)

    def _widen(self, length: int) -> None:
        if (extra := length - self.tokens.shape[1]) > 0:
            extra = max(extra, self.tokens.shape[1])
            self.tokens = np.pad(self.tokens, ((0, 0), (0, extra)))
            self.log_probs = np.pad(self.log_probs, ((0, 0), (0, extra)))
