"""``--ci-test`` in runs of train.py: it passes for every estimator, and stops a run with a planted fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch

import train
from slimelite.algorithms import policy
from slimelite.algorithms.estimators import ESTIMATORS
from slimelite.engines.embedded import EmbeddedEngine
from slimelite.training import trainer
from slimelite.training.trainer import Trainer

from .conftest import metrics

pytestmark = pytest.mark.e2e
Run = Callable[..., Path]

KL_LOSS = "--use-kl-loss --kl-loss-coef 0.01"
KL_REWARD = "--kl-coef 0.01"
CORRECTION = "--correction mis --mis-level sequence --mis-mode mask --mis-rejection-level geometric"


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_first_step_truths(local_run: Run, estimator: str) -> None:
    """With two optimizer steps a rollout, at a temperature, and with a correction that finds nothing to correct."""
    flags = ["--ci-test", "--num-rollout", "2", "--num-steps-per-rollout", "2", "--rollout-temperature", "0.9"]
    flags += f"{CORRECTION} --advantage-estimator {estimator} ".split()
    flags += (KL_REWARD if ESTIMATORS[estimator].takes_kl else KL_LOSS).split()
    run = local_run(estimator, *flags)
    assert metrics(run, "train/logprob_abs_diff")[0] < 1e-6
    assert metrics(run, "train/logprob_abs_diff")[1] > 1e-4
    assert metrics(run, "train/pg_clipfrac")[0] == 0
    assert max(metrics(run, "train/train_rollout_logprob_abs_diff")) < 1e-4
    assert metrics(run, "train/tis_clipfrac") == metrics(run, "train/rs_reject_frac") == [0] * 4
    assert metrics(run, "train/tis_weight") == pytest.approx([1] * 4, abs=1e-3)
    if "train/kl_loss" in (run / "metrics.jsonl").read_text():
        assert abs(metrics(run, "train/kl_loss")[0]) < 1e-8


def shifted_engine(patch: pytest.MonkeyPatch) -> None:
    """The engine's log-probs are a hundredth of a nat too high."""
    generate = EmbeddedEngine.generate

    async def wrong(self: EmbeddedEngine, *args: Any, **kwargs: Any) -> Any:
        outputs = await generate(self, *args, **kwargs)
        for output in outputs:
            output.log_probs[:] = [x + 0.01 for x in output.log_probs]
        return outputs

    patch.setattr(EmbeddedEngine, "generate", wrong)


def another_temperature(patch: pytest.MonkeyPatch) -> None:
    """The trainer divides logits by another temperature than the engine."""
    init = Trainer.__init__

    def wrong(self: Trainer, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.temperature = 0.9

    patch.setattr(Trainer, "__init__", wrong)


def shifted_old(patch: pytest.MonkeyPatch) -> None:
    """The pass for old log-probs is off by a ten-thousandth of a nat."""
    table_scores = trainer.table_scores

    def wrong(*args: Any, **kwargs: Any) -> Any:
        log_probs, entropy = table_scores(*args, **kwargs)
        return log_probs + 1e-4, entropy

    patch.setattr(trainer, "table_scores", wrong)


def moved_policy(patch: pytest.MonkeyPatch) -> None:
    """The policy that trains is not quite the one that was pushed to the engine and is the reference."""
    train_on = Trainer.train

    @wraps(train_on)
    def wrong(self: Trainer, *args: Any) -> Any:
        with torch.no_grad():
            for _, weight in self.model.named_weights():
                weight.mul_(1.001)
        return train_on(self, *args)

    patch.setattr(Trainer, "train", wrong)


def bound_on_the_wrong_side(patch: pytest.MonkeyPatch) -> None:
    """The lower bound of the ratio is above 1."""
    ppo_clip_loss = policy.ppo_clip_loss

    def wrong(*args: Any, **kwargs: Any) -> Any:
        return ppo_clip_loss(*args, **kwargs | {"eps_clip": -1e-3})

    patch.setattr(policy, "ppo_clip_loss", wrong)


FAULTS: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    shifted_engine: "--ci-test: trainer and engine log-probs differ by 1.0",
    another_temperature: "--ci-test: trainer and engine log-probs differ by",
    shifted_old: "--ci-test: mean |log-prob - old| is 1.0",
    moved_policy: "--ci-test: the KL to the initial policy is",
    bound_on_the_wrong_side: "of tokens were clipped on the first step",
}


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_ends_the_run(
    grpo_args: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
) -> None:
    plant(monkeypatch)
    flags = ["--launcher", "local", "--run-dir", str(tmp_path), "--num-rollout", "1", *KL_LOSS.split()]
    assert train.main([*grpo_args, *flags, "--ci-test"]) == 1
    assert FAULTS[plant] in json.loads((tmp_path / "status.json").read_text())["message"]
    assert metrics(tmp_path, "train/loss") == []
