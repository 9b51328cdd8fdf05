"""The KV cache of all running sequences, and plans for how a batch of packed tokens writes to it and attends to it."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F

from slimelite.engines.embedded.model import DecoderShape

# attention lengths are rounded up to a multiple of this, which aligns masks and lets the allocator reuse memory
LENGTH_BUCKET = 16


def round_up(length: int) -> int:
    """``length`` rounded up to a multiple of `LENGTH_BUCKET`."""
    return -(-length // LENGTH_BUCKET) * LENGTH_BUCKET


class KVCache:
    """A pool of ``tokens`` positions per layer, cut into rows of ``row_len``; each running sequence has one row.

    ``row_len`` follows the longest running sequence, so that short sequences leave room for more rows.
    ``pool``: [layers, 2 * tokens * kv heads, head dim], keys in the first half and values in the second. Each half is
    laid out as [rows, kv heads, row_len], so that the keys of one head of one sequence are contiguous.
    """

    def __init__(self, shape: DecoderShape, tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        self.tokens = tokens
        self.row_len = 0
        self.kv_heads = shape.num_kv_heads
        self.heads_per_kv = shape.num_heads // shape.num_kv_heads
        size = (shape.num_layers, 2 * tokens * shape.num_kv_heads, shape.head_dim)
        # zeros, because unwritten positions must be finite: their attention weight is 0, and 0 * NaN is NaN
        if device.type == "cpu":
            # numpy's zeros commit memory only when it is written; torch.zeros commits all of it at once
            self.pool = torch.from_numpy(np.zeros(math.prod(size) * dtype.itemsize, np.uint8)).view(dtype).view(size)
        else:
            self.pool = torch.zeros(size, device=device, dtype=dtype)
        # [layers, 2, rows, kv heads, row_len, head dim]
        self._rows = self.pool.new_empty(0)

    def fits(self, rows: int, row_len: int) -> bool:
        """Whether ``rows`` rows of ``row_len`` positions fit the pool."""
        return rows * row_len <= self.tokens

    def set_row_len(self, row_len: int, lengths: np.ndarray) -> None:
        """Cut the pool into rows of ``row_len``; row i keeps the content of its first ``lengths[i]`` positions."""
        assert row_len >= self.row_len or not len(lengths), "rows with content never shrink"
        if row_len == self.row_len:
            return
        old, rows, elements = self._rows, self.tokens // row_len, self.kv_heads * row_len
        halves = self.pool.unflatten(1, (2, -1))[:, :, : rows * elements]
        self.row_len, self._rows = row_len, halves.unflatten(2, (rows, self.kv_heads, row_len))
        for row in reversed(range(len(lengths))):  # a new place overlaps only rows that have moved
            length = int(lengths[row])
            self._rows[:, :, row, :, :length] = old[:, :, row, :, :length].clone()

    def slots(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Indices into a pool layer for ``positions`` [T] of ``rows`` [T]: [T * 2 * kv heads], keys, then values."""
        heads = np.arange(self.kv_heads)
        keys = (rows[:, None] * self.kv_heads + heads) * self.row_len + positions[:, None]
        return np.concatenate((keys, keys + self.tokens * self.kv_heads), axis=1).ravel()

    def rows_of(self, layer: int, rows: slice | torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of ``rows`` [rows, kv heads, length, head dim]; they are views when ``rows`` is a slice."""
        keys, values = self._rows[layer, :, :, :, :length]
        return keys[rows], values[rows]

    def copy(self, source: int, destination: int, length: int) -> None:
        """Copy the first ``length`` positions of a row over another's."""
        self._rows[:, :, destination, :, :length] = self._rows[:, :, source, :, :length]


class DecodePlan:
    """Plan of a decoding step: one token for each of rows 0..n-1, at ``positions`` [n]."""

    def __init__(self, cache: KVCache, positions: np.ndarray) -> None:
        device, rows = cache.pool.device, len(positions)
        self._cache, self._rows, self._length = cache, slice(0, rows), round_up(int(positions.max()) + 1)
        self._slots = torch.from_numpy(cache.slots(np.arange(rows), positions)).to(device)
        self.positions = torch.from_numpy(positions).to(device)
        mask = _mask(self.positions[:, None], self._length, cache.pool.dtype)
        self._exact = cache.pool.dtype == torch.float32
        self._mask = mask.repeat_interleave(cache.kv_heads, 0) if self._exact else mask.unsqueeze(1)

    def write(self, layer: int, key_value: torch.Tensor) -> None:
        self._cache.pool[layer].index_copy_(0, self._slots, key_value.flatten(0, 1))

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        keys, values = self._cache.rows_of(layer, self._rows, self._length)
        rows, kv_heads, _, head_dim = keys.shape
        # query heads that share a kv head become several queries of that head, so that the cache is not copied
        if not self._exact:
            grouped = query.view(rows, kv_heads, -1, head_dim)
            return F.scaled_dot_product_attention(grouped, keys, values, self._mask).reshape(rows, -1)
        # in fp32 this is up to twice as fast on a CPU at these sizes; lower precisions would round the scores
        grouped = query.reshape(rows * kv_heads, -1, head_dim)
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        scores = torch.baddbmm(self._mask, grouped, keys.transpose(1, 2), alpha=head_dim**-0.5)
        return torch.bmm(scores.softmax(-1), values).view(rows, -1)


class PrefillPlan:
    """Plan of a prefill: ``counts[i]`` tokens of row ``rows[i]`` from position ``starts[i]`` on, packed row after row.

    ``positions``: [T]. Only attention pads the queries, to [rows, largest count].
    """

    def __init__(self, cache: KVCache, rows: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
        device, width = cache.pool.device, int(counts.max())
        real = np.arange(width) < counts[:, None]
        padded_positions = starts[:, None] + np.arange(width)
        positions = padded_positions[real]
        unpad = np.flatnonzero(real)
        pad = np.zeros(real.size, np.int64)
        pad[unpad] = np.arange(len(unpad))
        self._cache, self._length = cache, round_up(int(positions.max()) + 1)
        self._rows, self._pad, self._unpad, self._slots, self.positions, last = (
            torch.from_numpy(array).to(device)
            for array in (
                rows,
                pad,
                unpad,
                cache.slots(np.repeat(rows, counts), positions),
                positions,
                padded_positions,
            )
        )
        mask = _mask(last, self._length, cache.pool.dtype)
        self._mask = mask.repeat(1, cache.heads_per_kv, 1).unsqueeze(1)

    def write(self, layer: int, key_value: torch.Tensor) -> None:
        self._cache.pool[layer].index_copy_(0, self._slots, key_value.flatten(0, 1))

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        keys, values = self._cache.rows_of(layer, self._rows, self._length)
        rows, kv_heads, _, head_dim = keys.shape
        shared = query.shape[1] // kv_heads
        padded = query[self._pad].view(rows, -1, kv_heads, shared, head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
        out = F.scaled_dot_product_attention(padded, keys, values, self._mask)
        out = out.view(rows, kv_heads, shared, -1, head_dim).permute(0, 3, 1, 2, 4)
        return out.reshape(-1, query.shape[1] * head_dim)[self._unpad]


class ScorePlan:
    """Plan of a scoring pass over one whole sequence of ``tokens`` tokens; its keys and values are not cached."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        self.positions = torch.arange(tokens, device=device)
        self._keys = self._values = torch.empty(0)

    def write(self, layer: int, key_value: torch.Tensor) -> None:  # noqa: ARG002
        self._keys, self._values = key_value.transpose(0, 1)[None].chunk(2, dim=1)

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        queries = query.transpose(0, 1)[None]
        out = F.scaled_dot_product_attention(queries, self._keys, self._values, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)


def _mask(last: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask [rows, queries, length]; each query sees the columns up to its ``last`` [rows, queries]."""
    hidden = torch.arange(length, device=last.device) > last[..., None]
    return torch.zeros(hidden.shape, dtype=dtype, device=last.device).masked_fill_(hidden, -torch.inf)
