"""Keys and values of all running sequences in one preallocated pool, a row a sequence."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from slimelite.engines.embedded.weights import DecoderShape

# attention lengths are rounded up to it, for the alignment of the mask and to reuse allocations
LENGTH_BUCKET = 16


def round_up(length: int) -> int:
    """The next multiple of `LENGTH_BUCKET`."""
    return -(-length // LENGTH_BUCKET) * LENGTH_BUCKET


class AttentionPlan:
    """Where a packed batch of tokens writes its keys and values, and what each token attends to.

    ``positions``: [T] of the packed tokens in their sequences. The queries are padded to
    [rows, C] for attention (C: the largest number of tokens of one row), C = 1 needs none.
    """

    def __init__(self, cache: KVCache, rows: np.ndarray | None, starts: np.ndarray, counts: np.ndarray | None) -> None:
        """``counts[i]`` tokens (None: one each) of row ``rows[i]`` (None: row i), from position ``starts[i]``."""
        device = cache.pool.device
        self._cache = cache
        self.rows = slice(0, len(starts)) if rows is None else torch.from_numpy(rows).to(device)
        row_ids = np.arange(len(starts)) if rows is None else rows
        if counts is None:
            width, positions, last = 1, starts, starts
            self._pad = self._unpad = None
        else:
            width, last = int(counts.max()), starts + counts - 1
            real = np.arange(width) < counts[:, None]
            positions = (starts[:, None] + np.arange(width))[real]
            row_ids = np.repeat(row_ids, counts)
            unpad = np.flatnonzero(real)
            pad = np.zeros(real.size, np.int64)
            pad[unpad] = np.arange(len(unpad))
            self._pad, self._unpad = torch.from_numpy(pad).to(device), torch.from_numpy(unpad).to(device)
        self._length = round_up(int(last.max()) + 1)
        self._slots = torch.from_numpy(cache.slots(row_ids, positions)).to(device)
        self.positions = torch.from_numpy(positions).to(device)
        self._mask = self._causal_mask(torch.from_numpy(starts).to(device), width)

    def _causal_mask(self, starts: torch.Tensor, width: int) -> torch.Tensor:
        """[rows, 1, width * heads per kv head, length], additive."""
        cache = self._cache
        last = starts[:, None, None] if width == 1 else (starts[:, None] + cache.columns[:width])[:, :, None]
        mask = torch.where(cache.columns[: self._length] <= last, cache.zero, cache.minus_inf)
        if width > 1:
            mask = mask.repeat_interleave(cache.heads_per_kv, dim=1)
        return mask.unsqueeze(1)

    def write(self, layer: int, key_value: torch.Tensor) -> None:
        """Store ``key_value`` [T, 2 * kv heads, head dim]."""
        self._cache.pool[layer].index_copy_(0, self._slots, key_value.flatten(0, 1))

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Attention of ``query`` [T, heads, head dim] over what was written so far: [T, heads * head dim]."""
        keys, values = self._cache.rows_of(layer, self.rows, self._length)
        tokens, heads, head_dim = query.shape
        kv_heads = keys.shape[1]
        # the query heads that share a kv head become further queries of it: no copy of keys and values
        if self._pad is None:
            out = F.scaled_dot_product_attention(query.view(tokens, kv_heads, -1, head_dim), keys, values, self._mask)
            return out.reshape(tokens, -1)
        rows = len(keys)
        padded = query[self._pad].view(rows, -1, kv_heads, heads // kv_heads, head_dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(padded.flatten(2, 3), keys, values, self._mask)
        out = out.view(rows, kv_heads, -1, heads // kv_heads, head_dim).transpose(1, 2)
        return out.reshape(-1, heads * head_dim)[self._unpad]


class KVCache:
    """A pool of ``tokens`` positions a layer, cut into rows of ``row_len``.

    ``row_len`` follows the longest running sequence, so that a short context leaves room for more rows.
    ``pool``: [layers, 2 * tokens * kv heads, head dim], keys in the first half and values in the second, each as
    [rows, kv heads, row_len]: what one head of one sequence attends to is contiguous.
    """

    def __init__(self, shape: DecoderShape, tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        self.tokens = tokens
        self.row_len = 0
        self.heads_per_kv = shape.num_heads // shape.num_kv_heads
        self._kv_heads = shape.num_kv_heads
        size = (shape.num_layers, 2 * tokens * shape.num_kv_heads, shape.head_dim)
        # finite everywhere: masked positions have weight 0, and 0 * NaN is NaN
        if device.type == "cpu":
            # numpy's zeros take memory when they are first written; torch's take it at once
            elements = int(np.prod(size))
            self.pool = torch.from_numpy(np.zeros(elements * dtype.itemsize, np.uint8)).view(dtype).view(size)
        else:
            self.pool = torch.zeros(size, device=device, dtype=dtype)
        self.columns = torch.arange(tokens, device=device)
        self.zero = torch.zeros((), device=device, dtype=dtype)
        self.minus_inf = torch.full((), -torch.inf, device=device, dtype=dtype)
        # [layers, 2, rows, kv heads, row_len, head dim]
        self._rows = self.pool.new_empty(0)

    def fits(self, rows: int, row_len: int) -> bool:
        """Whether ``rows`` rows of ``row_len`` positions (a multiple of `LENGTH_BUCKET`) fit the pool."""
        return rows * row_len <= self.tokens

    def set_row_len(self, row_len: int, lengths: np.ndarray) -> None:
        """Cut the pool into rows of ``row_len`` and move the first ``lengths[i]`` positions of row i there."""
        assert row_len >= self.row_len or not len(lengths), "rows with content never shrink"
        if row_len == self.row_len:
            return
        old, heads, head_dim = self._rows, self._kv_heads, self.pool.shape[-1]
        rows = self.tokens // row_len
        halves = self.pool.view(len(self.pool), 2, -1, head_dim)[:, :, : rows * heads * row_len]
        self.row_len, self._rows = row_len, halves.unflatten(2, (rows, heads, row_len))
        for row in reversed(range(len(lengths))):  # a row moves to where only rows above it were
            length = int(lengths[row])
            self._rows[:, :, row, :, :length] = old[:, :, row, :, :length].clone()

    def slots(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Where in the pool the keys and values at ``positions`` of ``rows`` lie: flat [T, 2 * kv heads]."""
        heads = np.arange(self._kv_heads)
        keys = (rows[:, None] * self._kv_heads + heads) * self.row_len + positions[:, None]
        return np.concatenate((keys, keys + self.tokens * self._kv_heads), axis=1).ravel()

    def rows_of(self, layer: int, rows: slice | torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [rows, kv heads, length, head dim]; a view where ``rows`` is a slice."""
        keys, values = self._rows[layer, :, :, :, :length]
        return keys[rows], values[rows]

    def copy(self, source: int, destination: int, length: int) -> None:
        """Copy the first ``length`` positions of a row over another's."""
        self._rows[:, :, destination, :, :length] = self._rows[:, :, source, :, :length]
