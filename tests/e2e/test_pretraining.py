"""Pretraining from documents to a saved model, in one process."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from slimelite.apps.runs import Run
from slimelite.arguments import Args
from slimelite.data.documents import Documents
from tests.data.tokenizers import byte_tokenizer

from .conftest import TrainPy, metrics

pytestmark = pytest.mark.e2e
FLAGS = shlex.split("""
    --launcher local --device cpu --loss-type pretrain_loss --tokenizer tokenizer --token-cache cache
    --prompt-data train.jsonl --rollout-shuffle --num-layers 2 --hidden-size 32 --ffn-hidden-size 64
    --num-attention-heads 2 --vocab-size 272 --qk-layernorm --seq-length 48 --global-batch-size 3
    --num-steps-per-rollout 2 --lr 1e-2 --num-rollout 4
""")
Pretrain = Callable[..., Path]


def texts(count: int, seed: int) -> list[str]:
    words = ("the", "loss", "of", "a", "token", "is", "its", "surprise", "and", "falls", "\n")
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(words, int(rng.integers(1, 24)))) + "." for _ in range(count)]


def write_texts() -> None:
    """Documents to train on and held-out ones, in this folder."""
    for name, seed in (("train", 0), ("held", 1)):
        Path(f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(60, seed)))


@pytest.fixture
def pretrain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train_py: TrainPy) -> Pretrain:
    """``pretrain(name, *flags)``: the run folder of a short run."""
    monkeypatch.chdir(tmp_path)
    byte_tokenizer().save_pretrained("tokenizer")
    write_texts()

    def run(name: str, *flags: str) -> Path:
        done = train_py(*FLAGS, "--run-dir", name, *flags)
        assert done.returncode == 0, done.stderr
        return tmp_path / name

    return run


def plain_loop(steps: int, **changes: Any) -> tuple[list[float], torch.nn.Module]:
    """The losses of the same run by a plain loop: each row alone through transformers, their sum over tokens."""
    config = json.loads(Path("plain/new_model/config.json").read_text())
    torch.manual_seed(Args().seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0)
    args = {"prompt_data": ["train.jsonl"], "loss_type": "pretrain_loss", "seq_length": 48, "token_cache": "cache"}
    source = Documents(Args(**args, rollout_shuffle=True, tokenizer_workers=1, **changes), "tokenizer")
    losses = []
    for _ in range(steps):
        table, _ = source.take(3)
        total = torch.zeros(())
        for row in range(len(table)):
            ids = [*table.row_slice("prompt_tokens", row), *table.row_slice("response_tokens", row)]
            ids = torch.tensor(np.array(ids, np.int64))[None]
            log_probs = model(ids).logits[0, :-1].log_softmax(-1)
            mask = torch.from_numpy(table.row_slice("loss_mask", row).copy())
            total = total - log_probs.gather(1, ids[0, 1:, None])[:, 0][mask].sum()
        loss = total / int(table.loss_mask.sum())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("attention", ["inside", "across"])
def test_a_plain_loop_gives_the_same_losses(pretrain: Pretrain, attention: str) -> None:
    across = attention == "across"
    run = pretrain("plain", "--save-hf", "model", *["--cross-document-attention"] * across)
    losses, model = plain_loop(8, cross_document_attention=across)
    found = [row["train/loss"] for row in steps(run)]
    assert np.abs(np.array(found) - losses).max() < 1e-5
    assert found[-1] < 0.8 * found[0]
    saved = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained("plain/new_model")
    assert tokenizer.chat_template == byte_tokenizer().chat_template
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        assert getattr(saved.config, name) == getattr(saved.generation_config, name) == getattr(tokenizer, name), name
    assert Path("model/generation_config.json").is_file()
    assert tokenizer.eos_token_id is not None
    for (name, one), other in zip(model.named_parameters(), saved.parameters(), strict=True):
        assert (one - other).abs().max() < 1e-4, name


def steps(run: Path) -> list[dict[str, float]]:
    """The metrics of each optimizer step."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "train/loss" in row]


def test_a_run_goes_on_to_the_same_bits_and_refuses_other_documents(pretrain: Pretrain, train_py: TrainPy) -> None:
    saved = ("--save", "saved", "--save-interval", "1")
    straight = pretrain("straight", *saved, "--save-hf", "straight_model")
    before = Path("straight_model/model.safetensors")
    resumed = pretrain("resumed", "--load", "saved", "--ckpt-step", "1", "--save-hf", "resumed_model")
    weights, again = load_file(before), load_file("resumed_model/model.safetensors")
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert [row["train/loss"] for row in steps(resumed)] == [row["train/loss"] for row in steps(straight)][4:]
    assert metrics(resumed, "rollout/tokens") == metrics(straight, "rollout/tokens")[2:]
    operations = Run.read(straight).series["rollout/flops"][1]  # what the page draws curves over
    assert np.diff(operations, prepend=0).tolist() == metrics(straight, "perf/actor_train_flops")
    parameters = 2 * (4 * 32 * 32 + 3 * 32 * 64) + 272 * 32
    trained = metrics(straight, "rollout/tokens")[-1]
    assert 6 * parameters * trained < operations[-1] < 8 * parameters * trained
    Path("train.jsonl").write_text(json.dumps({"text": "other"}))
    done = train_py(*FLAGS, "--run-dir", "other", "--load", "saved", "--num-rollout", "6")
    assert done.returncode == 1
    assert "the content of path 0 of --prompt-data changed" in done.stderr


def test_bits_per_byte_are_those_of_a_model_that_reads_each_text_alone(pretrain: Pretrain) -> None:
    run = pretrain(
        *("bpb", "--eval-bpb", "held.jsonl", "--eval-interval", "2", "--save-hf", "model", "--seq-length", "999"),
        *("--early-stop-patience", "1"),  # fewer bits are better, so that it never acts here
    )
    model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
    tokenizer, nats, size = byte_tokenizer(), 0.0, 0
    for text in texts(60, 1):
        ids = [tokenizer.bos_token_id, *tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            nats += float(model(torch.tensor([ids]), labels=torch.tensor([ids])).loss) * (len(ids) - 1)
        size += len(text.encode())
    found = metrics(run, "eval/bpb")
    assert len(found) == 3
    assert found[-1] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert found[-1] < found[0]


def test_a_run_whose_bits_per_byte_do_not_fall_ends_early(pretrain: Pretrain) -> None:
    flags = ("--eval-bpb", "held.jsonl", "--eval-interval", "1", "--early-stop-patience", "1", "--lr", "1e-30")
    run = pretrain("early", *flags)
    assert len(metrics(run, "eval/bpb")) == 2, "before training, and after the first of four rollouts"
    assert "eval/bpb" in json.loads((run / "status.json").read_text())["message"]
