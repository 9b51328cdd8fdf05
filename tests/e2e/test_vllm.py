"""Whole runs of train.py on vLLM. Not part of the default run: docs/install.md says how to run it."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import train
from slimelite.samples.table import SampleTable

from .conftest import metrics
from .test_deaths import ROLLOUTS, assert_nothing_left, hurt, start

pytestmark = [pytest.mark.e2e, pytest.mark.vllm]
# vLLM's CPU attention has no heads smaller than 32; with these the weights have the same shapes
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
REWARD = "def grade(args, sample, **kwargs):\n    return float(sample.index % 2)\n"


@pytest.mark.parametrize("launcher", ["local", "ray"])
def test_engine_and_trainer_agree_after_every_sync(grpo_args: list[str], tmp_path: Path, launcher: str) -> None:
    model, reward = tmp_path / "model", tmp_path / "reward.py"
    shutil.copytree(grpo_args[grpo_args.index("--hf-checkpoint") + 1], model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | HEADS))
    reward.write_text(REWARD)
    flags = ["--hf-checkpoint", str(model), "--custom-rm-path", f"{reward}:grade"]
    flags += ["--rollout-backend", "vllm", "--launcher", launcher, "--num-rollout", "4", "--ci-test"]
    assert train.main([*grpo_args, *flags, "--check-weight-update-equal", "--run-dir", str(tmp_path)]) == 0
    for name in ("train/train_rollout_logprob_abs_diff", "perf/update_weights_logprob_abs_diff"):
        gaps = metrics(tmp_path, name)
        assert len(gaps) == 4
        assert max(gaps) < 1e-4, name
    assert min(metrics(tmp_path, "train/grad_norm")) > 0
    for rollout in range(4):
        table = SampleTable.from_parquet(tmp_path / "rollouts" / f"{rollout:07d}.parquet")
        assert set(table.weight_versions.tolist()) == {rollout}


@pytest.mark.slow
def test_a_killed_engine_comes_back_with_the_current_weights(small: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        config = AutoConfig.from_pretrained(small / "model", hidden_size=64)  # heads of 32
        AutoModelForCausalLM.from_config(config).save_pretrained(small / "model")
    process = start(
        small, "--rollout-backend", "vllm", "--no-deterministic-mode", "--ci-test", "--check-weight-update-equal"
    )
    session, members = hurt(process, small, "ray::engine", signal.SIGKILL)
    out, _ = process.communicate(timeout=500)
    assert process.returncode == 0, out
    assert "Traceback" not in out
    logs = "".join(file.read_text() for file in [small / "run" / "log.txt", *(small / "run" / "logs").glob("*.log")])
    assert "engine 0 has died" in logs
    assert "and is in use again" in logs
    gaps = metrics(small / "run", "perf/update_weights_logprob_abs_diff")
    assert (len(gaps), max(gaps) < 1e-4) == (ROLLOUTS, True), gaps
    assert_nothing_left(session, members)
