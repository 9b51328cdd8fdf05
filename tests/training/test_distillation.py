"""On-policy distillation in the trainer: against a plain loop, and the two kinds of teacher against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import exact_norms, on_ranks, one_rank, random_table, save_tiny_model, tiny_args
from torch import Tensor
from transformers import AutoModelForCausalLM

from slimelite.samples.table import SampleTable
from slimelite.training.trainer import Trainer

TEMPERATURE, COEF = 0.7, 0.4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of another shape, with the same vocabulary."""
    return save_tiny_model(tmp_path_factory.mktemp("teacher"), seed=1, num_hidden_layers=1, hidden_size=48)


def hf_log_probs(folder: Path, table: SampleTable) -> tuple[Any, list[Tensor]]:
    """A model in float64 and its log-probs of each row's response, from full logits."""
    hf = AutoModelForCausalLM.from_pretrained(folder).double()
    exact_norms(hf)
    found = []
    for row in range(len(table)):
        prompt, response = table.row_slice("prompt_tokens", row), table.row_slice("response_tokens", row)
        ids = torch.tensor(np.concatenate([prompt, response]), dtype=torch.int64)[None]
        log_p = torch.log_softmax(hf(ids).logits[0] / TEMPERATURE, -1)
        found.append(log_p[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0])
    return hf, found


@pytest.mark.parametrize("whitened", [False, True])
@pytest.mark.parametrize("zeros", [0.0, 1.0])
def test_the_gradient_is_that_of_a_plain_loop(model: Path, teacher: Path, zeros: float, whitened: bool) -> None:
    """Also when every advantage is 0 before the teacher speaks: those rows are computed, none is skipped."""
    table = random_table(zero_advantage=zeros, prompt=(16, 25))
    hf, student = hf_log_probs(model, table)
    judged = hf_log_probs(teacher, table)[1]
    masks = [torch.from_numpy(table.row_slice("loss_mask", r)) for r in range(len(table))]
    gaps = [(s - t).detach() for s, t in zip(student, judged, strict=True)]
    advantages = [table.advantage[r] - COEF * gap for r, gap in enumerate(gaps)]
    if whitened:
        trained = torch.cat([a[m] for a, m in zip(advantages, masks, strict=True)])
        advantages = [(a - trained.mean()) / (trained.var() + 1e-8).sqrt() for a in advantages]
    loss = sum(
        -(log_p * a)[m].sum() / max(1, int(m.sum())) for log_p, a, m in zip(student, advantages, masks, strict=True)
    ) / len(table)
    loss.backward()
    norm = sum(float(p.grad.square().sum()) for p in hf.parameters()) ** 0.5

    given = {"use_opd": True, "opd_type": "trainer", "opd_kl_coef": COEF, "opd_teacher_load": str(teacher)}
    given |= {"rollout_temperature": TEMPERATURE, "normalize_advantages": whitened, "lr": 0.0, "clip_grad": 0.0}
    with one_rank(tiny_args(model, **given, max_tokens_per_gpu=70)) as trainer:
        metrics = trainer.train(0, table)
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
    rows = [r for r in range(len(table)) if masks[r].any()]
    assert metrics["perf/computed_rows_ratio"] == len(rows) / len(table)
    for name, columns in (("opd_reverse_kl", gaps), ("teacher_log_probs", judged)):
        expected = float(np.mean([float(columns[r].detach()[masks[r]].mean()) for r in rows]))
        assert metrics[f"rollout/{name}"] == pytest.approx(expected, rel=1e-4), name
    assert metrics["perf/teacher_log_probs_time"] > 0


def test_a_server_and_the_trainer_may_be_the_same_teacher(model: Path, teacher: Path) -> None:
    table = random_table()
    table.teacher_log_probs = torch.cat(hf_log_probs(teacher, table)[1]).detach().numpy().astype(np.float32)
    common = {"use_opd": True, "rollout_temperature": TEMPERATURE}
    beside = tiny_args(model, **common, opd_type="trainer", opd_teacher_load=str(teacher))
    found = []
    for args in (beside, tiny_args(model, **common, opd_type="sglang")):
        with one_rank(args) as trainer:
            found.append([trainer.train(i, table) for i in range(2)])
    for a, b in zip(*found, strict=True):
        for name in ("train/grad_norm", "train/loss", "rollout/opd_reverse_kl", "rollout/teacher_log_probs"):
            assert a[name] == pytest.approx(b[name], rel=1e-4), name


def test_trained_tokens_that_no_teacher_scored_are_named(model: Path) -> None:
    table = random_table(masked=0.0)
    table.teacher_log_probs[:] = -2.0
    table.teacher_log_probs[table.response_offsets[3]] = np.nan
    with one_rank(tiny_args(model, use_opd=True, opd_type="sglang")) as trainer:
        with pytest.raises(ValueError, match=r"samples \[3\] have no teacher log-probs.*--rm-url"):
            trainer.train(0, table)
        table.loss_mask[table.response_offsets[3]] = False
        assert trainer.train(0, table)["train/grad_norm"] > 0, "a tool's tokens need no teacher"


def two_rollouts(trainer: Trainer, table: SampleTable) -> list[dict[str, float]]:
    return [trainer.train(i, table) for i in range(2)]


def test_two_ranks_distill_as_one(model: Path, teacher: Path) -> None:
    given = {"use_opd": True, "opd_type": "trainer", "opd_teacher_load": str(teacher), "normalize_advantages": True}
    table, args = random_table(), tiny_args(model, **given)
    with one_rank(args) as trainer:
        alone = two_rollouts(trainer, table)
    for a, b in zip(alone, on_ranks(2, two_rollouts, args, table), strict=True):
        for name in ("train/grad_norm", "rollout/opd_reverse_kl", "rollout/entropy", "rollout/log_probs"):
            assert a[name] == pytest.approx(b[name], rel=1e-4), name
