"""Architecture flags against a config.json, and as the definition of a new model."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from slimelite.arguments import ArchitectureArgs, model_config_from_flags
from slimelite.models.files import check_architecture
from tests.arguments.conftest import QWEN

RIGHT = ArchitectureArgs(
    num_layers=2,
    hidden_size=16,
    ffn_hidden_size=32,
    num_attention_heads=4,
    group_query_attention=True,
    num_query_groups=2,
    vocab_size=512,
    normalization="RMSNorm",
    norm_epsilon=1e-6,
    rotary_base=1000000.0,
    swiglu=True,
    add_qkv_bias=True,
    disable_bias_linear=True,
)
LLAMA3 = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 500000.0,
    "rope_scaling": {"rope_type": "llama3", "factor": 32.0},
}


def test_what_agrees_passes() -> None:
    assert check_architecture(RIGHT, QWEN) == []
    assert check_architecture(ArchitectureArgs(), QWEN) == []
    rotary = dataclasses.replace(RIGHT, use_rotary_position_embeddings=True, position_embedding_type="rope")
    assert check_architecture(rotary, QWEN) == []
    gpt2 = {"model_type": "gpt2", "layer_norm_epsilon": 1e-5}
    assert len(check_architecture(ArchitectureArgs(use_rotary_position_embeddings=True), gpt2)) == 1
    assert check_architecture(RIGHT, {"text_config": QWEN}) == []


@pytest.mark.parametrize(
    ("change", "said", "has"),
    [
        ({"num_layers": 3}, "3", "2"),
        ({"hidden_size": 24}, "24", "16"),
        ({"ffn_hidden_size": 48}, "48", "32"),
        ({"num_attention_heads": 8}, "8", "4"),
        ({"num_query_groups": 4}, "4", "2"),
        ({"kv_channels": 8}, "8", "4"),
        ({"vocab_size": 500}, "500", "512"),
        ({"norm_epsilon": 1e-5}, "1e-05", "1e-06"),
        ({"rotary_base": 10000.0}, "10000.0", "1000000.0"),
        ({"rotary_percent": 0.5}, "0.5", "1.0"),
        ({"normalization": "LayerNorm"}, "LayerNorm", "RMSNorm"),
        ({"max_position_embeddings": 128}, "128", "256"),
        ({"untie_embeddings_and_output_weights": True}, "True", "False"),
        ({"qk_layernorm": True}, "True", "False"),
        ({"add_qkv_bias": False}, "False", "True"),
        ({"use_rope_scaling": True}, "True", "False"),
        ({"position_embedding_type": "learned_absolute"}, "learned_absolute", "rope"),
    ],
)
def test_a_mismatch_names_both_values(change: dict[str, Any], said: str, has: str) -> None:
    (problem,) = check_architecture(dataclasses.replace(RIGHT, **change), QWEN)
    (name,) = change
    assert problem == f"--{name.replace('_', '-')} is {said} but the model's config.json has {has}"


def test_llama_with_stretched_rope() -> None:
    right = ArchitectureArgs(
        num_layers=2,
        kv_channels=8,
        rotary_base=500000.0,
        use_rope_scaling=True,
        rotary_scaling_factor=32.0,
        untie_embeddings_and_output_weights=True,
    )
    assert check_architecture(right, LLAMA3) == []
    in_one = {k: v for k, v in LLAMA3.items() if k not in ("rope_theta", "rope_scaling")}
    in_one["rope_parameters"] = {"rope_type": "llama3", "factor": 32.0, "rope_theta": 500000.0}
    assert check_architecture(right, in_one) == []
    assert len(check_architecture(dataclasses.replace(right, rotary_scaling_factor=8.0), LLAMA3)) == 1


@pytest.mark.parametrize(
    ("flags", "family"),
    [
        ({"add_qkv_bias": True}, "qwen2"),
        ({"add_qkv_bias": False, "qk_layernorm": True}, "qwen3"),
        ({"add_qkv_bias": False}, "llama"),
    ],
)
def test_a_new_model_is_the_one_described(flags: dict[str, Any], family: str) -> None:
    """The config round-trips through transformers and builds a model with the right parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    args = dataclasses.replace(RIGHT, **flags)
    config = model_config_from_flags(args)
    assert check_architecture(args, config) == []
    hf = AutoConfig.for_model(**config)
    assert hf.model_type == family
    assert check_architecture(args, hf.to_dict()) == []
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf)
    attention = model.model.layers[0].self_attn
    assert (attention.q_proj.bias is not None) == (family == "qwen2")
    assert hasattr(attention, "q_norm") == (family == "qwen3")
    assert model.config.rope_parameters["rope_theta"] == 1000000.0
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert len(model.model.layers) == 2


def test_stretched_rope_of_a_new_model() -> None:
    args = dataclasses.replace(RIGHT, add_qkv_bias=False, use_rope_scaling=True, rotary_scaling_factor=32.0)
    assert check_architecture(args, model_config_from_flags(args)) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_layers": None, "vocab_size": None}, "--num-layers, --vocab-size"),
        ({"normalization": "LayerNorm"}, "RMSNorm"),
        ({"qk_layernorm": True}, "not both"),
        ({"rotary_percent": 0.5}, "--rotary-percent 0.5"),
    ],
)
def test_what_a_new_model_cannot_be(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        model_config_from_flags(dataclasses.replace(RIGHT, **change))
