"""The ranks of torchrun train as those of Ray, and as one rank."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

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


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["pretrain_loss"])
def test_torchrun_gives_rays_bits(folder: Path, loss: str) -> None:
    words = [*WORDS, "--loss-type", loss, "--deterministic-mode"]
    torchrun(folder, *words, "--save-hf", "torchrun", "--run-dir", "torchrun-run")
    ranks = shlex.split("--launcher ray --actor-num-gpus-per-node 2 --save-hf ray --run-dir ray-run")
    done = run_process(sys.executable, str(ROOT / "train.py"), *words, *ranks, env={**os.environ, **ENV}, cwd=folder)
    assert done.returncode == 0, done.stderr
    one, other = load_file("torchrun/model.safetensors"), load_file("ray/model.safetensors")
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert [row["train/loss"] for row in steps(folder / "torchrun-run")] == [
        row["train/loss"] for row in steps(folder / "ray-run")
    ]
