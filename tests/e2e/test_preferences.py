"""Whole runs of train.py on preference pairs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import train
from slimelite.data.tokenizer import load_tokenizer
from slimelite.samples.table import SampleTable

from .conftest import metrics, run_process

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


def test_pairs_made_of_a_runs_own_rollouts(
    grpo_args: list[str], sft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A saved response ends with its end token, and is trained on as it was sampled: with that one."""
    sampled, path = tmp_path / "sampled", tmp_path / "pairs.parquet"
    flags = ("--launcher", "local", "--debug-rollout-only", "--num-rollout", "1", "--run-dir", str(sampled))
    assert train.main([*grpo_args, *flags]) == 0
    made = run_process(sys.executable, "-m", "slimelite.apps.command", "make-pairs", str(sampled), "-o", str(path))
    assert made.returncode == 0, made.stderr
    rows = pq.read_table(path).to_pylist()
    assert len(rows) > 2
    assert all(row["score_chosen"] > row["score_rejected"] for row in rows)
    saved = SampleTable.from_parquet(sampled / "rollouts" / "0000000.parquet")
    tokens = {
        (saved.prompt[row], saved.response[row]): [
            saved.row_slice(f"{part}_tokens", row).tolist() for part in ("prompt", "response")
        ]
        for row in range(len(saved))
    }
    end = load_tokenizer(str(sft / "model")).eos_token
    assert all(row[reply].endswith(end) for row in rows for reply in ("chosen", "rejected"))
    (tmp_path / "chat.jsonl").write_text(
        "".join(json.dumps({**row, "prompt": [{"role": "user", "content": "3+4=?"}]}) + "\n" for row in rows)
    )
    for data in (path, tmp_path / "chat.jsonl"):
        run = tmp_path / data.stem
        command = (
            *("--hf-checkpoint", str(sft / "model"), "--prompt-data", str(data), "--input-key", "prompt"),
            *("--loss-type", "dpo_loss", "--rollout-batch-size", str(len(rows)), "--lr", "3e-4", "--launcher", "local"),
            *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "2048", "--num-rollout", "1", "--run-dir", str(run)),
        )
        capsys.readouterr()
        assert train.main([*command, "--dry-run"]) == 0
        (shown,) = [line for line in capsys.readouterr().out.splitlines() if "the first pair: chosen" in line]
        assert shown.count(end) == 2, "one a reply"
        assert train.main([*command]) == 0
        assert metrics(run, "train/dpo_loss") == [pytest.approx(np.log(2), abs=1e-3)]
        trained = SampleTable.from_parquet(run / "rollouts" / "0000000.parquet")
        assert all(response.count(end) == 1 for response in trained.response)
        if data is path:
            for row in range(len(trained)):
                prompt, response = tokens[trained.prompt[row], trained.response[row]]
                assert trained.row_slice("prompt_tokens", row).tolist() == prompt
                assert trained.row_slice("response_tokens", row).tolist() == response
