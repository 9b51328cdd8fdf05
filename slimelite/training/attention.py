"""Variable-length causal attention over packed sequences, without a mask tensor.

A micro-batch is one row of T tokens: sequences laid end to end. The attention function is registered with
transformers under ``ATTENTION``; for such a name transformers builds no mask, and hands the model's keyword argument
``sequences`` through to every layer.

- CUDA, half precision: `torch.nn.attention.varlen.varlen_attn` on ``cu_seqlens``.
- elsewhere: sequences of similar length are padded on the right to [sequences, heads, length, head width] and go
  through causal SDPA together. Causal attention from a real token never reaches the padding after it, so that no
  padding mask is needed. 256 short sequences become a handful of calls, long ones stay nearly unpadded.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

ATTENTION = "slimelite_varlen"

# a bucket holds sequences at least this long relative to its longest one: at most a tenth of it is padding
BUCKET_RATIO = 0.9

# torch 2.11 has no enable_gqa; there key/value heads are repeated
VARLEN_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """Where the sequences of one packed row begin and end, and how they are bucketed by length.

    ``cu_seqlens``: [sequences + 1] int32, the first position of each sequence, and T; ``max_length``: tokens of the
    longest. ``buckets``: (sequences, padded length) of each bucket; ``pad_index``: [padded tokens] int64, the packed
    position that each padded position copies; ``unpad_index``: [T] int64, the padded position of each packed token.
    """

    cu_seqlens: Tensor
    max_length: int
    buckets: tuple[tuple[int, int], ...]
    pad_index: Tensor
    unpad_index: Tensor

    @classmethod
    def from_lengths(cls, lengths: Sequence[int] | np.ndarray, device: torch.device | str = "cpu") -> PackedSequences:
        """Lay out sequences of these lengths (each at least 1)."""
        sizes = np.asarray(lengths, np.int64)
        assert (sizes > 0).all(), f"every packed sequence has tokens, not {sizes.tolist()}"
        starts = np.concatenate([[0], np.cumsum(sizes)])
        buckets, pad_index, unpad_index = _bucket(sizes, starts)
        return cls(
            cu_seqlens=torch.from_numpy(starts.astype(np.int32)).to(device),
            max_length=int(sizes.max()),
            buckets=buckets,
            pad_index=torch.from_numpy(pad_index).to(device),
            unpad_index=torch.from_numpy(unpad_index).to(device),
        )


def _bucket(sizes: np.ndarray, starts: np.ndarray) -> tuple[tuple[tuple[int, int], ...], np.ndarray, np.ndarray]:
    order = np.argsort(-sizes, kind="stable")
    buckets, pad_parts = [], []
    unpad_index = np.empty(starts[-1], np.int64)
    first = offset = 0
    while first < len(order):
        longest = sizes[order[first]]
        end = first + int(np.searchsorted(-sizes[order[first:]], -BUCKET_RATIO * longest, side="right"))
        rows = order[first:end]
        position, length = np.arange(longest)[None], sizes[rows][:, None]
        # padding repeats the first token; any finite value would do
        source = starts[rows][:, None] + np.where(position < length, position, 0)
        padded = offset + np.arange(source.size).reshape(source.shape)
        unpad_index[source[position < length]] = padded[position < length]
        buckets.append((len(rows), int(longest)))
        pad_parts.append(source.ravel())
        first, offset = end, offset + source.size
    return tuple(buckets), np.concatenate(pad_parts), unpad_index


def register_attention() -> None:
    """Make ``attn_implementation=ATTENTION`` known to transformers."""
    AttentionInterface.register(ATTENTION, varlen_attention)


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sequences: PackedSequences,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The attention of one layer, as transformers calls it.

    Args:
        query: [rows, heads, T, width]; ``key`` and ``value``: [rows, key/value heads, T, width].
        sequences: the layout of the rows · T tokens; no sequence spans two rows.
        scaling: factor of the scores; None: 1/sqrt(width).
        sliding_window: a token attends to itself and to the sliding_window - 1 tokens before it.

    Returns:
        [rows, T, heads, width] and no attention weights.

    Raises:
        ValueError: the model asks for dropout, capped scores or attention sinks, which are not supported.
    """
    if dropout or softcap is not None or s_aux is not None:
        name = type(module).__name__
        raise ValueError(f"{name} uses attention dropout, score capping or sinks, which training here does not support")
    assert attention_mask is None, "a packed row has no mask tensor"
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        out = _flash_attention(q, k, v, sequences, scaling, sliding_window)
    else:
        out = _bucketed_attention(q, k, v, sequences, scaling, sliding_window)
    return out.unflatten(0, (len(query), -1)), None


def _flash_attention(
    q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """[T, heads, width] from q, k, v [T, (key/value) heads, width] in half precision on a GPU."""
    attend = partial(varlen_attn, scale=scaling, window_size=(-1 if sliding_window is None else sliding_window - 1, 0))
    if VARLEN_GQA:
        attend = partial(attend, enable_gqa=True)
    else:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    cu_seqlens, longest = sequences.cu_seqlens, sequences.max_length
    out = attend(q, k, v, cu_seqlens, cu_seqlens, longest, longest)
    assert isinstance(out, Tensor)
    return out


def _bucketed_attention(
    q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """[T, heads, width] from q, k, v [T, (key/value) heads, width]."""
    sizes = [count * length for count, length in sequences.buckets]
    parts = [x.index_select(0, sequences.pad_index).split(sizes) for x in (q, k, v)]
    outputs = []
    for (count, length), *bucket in zip(sequences.buckets, *parts, strict=True):
        q_, k_, v_ = (x.unflatten(0, (count, length)).transpose(1, 2) for x in bucket)
        band = None
        if sliding_window is not None and length > sliding_window:
            band = q.new_ones(length, length, dtype=torch.bool).tril().triu(1 - sliding_window)
        out = scaled_dot_product_attention(
            q_, k_, v_, attn_mask=band, is_causal=band is None, scale=scaling, enable_gqa=True
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, sequences.unpad_index)
