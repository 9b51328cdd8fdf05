"""Sizes of a decoder, read from its config.json without torch: parameters by kind, and widths of activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slimelite.models.families import EXPERTS, family_of, is_true, text_config

# config keys of layers of other kinds: linear attention, Mamba, and attention whose keys are compressed (DeepSeek)
OTHER_LAYERS = ("linear_num_value_heads", "mamba_num_heads", "kv_lora_rank")


@dataclass(frozen=True)
class Shapes:
    """Sizes of a decoder with gated MLPs. ``query`` and ``key`` are the widths of all heads together, ``biases`` and
    ``norms`` the parameters of a layer.

    ``context``: most positions that the model knows, if it says so.
    ``mlp``: parameters of a layer's MLP. In a mixture of experts these are those of all experts, while ``inner`` is the
    width of the experts that one token goes through; ``router``: parameters of the choice between experts.
    """

    layers: int
    hidden: int
    inner: int
    query: int
    key: int
    vocab: int
    tied: bool
    qk_norm: bool
    biases: int
    norms: int
    mlp: int
    router: int = 0
    context: int | None = None

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shapes | None:
        """Sizes from the content of a config.json; None if one is missing, or if the model has ``OTHER_LAYERS``."""
        config = text_config(config)
        names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        sizes = [int(config.get(name) or 0) for name in names]
        if any(config.get(name) for name in OTHER_LAYERS) or not all(sizes):
            return None
        layers, hidden, inner, heads, vocab = sizes
        head = int(config.get("head_dim") or hidden // heads)
        query, key = heads * head, int(config.get("num_key_value_heads") or heads) * head
        family = family_of(str(config.get("model_type")))
        tied, qk_norm = bool(config.get("tie_word_embeddings")), family is not None and family.qk_norm
        norms, biases = 2 * hidden + (2 * head if qk_norm else 0), 0
        if family is not None:
            biases = is_true(family.qkv_bias, config) * (query + 2 * key) + is_true(family.out_bias, config) * hidden
        count, router = next((int(config[name]) for name in EXPERTS if config.get(name)), 0), 0
        mlp = 3 * hidden * inner
        if count:
            if config.get("mlp_only_layers") or int(config.get("decoder_sparse_step") or 1) > 1:
                return None  # layers of two kinds
            if not config.get("num_experts_per_tok"):
                return None  # Aria's and Ernie's configs have names of their own, and shared experts or dense layers
            width = int(config.get("moe_intermediate_size") or inner)
            shared = int(config.get("shared_expert_intermediate_size") or 0)
            inner = int(config["num_experts_per_tok"]) * width + shared
            router = hidden * (count + bool(shared))
            mlp = 3 * hidden * (count * width + shared) + router
        elif family is not None:
            biases += is_true(family.mlp_bias, config) * (2 * inner + hidden)
        context = int(config.get("max_position_embeddings") or 0) or None
        return cls(layers, hidden, inner, query, key, vocab, tied, qk_norm, biases, norms, mlp, router, context)

    @property
    def attention(self) -> int:
        """Parameters of a layer's attention matrices."""
        return self.hidden * (2 * self.query + 2 * self.key)

    @property
    def active(self) -> int:
        """Parameters of a layer's matrices that one token is multiplied with."""
        return self.attention + 3 * self.hidden * self.inner + self.router

    @property
    def layer(self) -> int:
        """Parameters of a layer; those of its norms and biases are too few to matter for memory."""
        return self.attention + self.mlp

    @property
    def head(self) -> int:
        """Parameters of the LM head."""
        return self.vocab * self.hidden

    @property
    def outer(self) -> int:
        """Parameters of embedding and LM head."""
        return self.head * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.layers * (self.layer + self.norms + self.biases) + self.outer + self.hidden

    def adapter(self, rank: int) -> int:
        """Parameters of LoRA adapters of this rank at all seven matrices of every layer; fewer targets have fewer."""
        widths = 4 * self.hidden + 2 * self.query + 2 * self.key + 3 * (self.hidden + self.inner)
        return rank * self.layers * widths
