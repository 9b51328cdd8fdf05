"""Whole runs of train.py on preference pairs."""

from __future__ import annotations

from pathlib import Path

import pytest

import train

from .conftest import metrics

pytestmark = pytest.mark.e2e


def test_preferences_are_learned_and_a_resumed_run_equals_a_straight_one(sft: Path, task: Path, tmp_path: Path) -> None:
    """DPO on generated pairs: the worked answer over a wrong guess."""

    def run(name: str, *flags: str) -> Path:
        common = (
            *("--hf-checkpoint", str(sft / "model"), "--prompt-data", str(task / "pairs.parquet")),
            *("--input-key", "messages", "--loss-type", "dpo_loss", "--dpo-beta", "0.5", "--lr", "3e-4", "--ci-test"),
            *("--rollout-shuffle", "--rollout-batch-size", "80", "--global-batch-size", "32", "--launcher", "local"),
            *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "2048", "--run-dir", str(tmp_path / name)),
        )
        assert train.main([*common, *flags]) == 0
        return tmp_path / name

    straight = run("straight", "--num-rollout", "4")
    assert metrics(straight, "train/global_batch_size") == [32.0, 32.0, 16.0] * 4
    margins, accuracies = (metrics(straight, f"train/rewards/{name}") for name in ("margins", "accuracies"))
    assert margins[0] == pytest.approx(0, abs=1e-4)
    assert margins[-1] > 0.5
    assert accuracies[-1] > 0.9
    assert metrics(straight, "train/dpo_loss")[-1] < 0.6
    assert metrics(straight, "rollout/raw_reward") == []

    checkpoints = str(tmp_path / "checkpoints")
    run("first", "--num-rollout", "2", "--save", checkpoints, "--save-interval", "2")
    resumed = run("resumed", "--num-rollout", "4", "--load", checkpoints)
    for name in ("train/dpo_loss", "train/grad_norm", "train/logps/chosen", "rollout/response_len/mean"):
        whole = metrics(straight, name)
        assert metrics(resumed, name) == whole[len(whole) // 2 :], name
