"""A step whose micro-batches share prefixes is the step of flat ones, whatever is computed from its rows.

`test_invariance.py`, `test_ranks.py` and `test_oracle.py` say the same of every estimator, correction and aggregation:
their prompts are shared too, and their micro-batches of one row each share nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exact import Gradient, assert_same_gradient, exact_step
from test_attention import tree_rows
from tiny import gradients, on_ranks, one_rank, save_tiny_model, tiny_args, weights_of
from transformers import AutoConfig, AutoModelForCausalLM
from trees import tokens_of, tree_table

from slimelite.samples.table import SampleTable
from slimelite.training.trainer import Trainer

REFERENCE = {"use_reference": True, "use_kl_loss": True, "kl_loss_coef": 0.1}
CASES: dict[str, dict[str, Any]] = {
    "grpo, tis, entropy, reference": {"correction": "tis", "tis_clip": 1.05, "entropy_coef": 0.01, **REFERENCE},
    "mis, opsm": {"correction": "mis", "mis_level": "sequence", "mis_upper_bound": 1.1, "use_opsm": True},
    "gspo": {"advantage_estimator": "gspo", "eps_clip": 0.02},
    "ppo, values": {"advantage_estimator": "ppo", "use_critic": True, "critic_lr": 1e-2, "lambd": 0.9},
    "sft": {"loss_type": "sft_loss"},
    "layers recomputed": {"gradient_checkpointing": True},
    "teacher": {"use_opd": True, "opd_type": "trainer"},
    "dpo": {"loss_type": "dpo_loss", **REFERENCE},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def conversations(*, pairs: bool = False) -> SampleTable:
    """Groups with a common header, equal rows, and rows that go on where another ended; ``pairs``: of two rows each."""
    rows = tree_rows()
    table = tree_table(rows[: len(rows) // 2 * 2])
    if pairs:
        table.rollout_id = table.unit_id = np.arange(len(table)) // 2
        table.reward = np.tile([1.0, 0.0], len(table) // 2)
        table.loss_mask[table.response_offsets[:-1]] = True
    return table


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_the_same(model: Path, name: str) -> None:
    given = CASES[name] | ({"opd_teacher_load": str(model)} if name == "teacher" else {})
    table = conversations(pairs=name == "dpo")
    found, ratios = [], []
    for shares in (True, False):
        with one_rank(tiny_args(model, **given, share_prefixes=shares, max_tokens_per_gpu=300)) as trainer:
            found.append(exact_step(trainer, table))
        with one_rank(tiny_args(model, **given, share_prefixes=shares, max_tokens_per_gpu=300)) as trainer:
            metrics = trainer.train(0, table)
            ratios.append(metrics["perf/computed_tokens_ratio"])
    (gradient, means), (expected, expected_means) = found
    assert_same_gradient(gradient, expected)
    assert means == pytest.approx(expected_means, rel=1e-9, abs=1e-12)
    assert ratios[0] < 0.6
    assert ratios[1] == 1


def fp32_step(trainer: Trainer, table: SampleTable) -> Gradient:
    trainer.forward_backward(table)
    return gradients(trainer)


def test_fp32_gradients_differ_by_rounding(model: Path) -> None:
    """1e-6 of the largest element of each weight's gradient."""
    table, found = conversations(), []
    for shares in (True, False):
        with one_rank(tiny_args(model, **REFERENCE, share_prefixes=shares, max_tokens_per_gpu=10_000)) as trainer:
            found.append(fp32_step(trainer, table))
    largest = max(float(g.abs().max()) for g in found[1].values())
    for name, theirs in found[1].items():
        assert (found[0][name] - theirs).abs().max() / largest < 1e-6, name


def test_two_ranks_are_as_one(model: Path) -> None:
    table = conversations()
    args = tiny_args(model, **REFERENCE, max_tokens_per_gpu=100)
    with one_rank(args) as trainer:
        alone = exact_step(trainer, table)
    both = on_ranks(2, exact_step, args, table)
    assert_same_gradient(both[0], alone[0])
    assert both[1] == pytest.approx(alone[1], rel=1e-9, abs=1e-12)


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_moe", EXPERTS),
        ("mistral", {"sliding_window": 20}),
        ("lfm2", {"layer_types": ["conv", "full_attention"], "tie_word_embeddings": True}),
    ],
)
def test_other_families_share_too(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "pad_token_id": 0}
    config = AutoConfig.for_model(family, **sizes, num_key_value_heads=2, num_hidden_layers=2, **changes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    own, table, right = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), conversations(), []
    for prompt, response in tokens_of(table):
        ids = torch.tensor([prompt + response])
        scores = own(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        right.append(scores.gather(-1, ids[0, 1:, None])[len(prompt) - 1 :, 0])
    with one_rank(tiny_args(tmp_path, max_tokens_per_gpu=10_000)) as trainer:
        assert trainer.model.shares
        torch.testing.assert_close(torch.from_numpy(trainer.log_probs(table)), torch.cat(right), rtol=1e-4, atol=1e-5)
        assert trainer.train(0, table)["perf/computed_tokens_ratio"] < 0.6


def test_a_deterministic_run_repeats_to_the_bit(model: Path) -> None:
    found = []
    for _ in range(2):
        with one_rank(tiny_args(model, **REFERENCE, max_tokens_per_gpu=200, deterministic_mode=True)) as trainer:
            metrics = [trainer.train(i, conversations())["train/loss"] for i in range(2)]
            found.append((metrics, weights_of(trainer)))
    torch.use_deterministic_algorithms(False)
    assert found[0][0] == found[1][0]
    assert all(torch.equal(mine, found[1][1][name]) for name, mine in found[0][1].items())
