"""Learning rates, Muon, and what holds for every optimizer; `test_oracle.py` has AdamW."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import gradients, one_rank, random_table, save_tiny_model, tiny_args, weights_of

from slimelite.arguments import OptimizerArgs
from slimelite.training import optimizer as optimizers
from slimelite.training.optimizer import LrSchedule, Muon, orthogonalize


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def test_clipping_bounds_the_gradient_and_reports_its_norm(model: Path) -> None:
    table, norms = random_table(), []
    with one_rank(tiny_args(model, clip_grad=0.01)) as trainer:
        adam = trainer.optimizers.all[0]
        step = adam.step

        def watched() -> None:
            norms.append(sum(float(g.square().sum()) for g in gradients(trainer).values()) ** 0.5)
            step()

        adam.step = watched
        metrics = trainer.train(0, table)
    assert metrics["train/grad_norm"] > 1
    assert norms == [pytest.approx(0.01, rel=1e-4)]


def test_moments_can_be_forgotten_every_rollout(model: Path) -> None:
    with one_rank(tiny_args(model, reset_optimizer_states=True)) as trainer:
        for i in range(2):
            trainer.train(i, random_table(seed=i))
            steps = {float(state["step"]) for state in trainer.optimizers.all[0].state.values()}
            assert steps == {1.0}


@pytest.mark.parametrize("shape", [(3, 12, 40), (2, 40, 12), (1, 16, 16)])
def test_newton_schulz_makes_matrices_nearly_orthogonal(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    matrices = torch.randn(shape)
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    found = orthogonalize(matrices)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.5
    assert values.max() < 1.3
    cosine = (found * (u @ vh)).sum() / (found.norm() * (u @ vh).norm())
    assert cosine > 0.97


@pytest.mark.parametrize("shape", [(24, 60), (60, 24)])
def test_muon_is_that_of_torch(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    start, *grads = (torch.randn(shape, generator=generator) for _ in range(4))
    given, moved = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}, []
    for kind in (Muon, torch.optim.Muon):
        parameter = torch.nn.Parameter(start.clone())
        optimizer = kind([parameter], **given)
        for parameter.grad in grads:
            optimizer.step()
        moved.append(parameter.detach() - start)
    assert (moved[0] - moved[1]).norm() < 0.01 * moved[1].norm(), "torch's iterations are in bf16"


def test_muon_holds_few_matrices_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    sizes: list[int] = []
    original = optimizers.orthogonalize
    monkeypatch.setattr(optimizers, "orthogonalize", lambda x: sizes.append(x.nbytes) or original(x))

    def moved() -> list[torch.Tensor]:
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.zeros(20, 10)) for _ in range(7)]
        for parameter in parameters:
            parameter.grad = torch.randn(20, 10)
        Muon(parameters, lr=0.1, momentum=0.9, weight_decay=0.0).step()
        return [parameter.detach() for parameter in parameters]

    together = moved()
    monkeypatch.setattr(optimizers, "STACK_BYTES", 2000)  # two of them
    for mine, theirs in zip(moved(), together, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert sizes == [7 * 800, 1600, 1600, 1600, 800]


def test_muon_moves_matrices_by_its_own_rate_and_adamw_the_rest(model: Path) -> None:
    with one_rank(tiny_args(model, optimizer="muon", lr=1e-3, muon_lr=0.05, lr_warmup_iters=2)) as trainer:
        before = weights_of(trainer)
        metrics = trainer.train(0, random_table())
        after = weights_of(trainer)
        (muon,) = [o for o in trainer.optimizers.all if isinstance(o, Muon)]
        assert len(muon.param_groups[0]["params"]) == 2 * 7
    assert sorted(v for k, v in metrics.items() if "lr-pg" in k) == pytest.approx([5e-4, 5e-4, 0.025]), "half-way up"
    for name, weight in before.items():
        moved = after[name] - weight
        if "proj.weight" in name:
            expected = 0.025 / weight.shape[1] ** 0.5
            assert moved.square().mean().sqrt() == pytest.approx(expected, rel=0.3), name
        else:
            assert 0 < moved.abs().max() < 1e-3, name


def test_muon_learns(model: Path) -> None:
    table = random_table()
    with one_rank(tiny_args(model, loss_type="sft_loss", optimizer="muon", lr=5e-3, muon_lr=0.02)) as trainer:
        losses = [trainer.train(i, table)["train/loss"] for i in range(15)]
    assert losses[-1] < 0.5 * losses[0]


def test_muons_rate_follows_the_schedule_whatever_this_runs_lr_is(model: Path) -> None:
    """As after resuming with another --lr: the checkpoint's schedule goes on."""
    given = {"optimizer": "muon", "muon_lr": 0.02, "lr_decay_style": "linear", "num_rollout": 4}
    with one_rank(tiny_args(model, lr=1e-3, **given)) as trainer:
        trainer.progress.schedule = replace(trainer.progress.schedule, peak=5e-3)
        trainer.progress.steps = 2
        metrics = trainer.train(0, random_table())
    assert sorted(v for k, v in metrics.items() if "lr-pg" in k) == pytest.approx([2.5e-3, 2.5e-3, 0.01])


RUN = 100


def rates(**given: Any) -> list[float]:
    schedule = LrSchedule.from_args(OptimizerArgs(lr=1.0, **given))
    return [schedule.at(step, RUN) for step in range(RUN + 10)]


def test_constant_after_warm_up() -> None:
    lr = rates(lr_warmup_iters=4, lr_warmup_init=0.2)
    assert lr[:6] == pytest.approx([0.4, 0.6, 0.8, 1.0, 1.0, 1.0])
    assert set(lr[4:]) == {1.0}
    assert rates()[0] == 1.0


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_decay_from_peak_to_minimum_over_the_run(style: str) -> None:
    lr = rates(lr_decay_style=style, min_lr=0.1, lr_warmup_fraction=0.1)
    assert lr[9] == lr[10] == 1.0
    assert lr[RUN:] == [0.1] * 10
    assert all(a > b for a, b in pairwise(lr[10 : RUN + 1]))
    assert lr[55] == pytest.approx(0.55), "both styles are half way in the middle"


def test_decay_iters_win_over_the_run() -> None:
    lr = rates(lr_decay_style="linear", lr_decay_iters=10)
    assert lr[5] == pytest.approx(0.5)
    assert lr[10] == 0.0


def test_inverse_square_root() -> None:
    lr = rates(lr_decay_style="inverse-square-root", lr_warmup_iters=4, min_lr=0.25)
    assert lr[3] == 1.0
    assert lr[15] == pytest.approx(math.sqrt(4 / 16))
    assert lr[-1] == 0.25


@pytest.mark.parametrize(
    ("style", "half"), [("linear", 0.5), ("cosine", 0.5), ("exponential", 2**0.5 - 1), ("minus_sqrt", 1 - 0.5**0.5)]
)
def test_wsd_is_stable_then_decays(style: str, half: float) -> None:
    lr = rates(lr_decay_style="WSD", lr_wsd_decay_style=style, lr_wsd_decay_iters=20, lr_warmup_iters=5)
    assert set(lr[4:81]) == {1.0}
    assert lr[90] == pytest.approx(half)
    assert lr[RUN] == 0.0
