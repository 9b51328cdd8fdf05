"""The ranks of torchrun train as those of Ray, and as one rank."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.data.tokenizers import byte_tokenizer

from .conftest import ROOT, TrainPy, metrics, run_process
from .test_pretraining import FLAGS, steps, write_texts

pytestmark = pytest.mark.e2e
WORDS = [word for word in FLAGS if word not in ("--launcher", "local")]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ENV = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    byte_tokenizer().save_pretrained("tokenizer")
    write_texts()
    return tmp_path


def torchrun(folder: Path, *words: str, status: int = 0) -> str:
    done = run_process(*TORCHRUN, str(ROOT / "train.py"), *words, env=ENV, cwd=folder)
    assert done.returncode == status, done.stderr + done.stdout
    return done.stdout + done.stderr


HELD = ("--eval-bpb", "held.jsonl", "--eval-interval", "2")


def test_two_ranks_of_torchrun_train_as_one(folder: Path, train_py: TrainPy) -> None:
    torchrun(folder, *WORDS, *HELD, "--run-dir", "two-run")
    assert train_py(*FLAGS, *HELD, "--run-dir", "one-run").returncode == 0
    one, two = (np.array([row["train/loss"] for row in steps(folder / name)]) for name in ("one-run", "two-run"))
    assert len(two) == 8
    assert np.abs(one - two).max() < 1e-5
    scores = [metrics(folder / name, "eval/bpb") for name in ("one-run", "two-run")]
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)


@pytest.mark.slow
def test_mistakes_are_said_once(folder: Path) -> None:
    printed = torchrun(folder, *WORDS, "--seq-length", "1", status=1)
    assert printed.count("--seq-length 1: must be at least 2") == 1


@pytest.mark.slow
def test_two_ranks_of_torchrun_go_on_to_the_same_bits(folder: Path) -> None:
    torchrun(folder, *WORDS, *HELD, *shlex.split("--save saved --save-interval 2 --save-hf two --run-dir two-run"))
    torchrun(folder, *WORDS, *HELD, *shlex.split("--load saved --ckpt-step 1 --save-hf again --run-dir again-run"))
    weights, resumed = load_file("two/model.safetensors"), load_file("again/model.safetensors")
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)


ROWS = shlex.split("""
    --device cpu --hf-checkpoint model --prompt-data rows.jsonl --input-key messages --global-batch-size 4
    --rollout-batch-size 8 --lr 1e-2 --num-rollout 2 --use-dynamic-batch-size --max-tokens-per-gpu 512
""")
LOSSES = {"pretrain_loss": WORDS, "sft_loss": ROWS, "dpo_loss": ROWS, "reward_model_loss": ROWS}


def write_rows(*, paired: bool) -> None:
    """A model, and conversations or questions with a better and a worse answer, in this folder."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16, "vocab_size": 272}
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=2)).save_pretrained("model")
    byte_tokenizer().save_pretrained("model")
    rows = []
    for i in range(16):
        asked = {"role": "user", "content": f"{i}+1="}
        right, wrong = ({"role": "assistant", "content": str(i + k)} for k in (1, 3))
        pair = {"messages": [asked], "chosen": [right], "rejected": [wrong]}
        rows.append(pair if paired else {"messages": [asked, right]})
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_torchrun_gives_rays_bits(folder: Path, loss: str) -> None:
    write_rows(paired=loss != "sft_loss")
    words = [*LOSSES[loss], "--loss-type", loss, "--deterministic-mode"]
    torchrun(folder, *words, "--save-hf", "torchrun", "--run-dir", "torchrun-run")
    ranks = shlex.split("--launcher ray --actor-num-gpus-per-node 2 --save-hf ray --run-dir ray-run")
    done = run_process(sys.executable, str(ROOT / "train.py"), *words, *ranks, env={**os.environ, **ENV}, cwd=folder)
    assert done.returncode == 0, done.stderr
    one, other = load_file("torchrun/model.safetensors"), load_file("ray/model.safetensors")
    assert all(torch.equal(one[name], other[name]) for name in one)
    norms = [[row["train/grad_norm"] for row in steps(folder / name)] for name in ("torchrun-run", "ray-run")]
    assert norms[0] == norms[1]
    assert min(norms[0]) > 0


@pytest.mark.slow
def test_stages_under_torchrun_are_the_runs_one_by_one(folder: Path) -> None:
    write_rows(paired=False)
    texts = {"loss_type": "pretrain_loss", "prompt_data": ["train.jsonl"], "seq_length": 48, "token_cache": "cache"}
    talks = {"loss_type": "sft_loss", "prompt_data": ["rows.jsonl"], "input_key": "messages", "tokenizer": "model"}
    stages = {"base": {**texts, "hf_checkpoint": "model"}, "sft": {**talks, "save_interval": 1}}
    for name, flags in stages.items():
        Path(f"{name}.yaml").write_text(json.dumps(flags))
    common = shlex.split("--device cpu --rollout-batch-size 8 --global-batch-size 4 --lr 1e-2 --num-rollout 2")
    journey = ["--stages", "base.yaml", "sft.yaml", "--run-dir", "journey", *common]
    torchrun(folder, *journey)
    assert torchrun(folder, *journey).count("is finished") == 2
    torchrun(folder, *common, "--config", "base.yaml", "--save-hf", "one", "--run-dir", "one-run")
    after = ["--hf-checkpoint", "one", "--save", "saved", "--save-hf", "two", "--run-dir", "two-run"]
    torchrun(folder, *common, "--config", "sft.yaml", *after)
    for single, stage in (("one", "0-base"), ("two", "1-sft")):
        weights, mine = (load_file(Path(path, "model.safetensors")) for path in (single, f"journey/{stage}/model"))
        assert all(torch.equal(weights[name], mine[name]) for name in weights), stage
