"""Records of model families (facts about each Hugging Face ``model_type``) and of loss masks.

::

    from slimelite.models.families import FAMILIES, Family

    FAMILIES.add(Family("mistral", "MistralForCausalLM", embedded=True))

These lines, in a file of ``--import-file``, let the embedded engine use its fast decoder for Mistral models. With this
record, the flags that describe a model's shape are also checked for Mistral models. Training and the engine's generic
decoder do not need a record. `slimelite.training.packing` tests a small copy of each model: can the model be trained,
can its rows be packed, does it need eager attention? A loss mask does not need a record either, because the mask
``auto`` fits every chat template.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slimelite.base.registry import Function, Registry

# config fields with the number of experts; the config of a mixture-of-experts model has one of them
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class Family:
    """The models of one ``model_type``.

    A field for a bias is True if all models of the family have the bias, and False if none has it. Otherwise its
    value is the name of the config field that tells whether the bias exists.

    Args:
        name: the ``model_type`` of config.json.
        architecture: the class of transformers for a new model that is defined only by flags.
        qkv_bias: the bias of the projections to queries, keys and values. ``out_bias``: the bias of the attention's
            output projection. ``mlp_bias``: the bias of the MLP's three projections.
        qk_norm: whether the queries and keys of each head are normalized.
        embedded: whether the fast decoder of the embedded engine can run the models. Such models must have norms before
            attention and MLP, rotary positions, a gated MLP and Llama's weight names. The fields and weights of experts
            must have Qwen3-MoE's names. Other models use the generic decoder.
        gguf: llama.cpp's name of the architecture, for `slimelite gguf`; empty if `slimelite gguf` does not support the
            family.
    """

    name: str
    architecture: str
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    embedded: bool = False
    gguf: str = ""


_BIAS = "attention_bias"
FAMILIES = Registry(
    "model family",
    "model_type",
    (
        Family(
            "llama",
            "LlamaForCausalLM",
            qkv_bias=_BIAS,
            out_bias=_BIAS,
            mlp_bias="mlp_bias",
            embedded=True,
            gguf="llama",
        ),
        Family("qwen2", "Qwen2ForCausalLM", qkv_bias=True, embedded=True, gguf="qwen2"),
        Family("qwen3", "Qwen3ForCausalLM", qkv_bias=_BIAS, out_bias=_BIAS, qk_norm=True, embedded=True, gguf="qwen3"),
        Family("qwen3_moe", "Qwen3MoeForCausalLM", qkv_bias=_BIAS, out_bias=_BIAS, qk_norm=True, embedded=True),
    ),
)


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of ``config`` (parsed config.json) that describes the language model."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def is_true(fact: bool | str, config: Mapping[str, object]) -> bool:
    """Whether a model with this ``config`` (parsed config.json) has a bias. ``fact``: the bias's field of `Family`."""
    return bool(config.get(fact)) if isinstance(fact, str) else fact


def family_of(model_type: str) -> Family | None:
    """The family with the name ``model_type``, or else the family whose name is a prefix of ``model_type``. Example:
    ``qwen2_moe`` gives ``qwen2``; both have the same attention."""
    kin = [family for name, family in FAMILIES.items() if model_type == name or model_type.startswith(f"{name}_")]
    return max(kin, key=lambda family: len(family.name), default=None)


@dataclass(frozen=True)
class LossMask:
    """Finds the assistant's tokens in a conversation.

    Args:
        name: the value of ``--loss-mask-type``.
        find: (chat reader, messages, tools) -> pieces of text, each with the spans that are trained on; see
            `slimelite.data.conversations.Piece`.
    """

    name: str
    find: Function


# auto is slimelite's mask. The others are slime's masks, each for the chat template of the model in its name
LOSS_MASKS = Registry(
    "loss mask",
    "--loss-mask-type",
    (
        LossMask(name, f"slimelite.data.conversations:{name}_mask")
        for name in ("auto", "qwen", "qwen3", "qwen3_5", "distill_qwen")
    ),
)
