"""Records of model families say what transformers' own models have."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slimelite.models.families import FAMILIES, Family, family_of, is_true


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("family", [f for f in FAMILIES.values() if f.embedded], ids=lambda family: family.name)
def test_a_record_says_which_optional_weights_a_model_has(family: Family, biased: bool) -> None:
    config = AutoConfig.for_model(family.name, num_hidden_layers=1, attention_bias=biased, mlp_bias=biased)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert type(model).__name__ == family.architecture
    names = {name.removeprefix("model.layers.0.") for name, _ in model.named_parameters()}
    fields = vars(config)
    assert ("self_attn.q_proj.bias" in names) == is_true(family.qkv_bias, fields)
    assert ("self_attn.o_proj.bias" in names) == is_true(family.out_bias, fields)
    assert ("mlp.down_proj.bias" in names) == is_true(family.mlp_bias, fields)
    assert ("self_attn.q_norm.weight" in names) == family.qk_norm


def test_kin_share_a_record() -> None:
    assert family_of("qwen2_moe") is FAMILIES["qwen2"]
    assert family_of("qwen3") is FAMILIES["qwen3"]
    assert family_of("llama4") is None


def test_records_need_the_standard_library_alone() -> None:
    code = (
        "import sys, slimelite.models.families as _; print(sorted({'torch', 'numpy', 'transformers'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
