"""The reference is the policy at step 0: in the same compute dtype their log-probs are equal to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import VOCAB, one_rank, tiny_args
from transformers import AutoConfig, AutoModelForCausalLM

from slimelite.sample import Sample
from slimelite.table import SampleTable
from slimelite.training.parallel import World
from slimelite.training.sums import table_scores

# what matters of each family at positions around 1,000: its rope base, its scaling, its head width
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "qwen3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "head_dim": 32},
    "llama": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    },
    "smollm2": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}},  # a llama
}


def save_model(family: str, folder: Path) -> Path:
    config = AutoConfig.for_model(
        "llama" if family == "smollm2" else family,
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.2,
        **FAMILIES[family],
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def long_row() -> SampleTable:
    """One row whose response ends at position 1,100."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, 1101).tolist()
    sample = Sample(group_index=0, index=0, tokens=tokens[:900], reward=1.0)
    sample.append_response_tokens(tokens[900:], log_probs=[-1.0] * 201)
    return SampleTable.from_samples([[sample]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_is_the_policy_at_step_0(
    family: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(World, "compute_dtype", dtype)  # bf16 is what a GPU's world computes in
    table = long_row()
    args = tiny_args(save_model(family, tmp_path), use_kl_loss=True, kl_loss_coef=0.1, use_reference=True)
    with one_rank(args) as trainer:
        assert trainer.reference is not None
        dealt = [[np.array([0])]]
        policy, _ = table_scores(trainer.model, table, dealt, trainer.world, 1.0)
        with trainer.reference.weights() as model:
            assert {p.dtype for p in model.parameters()} == {dtype}
            assert {b.dtype for b in model.buffers()} == {torch.float32}
            reference, _ = table_scores(model, table, dealt, trainer.world, 1.0)
    assert torch.isfinite(policy).all()
    assert torch.equal(policy, reference)
