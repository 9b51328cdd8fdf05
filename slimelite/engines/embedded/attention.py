"""What one batch of packed tokens writes to the cache, and attends to there."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from slimelite.engines.embedded.kv_cache import KVCache, round_up


class DecodePlan:
    """One token for each of rows 0..n-1, at ``positions`` [n]."""

    def __init__(self, cache: KVCache, positions: np.ndarray) -> None:
        device, rows = cache.pool.device, len(positions)
        self._cache, self._rows, self._length = cache, slice(0, rows), round_up(int(positions.max()) + 1)
        self._slots = torch.from_numpy(cache.slots(np.arange(rows), positions)).to(device)
        self.positions = torch.from_numpy(positions).to(device)
        mask = _mask(self.positions[:, None], self._length, cache.pool.dtype)
        self._exact = cache.pool.dtype == torch.float32
        self._mask = mask.repeat_interleave(cache.kv_heads, 0) if self._exact else mask.unsqueeze(1)

    def write(self, layer: int, key_value: torch.Tensor) -> None:
        """Store ``key_value`` [n, 2 * kv heads, head dim]."""
        self._cache.pool[layer].index_copy_(0, self._slots, key_value.flatten(0, 1))

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Attention of ``query`` [n, heads, head dim] over each row's cache: [n, heads * head dim]."""
        keys, values = self._cache.rows_of(layer, self._rows, self._length)
        rows, kv_heads, _, head_dim = keys.shape
        # the query heads that share a kv head become queries of it, so that keys and values are not copied
        if not self._exact:
            grouped = query.view(rows, kv_heads, -1, head_dim)
            return F.scaled_dot_product_attention(grouped, keys, values, self._mask).reshape(rows, -1)
        # the same in three products: on a CPU up to twice as fast at these sizes; lower precisions would round scores
        grouped = query.reshape(rows * kv_heads, -1, head_dim)
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        scores = torch.baddbmm(self._mask, grouped, keys.transpose(1, 2), alpha=head_dim**-0.5)
        return torch.bmm(scores.softmax(-1), values).view(rows, -1)


class PrefillPlan:
    """``counts[i]`` tokens of row ``rows[i]`` from position ``starts[i]``, packed one row after another.

    ``positions``: [T]. For attention alone the queries are padded to [rows, largest count].
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
        """Store ``key_value`` [T, 2 * kv heads, head dim]."""
        self._cache.pool[layer].index_copy_(0, self._slots, key_value.flatten(0, 1))

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Causal attention of ``query`` [T, heads, head dim] over each row's cache: [T, heads * head dim]."""
        keys, values = self._cache.rows_of(layer, self._rows, self._length)
        rows, kv_heads, _, head_dim = keys.shape
        shared = query.shape[1] // kv_heads
        padded = query[self._pad].view(rows, -1, kv_heads, shared, head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
        out = F.scaled_dot_product_attention(padded, keys, values, self._mask)
        out = out.view(rows, kv_heads, shared, -1, head_dim).permute(0, 3, 1, 2, 4)
        return out.reshape(-1, query.shape[1] * head_dim)[self._unpad]


class ScorePlan:
    """One sequence of ``tokens`` tokens from its beginning, whose keys and values nobody needs afterwards."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        self.positions = torch.arange(tokens, device=device)
        self._keys = self._values = torch.empty(0)

    def write(self, layer: int, key_value: torch.Tensor) -> None:  # noqa: ARG002
        """Keep ``key_value`` [T, 2 * kv heads, head dim] until `attend`."""
        self._keys, self._values = key_value.transpose(0, 1)[None].chunk(2, dim=1)

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Causal attention of ``query`` [T, heads, head dim]: [T, heads * head dim]."""
        queries = query.transpose(0, 1)[None]
        out = F.scaled_dot_product_attention(queries, self._keys, self._values, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)


AttentionPlan = DecodePlan | PrefillPlan | ScorePlan


def _mask(last: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask [rows, queries, length] of queries that see columns up to ``last`` [rows, queries]."""
    hidden = torch.arange(length, device=last.device) > last[..., None]
    return torch.zeros(hidden.shape, dtype=dtype, device=last.device).masked_fill_(hidden, -torch.inf)
