from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_run import make_args

from slimelite.algorithms.losses import LOSSES, LossType
from slimelite.arguments import Args, EvalDataset
from slimelite.arguments.flags import all_flags
from slimelite.tracking.console import batch_identity, eval_text, method, run_facts, summary


def test_batch_identity_counts_the_step_that_is_not_full() -> None:
    run = Path("runs/x")
    assert batch_identity(make_args(run)) == "4 prompts x 2 samples = 8 = 1 step of 8"
    assert batch_identity(make_args(run, global_batch_size=3)) == "4 prompts x 2 samples = 8 = 2 steps of 3 + 1 of 2"
    assert batch_identity(make_args(run, global_batch_size=64)) == "4 prompts x 2 samples = 8 = 1 step of 8"


def test_facts_of_a_resumed_run_and_of_half_a_run() -> None:
    run = Path("runs/x")
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.001}
    facts = run_facts(make_args(run, start_rollout_id=3, **kl))
    assert facts["rollouts"] == "5, numbered 0 to 4 in files, continuing at 3"
    assert facts["method"] == "grpo, adam lr 1e-06, KL loss 0.001 (low_var_kl)"
    assert "plugins" not in facts
    own = "slimelite.rollout.generate.offline_rollout"
    sft = run_facts(make_args(run, loss_type="sft_loss", rollout_function_path=own, **kl))
    assert sft["method"] == "SFT, adam lr 1e-06"
    assert "plugins" not in sft
    own_loss = {"loss_type": "custom_loss", "custom_loss_function_path": "mine.py:loss", "load_in_4bit": True}
    assert run_facts(make_args(run, **own_loss, lora_rank=8))["method"] == (
        "grpo, loss mine.py:loss, QLoRA of rank 8, adam lr 1e-06"
    )
    methods = {"kto_loss": "KTO, beta 0.1", "orpo_loss": "ORPO, lambda 0.1", "reward_model_loss": "reward model"}
    methods |= {"pretrain_loss": "pretraining"}
    for loss, words in methods.items():
        assert run_facts(make_args(run, loss_type=loss))["method"] == f"{words}, adam lr 1e-06"
    assert facts["device"] == "cpu, 1 training rank, 1 embedded engine, Ray"
    train_only = make_args(run, debug_train_only=True, launcher="local", eval_datasets=())
    assert run_facts(train_only)["device"] == "cpu, 1 training rank, in one process"
    assert "eval" not in run_facts(train_only)
    two = (EvalDataset("a", "a.jsonl"), EvalDataset("b", "b.jsonl"))
    assert run_facts(make_args(run, eval_datasets=two))["eval"] == "a (a.jsonl), b (b.jsonl)"


def test_the_banner_names_all_code_of_the_user() -> None:
    flags = [flag for flag in all_flags(Args).values() if flag.metavar == "PLUGIN"]
    named = {name for name in all_flags(Args) if name.startswith("custom_") and name.endswith("_path")}
    assert named - {flag.name for flag in flags} == {"custom_config_path"}, "a YAML"
    one: dict[str, Any] = {
        flag.name: [f"{flag.name}.py:f", "a.b"] if flag.many else f"{flag.name}.py:f" for flag in flags
    }
    files = {"import_file": ["mine.py", "more.py"], "args_group": ["mine.py:Args"]}
    evals = (
        EvalDataset("a", "a.jsonl", custom_rm_path="eval.py:score", custom_generate_function_path="eval.py:answer"),
        EvalDataset("b", "b.jsonl", custom_rm_path=one["custom_rm_path"]),
    )
    shown = run_facts(make_args(Path("runs/x"), eval_datasets=evals, **one, **files))["plugins"].split(", ")
    assert sorted(shown) == sorted(
        [
            *(f"{flag.option} {flag.name}.py:f" for flag in flags),
            *(f"{flag.option} a.b" for flag in flags if flag.many),
            *("--import-file mine.py", "--import-file more.py", "--args-group mine.py:Args"),
            *("eval dataset a eval.py:score", "eval dataset a eval.py:answer"),
        ]
    )


def test_the_method_names_a_loss_and_advantages_of_your_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LOSSES, "calm", LossType("calm", "GRPO, and a term of its own", policy=True))
    args = make_args(Path("runs/x"), loss_type="calm", custom_advantage_function_path="mine.py:advantages")
    assert method(args) == "grpo, advantages mine.py:advantages, loss calm, adam lr 1e-06"


def test_an_evaluation_in_words() -> None:
    metrics = {
        "eval/gsm8k": 0.4125,
        "eval/gsm8k-stderr": 0.0136,
        "eval/gsm8k/response_len/mean": 119.6,
        "eval/gsm8k-truncated_ratio": 0.02,
        "eval/gsm8k-pass@2": 0.5,
        "eval/gsm8k-pass@16": 0.75,
        "eval/gsm8k-pass@16-stderr": 0.0124,
        "eval/svamp": 0.3,
        "eval/reward_errors": 2.0,
    }
    shown = "gsm8k 0.412 ±0.014 (length 120, truncated 2%, pass@16 0.750 ±0.012), svamp 0.300"
    assert eval_text(metrics) == shown


def test_the_end_of_a_run_in_words() -> None:
    evals = [{"kind": "eval", "eval/step": s, "eval/sums": v} for s, v in ((-1, 0.25), (9, 0.9), (19, 0.875))]
    assert summary(evals, "rollout") == {
        "eval/sums": "first 0.250, best 0.900 after 10 rollouts (rollout 9 in files), last 0.875"
    }
    with_error = [record | {"eval/sums-stderr": 0.03} for record in evals]
    assert summary(with_error, "rollout") == {
        "eval/sums": "first 0.250 ±0.030, best 0.900 ±0.030 after 10 rollouts (rollout 9 in files), last 0.875 ±0.030"
    }
    worse = [{"kind": "eval", "eval/step": s, "eval/sums": v} for s, v in ((-1, 0.25), (9, 0.2))]
    assert summary(worse, "rollout") == {"eval/sums": "first 0.250, best 0.250 before training, last 0.200"}
    rewards = [{"kind": "rollout", "rollout/step": s, "rollout/raw_reward": v} for s, v in ((0, 0.1), (1, 0.2))]
    assert summary(rewards, "rollout") == {"reward": "first 0.100, best 0.200 in rollout 2 (1 in files), last 0.200"}
    losses = [{"kind": "train", "train/step": s, "train/loss": v} for s, v in ((0, 0.75), (1, 0.5))]
    assert summary(losses, "batch") == {"loss": "first 0.750, last 0.500"}
    assert summary(evals, "batch")["eval/sums"].endswith("best 0.900 after 10 batches (batch 9 in files), last 0.875")
    assert summary([], "rollout") == {}
