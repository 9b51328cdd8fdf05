"""The running sequences, one row each, in arrays, so that a decoding step costs no Python per row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from slimelite.engines.embedded.sampler import SamplingBatch, stream_of
from slimelite.engines.protocol import FinishReason, GenerateRequest, GenerateResult

ROW = np.dtype(
    [
        ("length", np.int64),  # tokens so far; the last one is not in the KV cache yet
        ("start", np.int64),  # tokens of input_ids
        ("limit", np.int64),  # length at which max_new_tokens is reached
        ("min_length", np.int64),  # length below which stop ids are not drawn
        ("stream", np.uint64),  # of random numbers
        ("stream_shift", np.int64),  # position in the stream minus length
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("top_k", np.int64),
        ("has_stop_strings", np.bool_),
    ]
)


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way through the engine. ``versions``: (first generated token, weight version from there on)."""

    request: GenerateRequest
    seed: int
    stop_ids: tuple[int, ...]
    deliver: Callable[[GenerateResult], None]
    fail: Callable[[Exception], None]
    versions: list[tuple[int, int]] = field(default_factory=list)
    cached_tokens: int = 0

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt proper, without the part of a response in ``input_ids``."""
        return len(self.request.input_ids) - self.request.position

    @property
    def need(self) -> int:
        """Cache positions it may come to use."""
        return len(self.request.input_ids) + self.request.params.max_new_tokens

    def shares_prompt(self, other: Sequence) -> bool:
        """Whether both start with the same prompt."""
        mine = self.request.input_ids[: self.prompt_length]
        return mine == other.request.input_ids[: other.prompt_length]

    def result(self, tokens: np.ndarray, log_probs: np.ndarray, reason: FinishReason) -> GenerateResult:
        """What the caller gets for these generated tokens."""
        starts = np.array([start for start, _ in self.versions], np.int64)
        counts = np.diff(starts, append=len(tokens))
        versions = np.repeat([version for _, version in self.versions], counts)
        return GenerateResult(
            request_id=self.request.request_id,
            output_ids=tokens.tolist(),
            log_probs=log_probs.tolist(),
            weight_versions=versions.tolist(),
            finish_reason=reason,
            cached_tokens=self.cached_tokens,
        )


class RowTable:
    """Rows 0..count-1 are running; removing one moves the last row into the hole.

    ``tokens``: [rows, context] prompt and response; ``log_probs``: the same places, written for the response only.
    """

    def __init__(self, max_rows: int, max_context_len: int, vocab_size: int, device: torch.device) -> None:
        self.sequences: list[Sequence] = []
        self.state = np.zeros(max_rows, ROW)
        self.tokens = np.zeros((max_rows, max_context_len), np.int64)
        self.log_probs = np.zeros((max_rows, max_context_len), np.float32)
        self.stop_ids = np.full((max_rows, 4), -1, np.int64)
        self._row_ids = np.arange(max_rows)
        self._vocab_size, self._device = vocab_size, device
        self._sampling: SamplingBatch | None = None

    def __len__(self) -> int:
        return len(self.sequences)

    def add(self, sequence: Sequence) -> int:
        """Start a row for ``sequence`` and return its index."""
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
        return row

    def remove(self, row: int, reason: FinishReason) -> Sequence:
        """Deliver the row's result and move the last row into its place (the cache must follow)."""
        sequence = self.sequences[row]
        length, start = int(self.state["length"][row]), int(self.state["start"][row])
        tokens, log_probs = self.tokens[row, start:length], self.log_probs[row, start:length]
        sequence.deliver(sequence.result(tokens, log_probs, reason))
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
        """[rows] the token to feed next."""
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
        """How to sample the rows, kept until a row comes or goes."""
        if self._sampling is None:
            state = self.state[: len(self)]
            columns = (state["temperature"], state["top_p"], state["top_k"])
            self._sampling = SamplingBatch.build(*columns, self._vocab_size, self._device)
        return self._sampling

    def banned(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(rows, tokens) that may not be drawn yet, because of min_new_tokens."""
        state = self.state[: len(self)]
        early = state["length"] < state["min_length"]
        if not early.any():
            return None
        rows, columns = np.nonzero((self.stop_ids[: len(self)] >= 0) & early[:, None])
        tokens = self.stop_ids[rows, columns]
        return torch.from_numpy(rows).to(self._device), torch.from_numpy(tokens).to(self._device)

    def stopped(self, tokens: np.ndarray) -> np.ndarray:
        """[rows] bool: the token just added is one of the row's stop ids, and min_new_tokens is reached."""
        return (tokens[:, None] == self.stop_ids[: len(self)]).any(1)
