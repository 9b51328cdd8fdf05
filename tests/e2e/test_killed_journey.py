"""A journey of three stages that is killed in each of them and started again ends with the same bits."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slimelite.base.lifecycle import read_status
from tests.data.tokenizers import byte_tokenizer

from .conftest import ROOT, metrics
from .test_pretraining import write_texts

pytestmark = pytest.mark.e2e
STAGES = ("base", "sft", "rl")
# the process dies before it trains on rollout 2 of the stage that DIES names, as if somebody had sent it SIGKILL
HOOK = """
import os, signal
from slimelite.training.trainer import Trainer

train = Trainer.train

def killed(self, rollout_id, table):
    if rollout_id == 2 and self.args.run_dir.endswith(os.environ["DIES"]):
        os.kill(os.getpid(), signal.SIGKILL)
    return train(self, rollout_id, table)

Trainer.train = killed
"""
BASE = """
    loss_type: pretrain_loss
    prompt_data: [train.jsonl]
    tokenizer: tokenizer
    token_cache: cache
    num_layers: 1
    hidden_size: 32
    ffn_hidden_size: 64
    num_attention_heads: 2
    vocab_size: 272
    qk_layernorm: true
    seq_length: 48
    optimizer: muon
    eval_bpb: [held.jsonl]
    eval_interval: 9
"""
SFT = """
    loss_type: sft_loss
    prompt_data: [talks.jsonl]
    input_key: messages
    tokenizer: tokenizer
"""
RL = """
    prompt_data: [talks.jsonl]
    input_key: question
    apply_chat_template: true
    custom_rm_path: reward.py:reward
    n_samples_per_prompt: 4
    rollout_max_response_len: 6
"""
COMMON = shlex.split("""
    --device cpu --launcher local --rollout-shuffle --rollout-batch-size 4 --num-rollout 4 --save-interval 1 --lr 1e-2
    --use-dynamic-batch-size --max-tokens-per-gpu 512 --import-file hook.py
""")
Journey = Callable[[str, str], int]


@pytest.fixture
def journey(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Journey]:
    """``journey(folder, dies)``: the exit status of ``train.py --stages``, forked from a process with its imports."""
    monkeypatch.chdir(tmp_path)
    byte_tokenizer().save_pretrained("tokenizer")
    write_texts()
    for name, text in zip(STAGES, (BASE, SFT, RL), strict=True):
        Path(f"{name}.yaml").write_text(text)
    Path("hook.py").write_text(HOOK)
    Path("reward.py").write_text("def reward(args, sample):\n    return sum(sample.tokens) % 3\n")
    asked = [[{"role": "user", "content": f"{i}+1="}] for i in range(16)]
    rows = [
        {"question": each, "messages": [*each, {"role": "assistant", "content": str(i + 1)}]}
        for i, each in enumerate(asked)
    ]
    Path("talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    warm = [sys.executable, str(ROOT / "tests" / "docs" / "warm.py"), "socket"]
    server = subprocess.Popen(warm, env=env)
    try:
        while not Path("socket").exists():
            assert server.poll() is None
            time.sleep(0.05)

        def run(folder: str, dies: str) -> int:
            files = [f"{name}.yaml" for name in STAGES]
            command = [*warm, str(ROOT / "train.py"), "--stages", *files, "--run-dir", folder, *COMMON]
            return subprocess.run(command, env={**env, "DIES": dies}, check=False).returncode

        yield run
    finally:
        server.kill()
        server.wait()


@pytest.mark.slow
def test_a_journey_that_is_killed_in_each_stage_ends_with_the_same_bits(journey: Journey, tmp_path: Path) -> None:
    assert journey("straight", "nowhere") == 0
    folders = [f"{number}-{name}" for number, name in enumerate(STAGES)]
    for folder in folders:
        assert journey("killed", folder) == 1
        status = read_status(tmp_path / "killed" / folder)
        assert status["status"] == "stopped without a word"
    assert journey("killed", "nowhere") == 0
    for folder in folders:
        one, two = (tmp_path / name / folder for name in ("straight", "killed"))
        weights, again = (load_file(run / "model" / "model.safetensors") for run in (one, two))
        assert all(torch.equal(weights[name], again[name]) for name in weights), folder
        assert metrics(one, "train/grad_norm") == metrics(two, "train/grad_norm"), folder
        assert len(metrics(one, "train/grad_norm")) >= 4
    assert metrics(tmp_path / "straight" / "0-base", "eval/bpb") == metrics(tmp_path / "killed" / "0-base", "eval/bpb")
    assert len(set(metrics(tmp_path / "straight" / "2-rl", "rollout/raw_reward"))) > 1
