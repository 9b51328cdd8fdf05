"""The fast decoders of `FAMILIES`: they fuse weights for decoding, and their forward pass has no autograd."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from slimelite.engines.embedded.weights import Weights, load_model
from slimelite.models.families import FAMILIES, is_true
from slimelite.models.files import as_filed

# these rope types are refused: their cos/sin tables depend on the sequence length, but `Decoder` has one table for all
# lengths
DYNAMIC_ROPE = ("dynamic", "longrope")
# on a CPU, weights with at least this many elements have a packed copy; for smaller weights, the extra call costs more
# time than it saves
PACK_ELEMENTS = 2**18
# weights are packed for this number of rows; the layout is the same for 8 to 256 rows, and is also fast for one row
PACK_ROWS = 64


def not_fast(config: PretrainedConfig) -> str:
    """The reason why this decoder cannot compute models with ``config``; empty if it can."""
    layers = getattr(config, "layer_types", None)
    if config.model_type not in FAMILIES or not FAMILIES[config.model_type].embedded:
        return f"model_type {config.model_type!r}"
    if config.hidden_act != "silu":
        return f"hidden_act {config.hidden_act!r}"
    if config.rope_parameters["rope_type"] in DYNAMIC_ROPE:
        return f"rope type {config.rope_parameters['rope_type']!r}"
    if set(layers) != {"full_attention"} if layers else getattr(config, "sliding_window", None) is not None:
        return "sliding-window attention"
    if getattr(config, "num_experts", None) and (config.hidden_size % 8 or config.moe_intermediate_size % 8):
        # in a grouped product, the size of a row must be a multiple of 16 bytes
        return "experts with a width that is not a multiple of 8"
    return ""


@dataclass(frozen=True, slots=True)
class MixtureShape:
    """Each layer in ``layers`` has ``count`` experts of width ``size``. ``each``: the number of experts that a token
    uses in a layer.

    ``norm``: whether the weights of a token's experts are divided by their sum.
    """

    count: int
    each: int
    size: int
    norm: bool
    layers: frozenset[int]

    @classmethod
    def from_config(cls, config: PretrainedConfig) -> MixtureShape | None:
        """Read the shape from config.json, under Qwen3-MoE's names; None for a model without experts."""
        if not (count := getattr(config, "num_experts", None)):
            return None
        step, dense = config.decoder_sparse_step, config.mlp_only_layers
        layers = frozenset(i for i in range(config.num_hidden_layers) if i not in dense and not (i + 1) % step)
        return cls(count, config.num_experts_per_tok, config.moe_intermediate_size, config.norm_topk_prob, layers)


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Dimensions of a decoder; ``*_bias`` and ``qk_norm`` tell which optional weights the decoder has."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    mixture: MixtureShape | None = None

    @classmethod
    def from_config(cls, config: PretrainedConfig) -> DecoderShape:
        """Read the Hugging Face config. `not_fast` must return an empty text for this config."""
        family, fields = FAMILIES[config.model_type], config.to_dict()
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            intermediate_size=config.intermediate_size,
            norm_eps=config.rms_norm_eps,
            tied=config.tie_word_embeddings,
            qkv_bias=is_true(family.qkv_bias, fields),
            out_bias=is_true(family.out_bias, fields),
            mlp_bias=is_true(family.mlp_bias, fields),
            qk_norm=family.qk_norm,
            mixture=MixtureShape.from_config(config),
        )


