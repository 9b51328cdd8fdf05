"""Fast forward passes for Qwen3.5 and Qwen3-Next in fp32 on a CPU. These models combine layers of the gated delta rule
with layers of gated attention.

The passes read the parameters of the transformers model. Parameters that multiply the same input become parts of one
matrix. A decoding step changes states in place. Keys and values are stored with room for the columns of later tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

from slimelite.engines.embedded.attention import causal_attention
from slimelite.engines.embedded.caches import LayerCache
from slimelite.engines.embedded.model import DYNAMIC_ROPE, GatedMLP, Linear
from slimelite.models.scans import gated_delta_rule

HYBRIDS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
# if keys and values are full, they get at least ROOM more columns, or 1/ROOM_SHARE of their columns
ROOM, ROOM_SHARE = 32, 4


def is_fast_hybrid(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `HybridPasses` computes models with ``config``. The result is False on a GPU, because the kernels that
    transformers calls are faster there."""
    text = config.get_text_config()
    return (
        text.model_type in HYBRIDS
        and text.hidden_act == "silu"
        and text.rope_parameters["rope_type"] not in DYNAMIC_ROPE
        and device.type == "cpu"
        and dtype == torch.float32
    )


class Derived:
    """The result of ``make`` for ``weight``. The result is computed again after ``weight`` has changed."""

    def __init__(self, weight: Tensor, make: Callable[[Tensor], Tensor]) -> None:
        self._weight, self._make = weight, make
        self._made = torch.empty(0)
        self._version: int | None = None

    def __call__(self) -> Tensor:
        """Return the result for the current weight."""
        if self._version != self._weight._version:
            self._made, self._version = self._make(self._weight), self._weight._version
        return self._made


class Norm:
    """x / rms(x) · (1 + weight) over the last dimension."""

    def __init__(self, norm: Any) -> None:
        self._scale, self._eps = Derived(norm.weight, lambda weight: weight + 1), norm.eps

    def __call__(self, x: Tensor) -> Tensor:
        """[…, size] -> the same."""
        scale = self._scale()
        return F.rms_norm(x, scale.shape, scale, self._eps)


@dataclass
class States(LayerCache):
    """``conv`` [n, taps - 1, channels]: the last inputs of the convolution. ``delta`` [n, key heads, K, group · V]: the
    states of the gated delta rule."""

    conv: Tensor
    delta: Tensor


@dataclass
class Columns(LayerCache):
    """``keys`` and ``values`` [n, kv heads, columns, head dim]; the storage of both may have room for more columns."""

    keys: Tensor
    values: Tensor


@dataclass
class Step:
    """The tokens of a pass, [rows · tokens], row by row. The longest row has ``start`` cached tokens before the tokens
    of this pass.

    ``cos``, ``sin``: [rows · tokens or tokens, 1, rotary dims], with the first half of sin negated. ``mask``: [rows ·
    kv heads, 1, columns] added to the scores of a decoding step.
    """

    rows: int
    tokens: int
    start: int
    cos: Tensor
    sin: Tensor
    mask: Tensor | None = None


