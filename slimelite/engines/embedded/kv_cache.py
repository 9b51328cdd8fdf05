"""Keys and values of all running sequences in one preallocated pool, a row a sequence."""

from __future__ import annotations

import math

import numpy as np
import torch

from slimelite.engines.embedded.weights import DecoderShape

# attention lengths are rounded up to it, for the alignment of masks and to reuse allocations
LENGTH_BUCKET = 16


def round_up(length: int) -> int:
    """The next multiple of `LENGTH_BUCKET`."""
    return -(-length // LENGTH_BUCKET) * LENGTH_BUCKET


class KVCache:
    """A pool of ``tokens`` positions a layer, cut into rows of ``row_len``.

    ``row_len`` follows the longest running sequence, so that a short context leaves room for more rows.
    ``pool``: [layers, 2 * tokens * kv heads, head dim], keys in the first half and values in the second, each as
    [rows, kv heads, row_len]: what one head of one sequence attends to is contiguous.
    """

    def __init__(self, shape: DecoderShape, tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        self.tokens = tokens
        self.row_len = 0
        self.kv_heads = shape.num_kv_heads
        self.heads_per_kv = shape.num_heads // shape.num_kv_heads
        size = (shape.num_layers, 2 * tokens * shape.num_kv_heads, shape.head_dim)
        # finite everywhere: masked positions have weight 0, and 0 * NaN is NaN
        if device.type == "cpu":
            # numpy's zeros take memory when they are first written; torch's take it at once
            self.pool = torch.from_numpy(np.zeros(math.prod(size) * dtype.itemsize, np.uint8)).view(dtype).view(size)
        else:
            self.pool = torch.zeros(size, device=device, dtype=dtype)
        # [layers, 2, rows, kv heads, row_len, head dim]
        self._rows = self.pool.new_empty(0)

    def fits(self, rows: int, row_len: int) -> bool:
        """Whether ``rows`` rows of ``row_len`` positions fit the pool."""
        return rows * row_len <= self.tokens

    def set_row_len(self, row_len: int, lengths: np.ndarray) -> None:
        """Cut the pool into rows of ``row_len`` and move the first ``lengths[i]`` positions of row i there."""
        assert row_len >= self.row_len or not len(lengths), "rows with content never shrink"
        if row_len == self.row_len:
            return
        old, rows, elements = self._rows, self.tokens // row_len, self.kv_heads * row_len
        halves = self.pool.unflatten(1, (2, -1))[:, :, : rows * elements]
        self.row_len, self._rows = row_len, halves.unflatten(2, (rows, self.kv_heads, row_len))
        for row in reversed(range(len(lengths))):  # a row moves to where only rows above it were
            length = int(lengths[row])
            self._rows[:, :, row, :, :length] = old[:, :, row, :, :length].clone()

    def slots(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Where in a layer of the pool ``positions`` [T] of ``rows`` [T] lie: [T * 2 * kv heads], keys, then values."""
        heads = np.arange(self.kv_heads)
        keys = (rows[:, None] * self.kv_heads + heads) * self.row_len + positions[:, None]
        return np.concatenate((keys, keys + self.tokens * self.kv_heads), axis=1).ravel()

    def rows_of(self, layer: int, rows: slice | torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [rows, kv heads, length, head dim]; views where ``rows`` is a slice."""
        keys, values = self._rows[layer, :, :, :, :length]
        return keys[rows], values[rows]

    def copy(self, source: int, destination: int, length: int) -> None:
        """Copy the first ``length`` positions of a row over another's."""
        self._rows[:, :, destination, :, :length] = self._rows[:, :, source, :, :length]
