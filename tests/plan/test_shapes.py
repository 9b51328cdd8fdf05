"""Parameters counted from a config.json are those of the models that transformers builds from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slimelite.models.families import FAMILIES
from slimelite.plan.memory import Shapes
from slimelite.plan.time import forward_flops
from slimelite.training.model import ForwardFlops, PolicyModel

SMALL = {"num_hidden_layers": 2, "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "qwen2_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    | {"shared_expert_intermediate_size": 40},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def built(family: str, fields: dict[str, Any]) -> tuple[Any, Shapes]:
    config = AutoConfig.for_model(family, **SMALL | HEADS | fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = Shapes.of(config.to_dict())
    assert shapes is not None
    return model, shapes


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in EXPERTS])
def test_parameters_and_operations_are_those_of_the_model(family: str, biased: bool, tied: bool) -> None:
    fields = {"attention_bias": biased, "mlp_bias": biased, "tie_word_embeddings": tied}
    model, shapes = built(family, fields if family == "llama" else fields | {"head_dim": 32})
    assert sum(p.numel() for p in model.parameters()) == shapes.parameters
    assert forward_flops(shapes) == ForwardFlops.of(PolicyModel(model))


@pytest.mark.parametrize("family", EXPERTS)
def test_all_experts_are_parameters_and_some_are_used(family: str) -> None:
    fields = EXPERTS[family] | {"tie_word_embeddings": False}
    model, shapes = built(family, fields)
    count = sum(p.numel() for p in model.parameters())
    assert count == shapes.parameters
    # the same layers with the experts that a token goes through, and no others
    used = fields["num_experts_per_tok"] / next(
        v for k, v in fields.items() if k in ("num_experts", "num_local_experts")
    )
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    rest = sum(p.numel() for name, p in model.named_parameters() if ".experts." not in name and p.ndim == 2)
    assert shapes.layers * shapes.active == rest - shapes.outer + used * experts


@pytest.mark.parametrize(
    "fields", [{"kv_lora_rank": 8}, {"mamba_num_heads": 2}, {"mlp_only_layers": [0], "num_experts": 4}]
)
def test_layers_of_other_kinds_are_not_guessed(fields: dict[str, Any]) -> None:
    assert Shapes.of(SMALL | HEADS | fields) is None


@pytest.mark.parametrize("family", ["aria_text", "ernie4_5_moe"])
def test_experts_by_other_names_are_not_taken_for_a_dense_model(family: str) -> None:
    assert Shapes.of(AutoConfig.for_model(family).to_dict()) is None
