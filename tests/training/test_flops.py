"""Counted operations against those that torch sees."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import one_rank, random_table, save_tiny_model, tiny_args
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from slimelite.training.flops import ForwardFlops
from slimelite.training.model import PolicyModel


@pytest.mark.parametrize("tied", [True, False])
def test_forward_operations_are_those_of_torch(tmp_path: Path, tied: bool) -> None:
    folder = save_tiny_model(tmp_path, tie_word_embeddings=tied, hidden_size=64, intermediate_size=128)
    hf = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    length = 40
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        hf(torch.ones(1, length, dtype=torch.int64))
    flops = ForwardFlops.of(PolicyModel(hf))
    # transformers computes logits everywhere, and scores that the causal mask hides
    seen = (flops.per_token + flops.per_target) * length + flops.per_pair * length**2
    assert seen == pytest.approx(counter.get_total_flops(), rel=0.01)
    two = flops.total(np.array([10, 30]), np.array([4, 5]))
    assert two == flops.per_token * 40 + flops.per_target * 9 + flops.per_pair * (55 + 465)


def test_a_mixture_of_experts_is_not_counted(tmp_path: Path) -> None:
    hf = AutoModelForCausalLM.from_pretrained(save_tiny_model(tmp_path))
    hf.config.get_text_config = lambda: SimpleNamespace(num_experts=8)
    assert ForwardFlops.of(PolicyModel(hf)) is None


def test_speed_is_operations_over_seconds(tmp_path: Path) -> None:
    table, model = random_table(masked=0.0), save_tiny_model(tmp_path)
    given = {"use_kl_loss": True, "kl_loss_coef": 0.1, "use_reference": True, "num_steps_per_rollout": 2}
    with one_rank(tiny_args(model, **given, global_batch_size=8)) as trainer:
        metrics = trainer.train(0, table)
        flops = ForwardFlops.of(trainer.model)
    total = flops.total(table.total_lengths, table.response_lengths)
    for name, passes in (("actor_train", 3), ("log_probs", 1), ("ref_log_probs", 1)):
        counted = metrics[f"perf/{name}_tflops"] * metrics[f"perf/{name}_time"] * 1e12
        assert counted == pytest.approx(passes * total), name
