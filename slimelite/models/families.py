"""Model families, which are facts about each Hugging Face ``model_type``, and the ways to find a loss mask.

::

    from slimelite.models.families import FAMILIES, Family

    FAMILIES.add(Family("mistral", "MistralForCausalLM", embedded=True))

in a file of ``--import-file`` gives Mistral models the fast decoder of the embedded engine. Flags of a model's shape
are then checked against such models too. Training needs no record, and neither does the engine's generic decoder.
`slimelite.training.packing` tests a small copy of each model: whether it can be trained, packed or only with eager
attention. The loss mask of a conversation needs no record either, because ``auto`` fits every chat template.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slimelite.base.registry import Function, Registry

# config fields with the number of experts of a mixture-of-experts model
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class Family:
    """The models of one ``model_type``.

    A bias is True or False for all models of the family, or the name of the config field that says whether it exists.

    Args:
        name: the ``model_type`` of config.json.
        architecture: the class of transformers for a new model that flags alone define.
        qkv_bias: of the projections to queries, keys and values. ``out_bias``: of the attention's output projection.
            ``mlp_bias``: of the MLP's three projections.
        qk_norm: whether the queries and keys of each head are normalized.
        embedded: whether the fast decoder of the embedded engine can run it. It needs norms before attention and MLP,
            rotary positions, a gated MLP and Llama's weight names. If it has experts, their fields and weights have
            Qwen3-MoE's names. Other models use the generic decoder.
        gguf: llama.cpp's name of the architecture, for `slimelite gguf`; empty if that cannot write such models.
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
    """Whether ``fact``, a bias of a family, holds for a model with this ``config`` (parsed config.json)."""
    return bool(config.get(fact)) if isinstance(fact, str) else fact


def family_of(model_type: str) -> Family | None:
    """The family called ``model_type``, or else the family whose name is its prefix: ``qwen2_moe`` has Qwen2's
    attention."""
    kin = [family for name, family in FAMILIES.items() if model_type == name or model_type.startswith(f"{name}_")]
    return max(kin, key=lambda family: len(family.name), default=None)


@dataclass(frozen=True)
class LossMask:
    """Finds the assistant's tokens in a conversation.

    Args:
        name: what ``--loss-mask-type`` takes.
        find: (chat reader, messages, tools) -> pieces of text, each with the spans that are trained on; see
            `slimelite.data.conversations.Piece`.
    """

    name: str
    find: Function


# all but auto are slime's masks, each for the chat template of the model that it is named after
LOSS_MASKS = Registry(
    "loss mask",
    "--loss-mask-type",
    (
        LossMask(name, f"slimelite.data.conversations:{name}_mask")
        for name in ("auto", "qwen", "qwen3", "qwen3_5", "distill_qwen")
    ),
)