class Linear:
    """Multiplies by ``weight`` [out, in] and adds ``bias`` [out].

    On an x86 CPU in fp32, a large weight has a second copy in oneDNN's blocked layout, so that a product need not
    rearrange the weight first. The copy saves 30 to 45 % of the time with 8 rows, and about 10 % with 256 rows. The
    copy is made before the first product, and again after ``weight`` changes. Products with the copy differ by
    rounding: by at most 1e-6 of the sum of the terms' magnitudes.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.packs = (
            weight.device.type == "cpu"
            and weight.dtype == torch.float32
            and weight.numel() >= PACK_ELEMENTS
            and platform.machine() in ("x86_64", "AMD64")
            and torch.backends.mkldnn.is_available()
        )
        self._packed = torch.empty(0)
        # PyTorch's version counter of the weight (and its views) when the packed copy was made
        self._version: int | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[…, in] -> […, out]."""
        if not self.packs:
            return F.linear(x, self.weight, self.bias)
        self._repack()
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return product

    def added_to(self, before: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return ``before`` [T, out] plus this layer's result for ``x`` [T, in]. ``before`` may be overwritten.

        In fp32 the matrix product adds to ``before`` directly, which saves a pass over the result. In lower precisions,
        the product is rounded before it is added, as in the trainer's model.
        """
        if self.packs:
            self._repack()
            added: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, before, self._packed, self.bias, "add")
            return added
        if self.bias is None and self.weight.dtype == torch.float32:
            return before.addmm_(x, self.weight.t())
        return before.add_(self(x))

    def _repack(self) -> None:
        if self._version != self.weight._version:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, PACK_ROWS)
            self._version = self.weight._version


@dataclass(slots=True)
class GatedMLP:
    """An MLP, which may be an expert of a mixture. ``gate_up`` stacks the rows of the gate and up projections."""

    gate_up: Linear
    down: Linear

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, width], the input of ``down``."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def added_to(self, before: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return ``before`` [T, hidden] plus the MLP's result for ``x`` [T, hidden]. ``before`` may be overwritten."""
        return self.down.added_to(before, self.inner(x))


class Mixture:
    """A mixture of experts. ``gate_up`` [experts, 2 * width, hidden] and ``down`` [experts, hidden, width] have the
    weights of all experts.

    Tokens are sorted by expert. If experts are large enough for packed copies, each expert multiplies its own tokens.
    Otherwise one grouped product computes all experts, which is then as fast as separate products.
    """

    def __init__(self, shape: MixtureShape, router: Linear, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        self._shape, self._router, self._gate_up, self._down = shape, router, gate_up, down
        self._experts = [GatedMLP(Linear(one), Linear(two)) for one, two in zip(gate_up, down, strict=True)]
        for expert in self._experts:
            expert.down.packs = expert.gate_up.packs

    def added_to(self, before: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """See `GatedMLP.added_to`. The results of a token's experts are added in the order of their probabilities."""
        shape = self._shape
        logits = self._router(x)
        weights, chosen = logits.softmax(-1, dtype=torch.float32).topk(shape.each, -1)
        if shape.norm:
            weights /= weights.sum(-1, keepdim=True)
        experts, order = chosen.flatten().sort()
        counts = torch.zeros(shape.count, dtype=torch.int64, device=x.device)
        counts.scatter_add_(0, experts, torch.ones_like(experts))
        outs = self._products(x.index_select(0, order // shape.each), counts)
        outs.mul_(weights.to(logits.dtype).flatten()[order, None])
        back = torch.empty_like(outs).index_copy_(0, order, outs)
        return before.add_(back.view(len(x), shape.each, -1).sum(1))

    def _products(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Apply the experts. ``x`` [tokens, hidden] has the tokens in the order of their experts. The result has the
        same shape. ``counts``: tokens of each expert."""
        if not self._experts[0].gate_up.packs:
            ends = counts.cumsum(0, dtype=torch.int32)
            gate, up = F.grouped_mm(x, self._gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
            product: torch.Tensor = F.grouped_mm(F.silu(gate).mul_(up), self._down.transpose(1, 2), offs=ends)
            return product
        parts = zip(self._experts, x.split(counts.tolist()), strict=True)
        return torch.cat([expert.down(expert.inner(part)) for expert, part in parts if len(part)])


@dataclass(slots=True)
class LayerWeights:
    """One layer. ``qkv`` stacks the rows of query, key and value heads."""

    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: Linear
    mlp_norm: torch.Tensor
    mlp: GatedMLP | Mixture


class DecoderWeights(Weights):
    """All weights. Each Hugging Face name refers to a part of the fused storage."""

    def __init__(self, shape: DecoderShape, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device)
        self.shape, self._dtype = shape, dtype
        self.embed = self._weight((shape.vocab_size, shape.hidden_size), "model.embed_tokens.weight")
        self.layers = [self._layer(i) for i in range(shape.num_layers)]
        self.norm = self._weight((shape.hidden_size,), "model.norm.weight")
        head = self.embed
        if not shape.tied:
            head = self._weight((shape.vocab_size, shape.hidden_size), "lm_head.weight")
        self.head = Linear(head)
        self._complete({"lm_head.weight": "model.embed_tokens.weight"} if shape.tied else {})

    def _weight(self, size: tuple[int, ...], *names: str, rows: tuple[int, ...] = ()) -> torch.Tensor:
        """Allocate one fused weight for ``names``, stacked in this order. Name i has ``rows[i]`` rows."""
        weight = torch.empty(size, device=self._device, dtype=self._dtype)
        self._storage.append(weight)
        if names:
            self._targets.update(zip(names, weight.split(rows or size[0]), strict=True))
        return weight

    def _linear(self, names: list[str], rows: tuple[int, ...], columns: int, has_bias: bool) -> Linear:
        weight = self._weight((sum(rows), columns), *(f"{n}.weight" for n in names), rows=rows)
        bias = self._weight((sum(rows),), *(f"{n}.bias" for n in names), rows=rows) if has_bias else None
        return Linear(weight, bias)

    def _mlp(self, name: str) -> GatedMLP:
        s = self.shape
        gate_up = [f"{name}.gate_proj", f"{name}.up_proj"]
        return GatedMLP(
            self._linear(gate_up, (s.intermediate_size, s.intermediate_size), s.hidden_size, s.mlp_bias),
            self._linear([f"{name}.down_proj"], (s.hidden_size,), s.intermediate_size, s.mlp_bias),
        )

    def _mixture(self, name: str, mixture: MixtureShape) -> Mixture:
        hidden, size = self.shape.hidden_size, mixture.size
        router = Linear(self._weight((mixture.count, hidden), f"{name}.gate.weight"))
        gate_up, down = self._weight((mixture.count, 2 * size, hidden)), self._weight((mixture.count, hidden, size))
        for number in range(mixture.count):
            expert = f"{name}.experts.{number}"
            gate, up = gate_up[number].split(size)
            parts = {"gate_proj": gate, "up_proj": up, "down_proj": down[number]}
            self._targets.update({f"{expert}.{part}.weight": target for part, target in parts.items()})
        return Mixture(mixture, router, gate_up, down)

    def _layer(self, index: int) -> LayerWeights:
        s, prefix = self.shape, f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv_names = [f"{attention}.{x}_proj" for x in "qkv"]
        qkv_rows = (s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim, s.num_kv_heads * s.head_dim)
        return LayerWeights(
            input_norm=self._weight((s.hidden_size,), f"{prefix}.input_layernorm.weight"),
            qkv=self._linear(qkv_names, qkv_rows, s.hidden_size, s.qkv_bias),
            q_norm=self._weight((s.head_dim,), f"{attention}.q_norm.weight") if s.qk_norm else None,
            k_norm=self._weight((s.head_dim,), f"{attention}.k_norm.weight") if s.qk_norm else None,
            out=self._linear([f"{attention}.o_proj"], (s.hidden_size,), qkv_rows[0], s.out_bias),
            mlp_norm=self._weight((s.hidden_size,), f"{prefix}.post_attention_layernorm.weight"),
            mlp=self._mixture(mlp, s.mixture) if s.mixture and index in s.mixture.layers else self._mlp(mlp),
        )

    def load(self, model_path: str, config: PretrainedConfig, seed: int) -> None:
        """Load the weights with `load_model`, and copy them into the fused storage."""
        model = load_model(model_path, config, self._dtype, seed)
        self.incoming.begin(0)
        self.update(list(as_filed(model, model.state_dict()).items()))
        self.incoming.end()
        self.incoming.complete = False  # the trainer's weights may differ from these


class AttentionPlan(Protocol):
    """The plan for a batch of packed tokens. The plan gives the position of each token, the place of its keys and
    values, and the tokens that it attends to."""

    positions: torch.Tensor

    def write(self, layer: int, key_value: torch.Tensor) -> None:
        """Store ``key_value`` [T, 2 * kv heads, head dim] of ``layer``."""
        ...

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Attention of ``query`` [T, heads, head dim] over the stored keys and values: [T, heads * head dim]."""
        ...


class Decoder:
    """Computes hidden states and logits of packed tokens. An `AttentionPlan` stores and reads keys and values."""

    def __init__(self, weights: DecoderWeights, config: PretrainedConfig, max_context_len: int) -> None:
        self.weights = weights
        embed = weights.embed
        # all families compute rope like Llama; this class also covers the scaling variants (linear, llama3, yarn)
        rotary = LlamaRotaryEmbedding(config)
        cos, sin = rotary(torch.zeros(1), torch.arange(max_context_len)[None])
        half = sin.shape[-1] // 2
        # rotate_half(x) * sin == roll(x, half) * (-sin, sin)
        sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)
        self._cos = cos[0, :, None].to(embed.device, embed.dtype)
        self._sin = sin[:, None].to(embed.device, embed.dtype)

    def forward(self, tokens: torch.Tensor, plan: AttentionPlan, *, cache_only: bool = False) -> torch.Tensor:
        """Run ``tokens`` [T] at the positions of ``plan`` and write their keys and values to the cache.

        Returns:
            [T, hidden] after the final norm. With ``cache_only`` the last layer stops after it has written its keys and
            values. With ``cache_only``, the returned tensor is meaningless, and only the cache is useful.
        """
        w, shape = self.weights, self.weights.shape
        hidden = (shape.hidden_size,)
        cos, sin = self._cos[plan.positions], self._sin[plan.positions]
        x = F.embedding(tokens, w.embed)
        for index, layer in enumerate(w.layers):
            normed = F.rms_norm(x, hidden, layer.input_norm, shape.norm_eps)
            heads = layer.qkv(normed).view(len(tokens), -1, shape.head_dim)
            query, key_value = heads[:, : shape.num_heads], heads[:, shape.num_heads :]
            if layer.q_norm is not None:
                key = key_value[:, : shape.num_kv_heads]
                query.copy_(F.rms_norm(query, (shape.head_dim,), layer.q_norm, shape.norm_eps))
                key.copy_(F.rms_norm(key, (shape.head_dim,), layer.k_norm, shape.norm_eps))
            rotated = heads[:, : shape.num_heads + shape.num_kv_heads]
            rolled = rotated.roll(shape.head_dim // 2, -1)
            rotated.mul_(cos).addcmul_(rolled, sin)
            plan.write(index, key_value)
            if cache_only and index == shape.num_layers - 1:
                break
            x = layer.out.added_to(x, plan.attend(index, query))
            normed = F.rms_norm(x, hidden, layer.mlp_norm, shape.norm_eps)
            x = layer.mlp.added_to(x, normed)
        return F.rms_norm(x, hidden, w.norm, shape.norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, vocab] in fp32."""
        return self.weights.head(hidden).float()
