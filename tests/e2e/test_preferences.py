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
from slimelite.rewards.reward_model import RewardModel
from slimelite.rewards.rules import Exchange
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


def test_a_reward_model_is_trained_and_read_and_replies_are_judged(task: Path, tmp_path: Path) -> None:
    """Both from rows of files, with a new model: what is saved opens as a reward model; KTO reads its labels."""
    common = (
        *("--hf-checkpoint", str(task / "model"), "--input-key", "messages", "--rollout-batch-size", "24"),
        *("--num-rollout", "12", "--lr", "3e-3", "--launcher", "local"),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "2048"),
    )
    pairs = ("--prompt-data", str(task / "pairs.parquet"), "--loss-type", "reward_model_loss")
    saved = ("--save-hf", str(tmp_path / "model"), "--run-dir", str(tmp_path / "scores"))
    assert train.main([*common, *pairs, *saved]) == 0
    accuracies = metrics(tmp_path / "scores", "train/rewards/accuracies")
    assert accuracies[-1] > 0.8
    row = pq.read_table(task / "pairs.parquet").to_pylist()[-1]
    model = RewardModel(str(tmp_path / "model"), "cpu")
    answers = [row[side][0]["content"] for side in ("chosen", "rejected")]
    scores = model.scores([Exchange("", answer, row["messages"]) for answer in answers])
    assert scores[0] > scores[1]

    talks = [  # labels as pandas writes a column with gaps
        {"messages": [*row["messages"], *row[side]], "good": float(side == "chosen")}
        for row in pq.read_table(task / "pairs.parquet").to_pylist()[:60]
        for side in ("chosen", "rejected")
    ]
    (tmp_path / "judged.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    judged = ("--prompt-data", str(tmp_path / "judged.jsonl"), "--loss-type", "kto_loss", "--ci-test")
    with pytest.raises(SystemExit):  # without the column of the labels
        train.main([*common, *judged, "--dry-run"])
    assert train.main([*common, *judged, "--label-key", "good", "--run-dir", str(tmp_path / "kto")]) == 0
    gaps = [metrics(tmp_path / "kto", f"train/rewards/{name}") for name in ("chosen", "rejected")]
    assert gaps[0][0] == pytest.approx(0, abs=1e-4)
    assert gaps[0][-1] > gaps[1][-1]
