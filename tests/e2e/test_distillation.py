"""On-policy distillation by whole runs of train.py: the student comes back to the teacher it was bent away from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from slimelite.data.tokenizer import load_tokenizer
from slimelite.engines.embedded import EmbeddedEngine

from .conftest import metrics

pytestmark = pytest.mark.e2e
Run = Callable[..., Path]
PURE = ("--use-opd", "--n-samples-per-prompt", "1", "--rollout-batch-size", "128", "--max-tokens-per-gpu", "4096")


@pytest.fixture(scope="module")
def student(sft: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The SFT model with noise on its weights."""
    folder = tmp_path_factory.mktemp("student")
    model = AutoModelForCausalLM.from_pretrained(sft / "model")
    torch.manual_seed(0)
    for weight in model.parameters():
        weight.data.add_(0.3 * weight.std(correction=0) * torch.randn_like(weight))
    model.save_pretrained(folder)
    load_tokenizer(str(sft / "model")).save_pretrained(folder)
    return str(folder)


def test_the_student_moves_to_its_teacher(local_run: Run, sft: Path, student: str) -> None:
    """Without the task's reward in the advantages, which is reported all the same."""
    run = local_run(
        *("trainer", *PURE, "--hf-checkpoint", student, "--opd-type", "trainer", "--ci-test"),
        *("--opd-teacher-load", str(sft / "model"), "--num-rollout", "10", "--lr", "1e-3"),
    )
    gap = metrics(run, "rollout/opd_reverse_kl")
    assert gap[0] > 0.2
    assert sum(gap[-3:]) / 3 < gap[0] / 4
    assert metrics(run, "rollout/rewards") == [0.0] * 10
    assert max(metrics(run, "rollout/raw_reward")) > 0


def test_a_server_teaches_what_the_trainer_does(local_run: Run, sft: Path, student: str) -> None:
    """Also at a temperature, and beside the task's reward."""
    engine = EmbeddedEngine(str(sft / "model"))
    url = asyncio.run(engine.start_http())
    common = ("--hf-checkpoint", student, "--deterministic-mode", "--use-opd", "--num-rollout", "2")
    common += ("--rollout-temperature", "0.8", "--num-steps-per-rollout", "2")
    try:
        server = local_run("server", *common, "--opd-type", "sglang", "--rm-url", url)
    finally:
        asyncio.run(engine.close())
    beside = local_run("beside", *common, "--opd-type", "trainer", "--opd-teacher-load", str(sft / "model"))
    for name in ("rollout/teacher_log_probs", "rollout/opd_reverse_kl", "train/grad_norm"):
        assert metrics(server, name) == pytest.approx(metrics(beside, name), rel=1e-4, abs=1e-4), name