class DeltaNet:
    """A layer of the gated delta rule: a short convolution, the delta rule, and a norm with a gate."""

    def __init__(self, layer: Any) -> None:
        self._heads, self._keys, self._width = layer.num_k_heads, layer.head_k_dim, layer.head_v_dim
        self._group = layer.num_v_heads // layer.num_k_heads
        self._apart = hasattr(layer, "in_proj_qkv")
        names = "qkv z b a" if self._apart else "qkvz ba"
        self._in = fused(*(getattr(layer, f"in_proj_{name}") for name in names.split()))
        self._taps = Derived(layer.conv1d.weight, lambda weight: weight[:, 0].t().contiguous())
        self._rate = Derived(layer.A_log, lambda weight: -weight.exp())
        self._dt_bias, self._out = layer.dt_bias, fused(layer.out_proj)
        self._norm, self._eps = layer.norm, layer.layer_norm_epsilon
        # queries are divided by √K
        self._scales = torch.tensor([self._keys**-0.5, 1.0])[:, None, None]

    def added_to(self, x: Tensor, normed: Tensor, step: Step, cached: States | None) -> tuple[Tensor, States]:
        """Return ``x`` [tokens, hidden] plus the layer's result for ``normed``, and the states after these tokens.
        ``x`` may be overwritten."""
        qkv, gate, b, a = self._projected(normed)
        g = self._rate() * F.softplus(a + self._dt_bias)
        run = self._decoded if cached is not None and step.tokens == 1 else self._prefilled
        out, states = run(qkv, g, b.sigmoid(), step, cached)
        out = F.rms_norm(out.view(len(x), -1, self._width), (self._width,), self._norm.weight, self._eps)
        return self._out.added_to(x, out.flatten(1).mul_(F.silu(gate))), states

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(queries, keys and values; gates; inputs of beta; inputs of the decay), each [tokens, ...]."""
        heads, keys, values = self._heads, self._keys, self._group * self._width
        sizes = [2 * keys + values, values, self._group, self._group]
        if self._apart:
            return self._in(x).split([heads * size for size in sizes], -1)
        # in the projection, the parts of one head are adjacent
        of_heads, of_rates = self._in(x).split([heads * (sizes[0] + sizes[1]), heads * 2 * self._group], -1)
        query, key, value, gate = of_heads.unflatten(-1, (heads, -1)).split([keys, keys, values, values], -1)
        b, a = of_rates.unflatten(-1, (heads, -1)).chunk(2, -1)
        qkv = torch.cat([part.flatten(1) for part in (query, key, value)], -1)
        return qkv, gate.flatten(1), b.flatten(1), a.flatten(1)

    def _decoded(
        self, qkv: Tensor, g: Tensor, beta: Tensor, step: Step, cached: States | None
    ) -> tuple[Tensor, States]:
        """The result for one token of each row: [rows, heads, V]."""
        assert cached is not None
        window = torch.cat((cached.conv, qkv[:, None]), 1)
        mixed = F.silu((window * self._taps()).sum(1))
        pair, value = mixed.split([2 * self._heads * self._keys, self._heads * self._group * self._width], -1)
        pair = pair.view(step.rows, 2, self._heads, self._keys)
        pair = pair * (pair.square().sum(-1, keepdim=True) + 1e-6).rsqrt() * self._scales
        by_head = (step.rows, self._heads, self._group)
        decay, beta, value = g.exp().view(*by_head, 1), beta.view(*by_head, 1), value.view(*by_head, -1)
        # both products read the state before this token; the contribution of the token is added afterwards
        read = (pair.transpose(1, 2) @ cached.delta).unflatten(-1, (self._group, -1))
        delta = (value - decay * read[:, :, 1]) * beta
        inner = (pair[:, 0] * pair[:, 1]).sum(-1)[..., None, None]
        out = (decay * read[:, :, 0]).addcmul_(inner, delta)
        cached.delta.unflatten(-1, (self._group, -1)).mul_(decay[:, :, None])
        cached.delta.flatten(0, 1).baddbmm_(
            pair[:, 1].reshape(-1, self._keys, 1), delta.flatten(2).flatten(0, 1)[:, None]
        )
        return out, States(window[:, 1:], cached.delta)

    def _prefilled(
        self, qkv: Tensor, g: Tensor, beta: Tensor, step: Step, cached: States | None
    ) -> tuple[Tensor, States]:
        """The results for several tokens of each row: [rows · tokens, heads, V]."""
        n, length, heads, group = step.rows, step.tokens, self._heads, self._group
        taps = self._taps()
        before = qkv.new_zeros(n, len(taps) - 1, qkv.shape[-1]) if cached is None else cached.conv
        window = torch.cat((before, qkv.view(n, length, -1)), 1)
        mixed = window[:, :length] * taps[0]
        for number in range(1, len(taps)):
            mixed.addcmul_(window[:, number : number + length], taps[number])
        sizes = [heads * self._keys, heads * self._keys, heads * group * self._width]
        query, key, value = F.silu(mixed).split(sizes, -1)
        state = None
        if cached is not None:
            state = cached.delta.unflatten(-1, (group, -1)).transpose(2, 3).flatten(1, 2)
        out, state = gated_delta_rule(
            query.unflatten(-1, (heads, -1)),
            key.unflatten(-1, (heads, -1)),
            value.unflatten(-1, (heads * group, -1)),
            g.view(n, length, -1),
            beta.view(n, length, -1),
            state,
        )
        state = state.unflatten(1, (heads, group)).transpose(2, 3).flatten(3)
        return out.flatten(0, 1).contiguous(), States(window[:, length:], state)


class GatedAttention:
    """Full attention with normed queries and keys, rotary positions on a part of each head, and a gate on the
    result."""

    def __init__(self, layer: Any) -> None:
        self._dim, self._group = layer.head_dim, layer.num_key_value_groups
        self._in = fused(layer.q_proj, layer.k_proj, layer.v_proj)
        self._q_norm, self._k_norm, self._out = Norm(layer.q_norm), Norm(layer.k_norm), fused(layer.o_proj)

    def added_to(self, x: Tensor, normed: Tensor, step: Step, cached: Columns | None) -> tuple[Tensor, Columns]:
        """See `DeltaNet.added_to`."""
        heads = self._in(normed).view(len(x), -1, self._dim)
        kv_heads = heads.shape[1] // (2 * self._group + 2)
        queries, key, value = heads.split([2 * self._group * kv_heads, kv_heads, kv_heads], 1)
        query, gate = queries.unflatten(1, (-1, 2)).unbind(2)
        parts = (rotated(self._q_norm(query), step), rotated(self._k_norm(key), step), value)
        query, key, value = (part.view(step.rows, step.tokens, -1, self._dim).transpose(1, 2) for part in parts)
        cached = (
            Columns(key, value) if cached is None else Columns(grown(cached.keys, key), grown(cached.values, value))
        )
        out = self._attended(query, cached, step).transpose(1, 2).reshape(gate.shape)
        return self._out.added_to(x, (out * gate.sigmoid()).flatten(1)), cached

    def _attended(self, query: Tensor, cached: Columns, step: Step) -> Tensor:
        if not step.start:
            return causal_attention(query, cached.keys, cached.values)
        keys, values = cached.keys.flatten(0, 1), cached.values.flatten(0, 1)
        mask = step.mask
        if step.tokens > 1:
            mask = query.new_full((step.tokens, keys.shape[1]), -torch.inf).triu_(step.start + 1)
            mask = mask.repeat(self._group, 1)[None]
        grouped = query.reshape(len(keys), -1, self._dim)
        scores = torch.baddbmm(
            query.new_zeros(1) if mask is None else mask, grouped, keys.transpose(1, 2), alpha=self._dim**-0.5
        )
        return torch.bmm(scores.softmax(-1), values).view(query.shape)


class Layer:
    """A layer: ``mixer``, then an MLP. Mixer and MLP each have a norm in front, and the result of each is added to its
    input."""

    def __init__(self, layer: Any) -> None:
        self.mixer = GatedAttention(layer.self_attn) if hasattr(layer, "self_attn") else DeltaNet(layer.linear_attn)
        self._norm, self._mlp_norm = Norm(layer.input_layernorm), Norm(layer.post_attention_layernorm)
        self._module = mlp = layer.mlp
        self._mlp = None
        if hasattr(mlp, "gate_proj"):
            self._mlp = GatedMLP(fused(mlp.gate_proj, mlp.up_proj), fused(mlp.down_proj))

    def __call__(self, x: Tensor, step: Step, cached: Any) -> tuple[Tensor, Any]:
        """Return the layer's result for ``x`` [tokens, hidden], and the layer's cache after these tokens. ``x`` may be
        overwritten."""
        x, cached = self.mixer.added_to(x, self._norm(x), step, cached)
        normed = self._mlp_norm(x)
        return self._mlp.added_to(x, normed) if self._mlp else x.add_(self._module(normed[None])[0]), cached


class HybridPasses:
    """`Passes` of a model for which `is_fast_hybrid` is true. The cache of a batch is a list with one cache for each
    layer."""

    def __init__(self, model: Any) -> None:
        self._embed, self._rotary = model.model.embed_tokens.weight, model.model.rotary_emb
        self._layers = [Layer(layer) for layer in model.model.layers]
        self._norm, self._head = Norm(model.model.norm), Linear(model.lm_head.weight)
        self._cos = self._sin = torch.empty(0)

    def whole(self, ids: Tensor, last: int = 0) -> Tensor:
        """See `Passes.whole`."""
        hidden, _ = self._run(ids, None, self._step(ids, torch.arange(ids.shape[1]), 0))
        return self._logits(hidden.unflatten(0, ids.shape)[:, -last:])

    def extend(self, ids: Tensor, cache: Any, start: int) -> tuple[Tensor, Any]:
        """See `Passes.extend`."""
        hidden, cache = self._run(ids, cache, self._step(ids, torch.arange(start, start + ids.shape[1]), start))
        return self._logits(hidden.unflatten(0, ids.shape)[:, -1]), cache

    def decode(self, ids: Tensor, cache: Any, lengths: Tensor, width: int) -> tuple[Tensor, Any]:
        """See `Passes.decode`. The tensors of ``cache`` are changed in place."""
        step = self._step(ids, lengths, width)
        if bool((lengths != width).any()):
            kv_heads = next(cached.keys.shape[1] for cached in cache if isinstance(cached, Columns))
            hidden = torch.arange(width + 1) < width - lengths[:, None]
            mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
            step.mask = mask.repeat_interleave(kv_heads, 0)[:, None]
        states, cache = self._run(ids, cache, step)
        return self._logits(states), cache

    def _step(self, ids: Tensor, positions: Tensor, start: int) -> Step:
        needed = start + ids.shape[1]
        if needed > len(self._cos):
            cos, sin = self._rotary(self._embed[:1], torch.arange(2 * needed)[None])
            sin[..., : sin.shape[-1] // 2] *= -1
            self._cos, self._sin = cos[0, :, None], sin[0, :, None]
        if ids.shape[1] > 1:
            positions = positions.repeat(len(ids))
        return Step(len(ids), ids.shape[1], start, self._cos[positions], self._sin[positions])

    def _run(self, ids: Tensor, cache: Any, step: Step) -> tuple[Tensor, list[Any]]:
        x, after = F.embedding(ids.flatten(), self._embed), []
        for layer, cached in zip(self._layers, cache or [None] * len(self._layers), strict=True):
            x, cached_now = layer(x, step, cached)
            after.append(cached_now)
        return self._norm(x), after

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)


def fused(*layers: nn.Linear) -> Linear:
    """One linear layer in place of ``layers``, which have the same input. The parameters of ``layers`` become parts of
    the new layer's weight and bias."""
    weight = torch.cat([layer.weight for layer in layers])
    bias = torch.cat([layer.bias for layer in layers]) if layers[0].bias is not None else None
    sizes = [layer.out_features for layer in layers]
    for layer, part in zip(layers, weight.split(sizes), strict=True):
        layer.weight = nn.Parameter(part, requires_grad=False)
    if bias is not None:
        for layer, part in zip(layers, bias.split(sizes), strict=True):
            layer.bias = nn.Parameter(part, requires_grad=False)
    return Linear(weight, bias)


def rotated(heads: Tensor, step: Step) -> Tensor:
    """Apply rotary positions in place to the first dims of each head of ``heads`` [tokens, heads, head dim]."""
    part = heads[..., : step.cos.shape[-1]]
    rolled = part.roll(part.shape[-1] // 2, -1)
    part.mul_(step.cos).addcmul_(rolled, step.sin)
    return heads


def grown(cached: Tensor, new: Tensor) -> Tensor:
    """Return ``cached`` [n, heads, columns, dim] followed by the columns of ``new``. If the storage of ``cached`` has
    room, the result uses this storage.

    The room is the unused memory between the columns of two heads.
    """
    n, heads, columns, dim = cached.shape
    wanted = columns + new.shape[2]
    room = (
        cached.stride(1) // dim
        if cached.stride()[2:] == (dim, 1) and cached.stride(0) == heads * cached.stride(1)
        else 0
    )
    if room < wanted:
        larger = cached.new_empty(n, heads, wanted + max(ROOM, wanted // ROOM_SHARE), dim)
        larger[:, :, :columns] = cached
        cached = larger
    both = cached.as_strided((n, heads, wanted, dim), cached.stride(), cached.storage_offset())
    both[:, :, columns:] = new
    return both
