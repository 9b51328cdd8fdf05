"""Causal attention over a packed row of shared prefixes, without a mask tensor.

A micro-batch is one row of T tokens (`slimelite.training.batch`): a tree of shared prefixes, or sequences one after the
other. The attention function is registered with transformers under the name ``ATTENTION``. For this name, transformers
does not build a mask. The attention function gets the layout of the tokens from
`slimelite.training.batch.sequences_of_pass`.

A token attends causally to its own node, and to all tokens of each node above. So a few kernel calls without a mask
compute the attention of all tokens. One call computes the attention inside the nodes. For each level of shared nodes,
one more call computes the attention of the descendants to these nodes. The keys and values of a prefix are thus read
once for all rows. Each call also returns the log-sum-exp (lse) of its scores s, which is needed to merge the results.
In the backward pass, every call gets the *merged* result O and the merged lse. So p = exp(s - lse) and delta = dO·O
refer to all keys. With them, a call computes exactly the part of the gradients that flows through its own keys.

- CUDA, half precision: the kernel behind `torch.nn.attention.varlen.varlen_attn`.
- CPU: the kernel behind `scaled_dot_product_attention`, on blocks of similar sizes that are padded to the same size.

Four cases need another method, in which one call computes all attention of a node: a window that is shorter than the
rows, fp32 on a GPU, capped scores, and attention sinks. The keys for this call are gathered from the node and from the
nodes above it, back to the start of the attention window. No kernel supports capped scores or sinks. In these two cases
the whole score matrices are in memory.
"""

from __future__ import annotations

import inspect
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.attention.varlen import AuxRequest, varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from slimelite.training.batch import Blocks, Bucket, PackedSequences, sequences_of_pass

ATTENTION = "slimelite_varlen"

# torch 2.11 does not have enable_gqa, so with torch 2.11 the key/value heads are repeated
VARLEN_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters


def register_attention() -> None:
    """Register the attention function with transformers, as ``attn_implementation=ATTENTION``."""
    AttentionInterface.register(ATTENTION, varlen_attention)


def varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The attention of one layer, with transformers' signature. The rows are read as one sequence of rows × T tokens;
    `sequences_of_pass` returns the layout of these tokens.

    Args:
        query: [rows, heads, T, width]; ``key`` and ``value``: [rows, key/value heads, T, width].
        scaling: factor of the scores; None: 1/sqrt(width).
        sliding_window: a token attends to itself and to the sliding_window - 1 tokens before it.
        softcap: scores s become softcap·tanh(s / softcap).
        s_aux: [heads], the score of an additional key (attention sink). Every query attends to this key; the key's
            value is zero.

    Returns:
        [rows, T, heads, width] and no attention weights.

    Raises:
        ValueError: the model has attention dropout, which is not supported.
    """
    if dropout:
        raise ValueError(
            f"{type(module).__name__} has attention dropout, which is not supported: set it to 0 in config.json"
        )
    assert attention_mask is None, "a packed row has no mask tensor"
    sequences = sequences_of_pass()
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    scale = 1 / math.sqrt(q.shape[-1]) if scaling is None else scaling
    half = q.dtype in (torch.bfloat16, torch.float16)
    if q.is_cuda and half and not VARLEN_GQA:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if sliding_window is not None and sliding_window >= sequences.longest_row:
        sliding_window = None
    width = v.shape[-1]
    if width != q.shape[-1]:  # kernels need equal widths; added zeros do not change the scores and results
        widest = max(width, q.shape[-1])
        q, k, v = (pad(x, (0, widest - x.shape[-1])) for x in (q, k, v))
    if softcap is not None or s_aux is not None:
        out = _explicit(q, k, v, sequences, scale, sliding_window, softcap, s_aux)
    elif sliding_window is None and (half or not q.is_cuda):
        out = _MergedAttention.apply(q, k, v, sequences, scale)
    elif sliding_window is not None and q.is_cuda and half:
        out = _gathered_varlen(q, k, v, sequences, scale, sliding_window)
    else:
        out = _gathered_buckets(q, k, v, sequences, scale, sliding_window)
    return out[..., :width].unflatten(0, (len(query), -1)), None


class _Context(FunctionCtx):
    """The values that the forward pass saves for the backward pass."""

    saved_tensors: tuple[Tensor, ...]
    kernel: _Padded | _Varlen


class _MergedAttention(torch.autograd.Function):
    """Attention over a packed row: [T, heads, width] from q, k, v [T, (key/value) heads, width]."""

    @staticmethod
    def forward(ctx: _Context, q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences, scale: float) -> Tensor:
        ctx.kernel = kernel = (_Varlen if q.is_cuda else _Padded)(sequences, scale)
        out, lse = kernel.own(q, k, v)
        for call in kernel.calls:
            rows, part, part_lse = kernel.shared(call, q, k, v)
            before = lse.index_select(0, rows)
            after = torch.logaddexp(before, part_lse)
            kept = out.index_select(0, rows) * (before - after).exp_()[..., None]
            # the sum is computed in at least fp32, the dtype of the log-sum-exp
            out.index_copy_(0, rows, kept.addcmul_(part, (part_lse - after).exp_()[..., None]).to(out.dtype))
            lse.index_copy_(0, rows, after)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = ctx.kernel.own_gradients(grad, q, k, v, out, lse)
        for call in ctx.kernel.calls:
            ctx.kernel.add_gradients(call, (dq, dk, dv), grad, q, k, v, out, lse)
        return dq, dk, dv, None, None


class _Padded:
    """The kernel for CPUs. Its units of work are `Bucket` objects."""

    def __init__(self, sequences: PackedSequences, scale: float) -> None:
        self._own, self._scale = sequences.own_buckets, scale
        self.calls: list[Any] = sequences.shared_buckets

    def own(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The attention of each token to its own node: the result [T, heads, width], and the log-sum-exp [T, heads]."""
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
        for bucket in self._own:
            rows, part, part_lse = self.shared(bucket, q, k, v, causal=True)
            out.index_copy_(0, rows, part)
            lse.index_copy_(0, rows, part_lse)
        return out, lse

    def own_gradients(self, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v that flow through `own`. ``inputs``: (gradient of the result, q, k, v, result,
        log-sum-exp)."""
        gradients = torch.zeros_like(inputs[1]), torch.zeros_like(inputs[2]), torch.zeros_like(inputs[3])
        for bucket in self._own:
            self.add_gradients(bucket, gradients, *inputs, causal=True)
        return gradients

    def shared(
        self, bucket: Bucket, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The attention of the m tokens of ``bucket`` to shared nodes: the positions [m] of these tokens, the result
        [m, heads, width], and the log-sum-exp [m, heads]."""
        q_, k_, v_ = self._blocks(bucket, q, k, v)
        out, lse = torch.empty_like(q_), q_.new_empty(q_.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        for heads in self._heads(q, k):
            part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q_[:, :, heads].transpose(1, 2), k_, v_, 0.0, causal, attn_mask=_mask(bucket, q), scale=self._scale
            )
            out[:, :, heads], lse[:, :, heads] = part.transpose(1, 2), part_lse.transpose(1, 2)
        out, lse = out.flatten(0, 1), lse.flatten(0, 1)
        if len(bucket.rows) < len(out):
            out, lse = out.index_select(0, bucket.real), lse.index_select(0, bucket.real)
        return bucket.rows, out, lse

    def add_gradients(
        self,
        bucket: Bucket,
        gradients: tuple[Tensor, Tensor, Tensor],
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool = False,
    ) -> None:
        """Add to ``gradients`` the gradients of q, k and v that flow through `shared`; see `own_gradients`."""
        q_, k_, v_ = self._blocks(bucket, q, k, v)
        grad_, out_, lse_ = (x.index_select(0, bucket.queries) for x in (grad, out, lse))
        if len(bucket.rows) < len(grad_):  # the gradient of padding is 0
            grad_ = torch.zeros_like(grad_).index_copy_(0, bucket.real, grad.index_select(0, bucket.rows))
        grad_, out_, lse_ = (x.unflatten(0, (bucket.count, -1)) for x in (grad_, out_, lse_))
        dq = torch.empty_like(q_)
        for heads in self._heads(q, k):
            own = (x[:, :, heads].transpose(1, 2) for x in (grad_, q_))
            result = (x[:, :, heads].transpose(1, 2) for x in (out_, lse_))
            dq_, *dkv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *own, k_, v_, *result, 0.0, causal, attn_mask=_mask(bucket, q), scale=self._scale
            )
            dq[:, :, heads] = dq_.transpose(1, 2)
            for total, part in zip(gradients[1:], dkv, strict=True):
                total.index_add_(0, bucket.keys, part.transpose(1, 2).flatten(0, 1))
        gradients[0].index_add_(0, bucket.rows, dq.flatten(0, 1).index_select(0, bucket.real))

    def _blocks(self, bucket: Bucket, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The bucket's queries [blocks, queries, heads, width], and its keys and values [blocks, heads, keys,
        width]."""
        q_, k_, v_ = (
            x.index_select(0, index).unflatten(0, (bucket.count, -1))
            for x, index in ((q, bucket.queries), (k, bucket.keys), (v, bucket.keys))
        )
        return q_, k_.transpose(1, 2), v_.transpose(1, 2)

    def _heads(self, q: Tensor, k: Tensor) -> list[slice]:
        """Slices of the query heads. Each slice has one query head for each key head, so keys and values need not be
        repeated."""
        repeats = q.shape[1] // k.shape[1]
        return [slice(i, None, repeats) for i in range(repeats)]


def _mask(bucket: Bucket, like: Tensor) -> Tensor | None:
    """An additive mask [blocks, 1, 1, keys] that hides padding; None if there is no padding."""
    if bucket.hidden is None:
        return None
    return torch.zeros(bucket.hidden.shape, dtype=like.dtype).masked_fill_(bucket.hidden, -math.inf)


class _Varlen:
    """The kernel for GPUs. Its units of work are `Blocks` objects. It has the same methods as `_Padded`."""

    def __init__(self, sequences: PackedSequences, scale: float) -> None:
        self._nodes, self._scale = sequences.own_blocks, scale
        self.calls: list[Any] = sequences.shared_blocks

    def own(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See `_Padded.own`."""
        out, lse = self._attend(q, k, v, self._nodes, causal=True)
        # a clone, because `forward` changes it, and the kernel's result may be kept for recomputation
        return out.clone() if self.calls else out, lse

    def shared(self, blocks: Blocks, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `_Padded.shared`."""
        q_, k_, v_ = (x.index_select(0, at) for x, at in ((q, blocks.queries), (k, blocks.keys), (v, blocks.keys)))
        return blocks.queries, *self._attend(q_, k_, v_, blocks, causal=False)

    def own_gradients(self, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `_Padded.own_gradients`."""
        return self._gradients(inputs, self._nodes, causal=True)

    def add_gradients(self, blocks: Blocks, gradients: tuple[Tensor, Tensor, Tensor], *inputs: Tensor) -> None:
        """See `_Padded.add_gradients`."""
        at = (blocks.queries, blocks.queries, blocks.keys, blocks.keys, blocks.queries, blocks.queries)
        parts = tuple(x.index_select(0, index) for x, index in zip(inputs, at, strict=True))
        of_blocks = self._gradients(parts, blocks, causal=False)
        for total, part, index in zip(gradients, of_blocks, (at[0], at[2], at[2]), strict=True):
            total.index_add_(0, index, part)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, blocks: Blocks, *, causal: bool) -> tuple[Tensor, Tensor]:
        attend = partial(varlen_attn, scale=self._scale, window_size=(-1, 0 if causal else -1))
        if VARLEN_GQA:
            attend = partial(attend, enable_gqa=True)
        aux = AuxRequest(lse=True)
        out, lse = attend(q, k, v, blocks.cu_queries, blocks.cu_keys, *blocks.longest, return_aux=aux)
        return out, lse.t().contiguous()

    def _gradients(self, inputs: tuple[Tensor, ...], blocks: Blocks, *, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
        grad, q, k, v, out, lse = inputs
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        where = (blocks.cu_queries, blocks.cu_keys, *blocks.longest, causal, no_dropout)
        dq, dk, dv = torch.ops.torch_attn._varlen_attn_backward(
            *(grad.contiguous(), q, k, v, out, lse.t().contiguous()),
            *where,
            self._scale,
            [-1, 0 if causal else -1],
        )
        return dq, dk, dv


def _gathered_varlen(q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences, scale: float, window: int) -> Tensor:
    """Attention with gathered keys in half precision on a GPU: [T, heads, width] from q, k, v [T, (key/value) heads,
    width].

    The kernel's window ends at the last key. So the keys of a node are the keys of its path above that are in the
    window, followed by its own keys.
    """
    blocks = sequences.window(window).blocks
    attend = partial(varlen_attn, scale=scale, window_size=(window - 1, 0))
    if VARLEN_GQA:
        attend = partial(attend, enable_gqa=True)
    keys, values = (x.index_select(0, blocks.keys) for x in (k, v))
    out = attend(q, keys, values, blocks.cu_queries, blocks.cu_keys, *blocks.longest)
    assert isinstance(out, Tensor)
    return out


def _gathered_buckets(
    q: Tensor, k: Tensor, v: Tensor, sequences: PackedSequences, scale: float, window: int | None
) -> Tensor:
    """Attention with gathered keys, on CPUs and in fp32 on GPUs: [T, heads, width] from q, k, v [T, (key/value) heads,
    width]."""
    outputs, layout = [], sequences.window(window)
    for bucket, seen in layout.buckets:
        parts = ((q, bucket.queries), (k, bucket.keys), (v, bucket.keys))
        q_, k_, v_ = (x.index_select(0, at).unflatten(0, (bucket.count, -1)).transpose(1, 2) for x, at in parts)
        out = scaled_dot_product_attention(
            q_, k_, v_, attn_mask=seen, is_causal=seen is None, scale=scale, enable_gqa=True
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1).index_select(0, bucket.real))
    return torch.cat(outputs).index_select(0, layout.inverse)


def _explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: PackedSequences,
    scale: float,
    window: int | None,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with capped scores or sinks, which no kernel supports: [T, heads, width] as in `_gathered_buckets`."""
    outputs, layout, repeats = [], sequences.window(window), q.shape[1] // k.shape[1]
    for bucket, seen in layout.buckets:
        parts = ((q, bucket.queries), (k, bucket.keys), (v, bucket.keys))
        q_, k_, v_ = (x.index_select(0, at).unflatten(0, (bucket.count, -1)).transpose(1, 2) for x, at in parts)
        k_, v_ = (x.repeat_interleave(repeats, 1) for x in (k_, v_))
        scores = (q_ @ k_.mT * scale).to(torch.promote_types(q.dtype, torch.float32))
        if cap is not None:
            scores = (scores / cap).tanh() * cap
        if seen is None:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)], -1)
        out = scores.softmax(-1)[..., : k_.shape[2]].to(v.dtype) @ v_
        outputs.append(out.transpose(1, 2).flatten(0, 1).index_select(0, bucket.real))
    return torch.cat(outputs).index_select(0, layout.inverse)
