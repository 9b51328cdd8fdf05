"""However the rows of an optimizer step are cut into micro-batches and ordered, its gradient is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exact import (
    ACTS,
    CORRECTIONS,
    ESTIMATORS,
    Gradient,
    MicroBatches,
    assert_same_gradient,
    assert_same_run,
    awkward_table,
    exact_step,
)
from tiny import one_rank, save_tiny_model, tiny_args, weights_of

from slimelite.algorithms.losses import AGGREGATIONS

# every estimator with every aggregation; every correction with every aggregation
CASES = [
    (estimator, aggregation, list(CORRECTIONS)[(i + 2 * j) % len(CORRECTIONS)])
    for i, estimator in enumerate(ESTIMATORS)
    for j, aggregation in enumerate(AGGREGATIONS)
]
OTHER_TERMS = {
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "use_reference": True,
    "entropy_coef": 0.01,
    "rollout_temperature": 0.8,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def backwards(parts: MicroBatches) -> MicroBatches:
    return [rows[::-1] for rows in parts[::-1]]


ARRANGEMENTS: dict[str, tuple[dict[str, Any], Any]] = {
    "few long": ({"max_tokens_per_gpu": 70}, lambda parts: parts),
    "backwards": ({"max_tokens_per_gpu": 70}, backwards),
    "a row each": ({"use_dynamic_batch_size": False}, lambda parts: parts),
}


@pytest.mark.parametrize(("estimator", "aggregation", "correction"), CASES, ids=[", ".join(c) for c in CASES])
def test_micro_batches_do_not_matter(model: Path, estimator: str, aggregation: str, correction: str) -> None:
    given = {"advantage_estimator": estimator, "loss_aggregation": aggregation, **OTHER_TERMS}
    given |= ESTIMATORS[estimator] | CORRECTIONS[correction]

    def step(packing: dict[str, Any], arrange: Any) -> tuple[Gradient, dict[str, float]]:
        with one_rank(tiny_args(model, **given | packing)) as trainer:
            return exact_step(trainer, awkward_table(), arrange)

    gradient, means = step({"max_tokens_per_gpu": 10_000}, lambda parts: parts)
    for name in ACTS[correction]:
        assert 0 < means[name] < 1, f"{name} {means[name]}: {correction} does nothing, or everything"
    for packing, arrange in ARRANGEMENTS.values():
        again, means_again = step(packing, arrange)
        assert_same_gradient(again, gradient)
        assert means_again == pytest.approx(means, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    "given",
    [
        OTHER_TERMS,
        {"advantage_estimator": "gspo", "loss_aggregation": "token", "optimizer": "muon"},
        {"advantage_estimator": "ppo", **ESTIMATORS["ppo"], "use_reference": True, "loss_aggregation": "constant"},
        {"loss_type": "sft_loss"},
    ],
    ids=["grpo, every term", "gspo, muon", "ppo", "sft"],
)
def test_fp32_runs_end_at_the_same_weights(model: Path, given: dict[str, Any]) -> None:
    """Twelve optimizer steps, three a rollout. Adam divides by gradients that are little but rounding: without shared
    prefixes too, these runs end up to 7e-5 of the way apart.
    """
    found = []
    for packing in ({"max_tokens_per_gpu": 10_000}, {"max_tokens_per_gpu": 70}, {"use_dynamic_batch_size": False}):
        with one_rank(tiny_args(model, **given | packing, global_batch_size=8, lr=1e-3)) as trainer:
            start = weights_of(trainer)
            losses = [trainer.train(i, awkward_table())["train/loss"] for i in range(4)]
            assert trainer.progress.steps == 12
            found.append((losses, weights_of(trainer)))
    for losses, weights in found[1:]:
        assert losses == pytest.approx(found[0][0], rel=1e-5, abs=1e-5)
        assert_same_run(weights, found[0][1], start, limit=1e-4)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_row_order_does_not_matter(model: Path, aggregation: str) -> None:
    table = awkward_table()
    order = np.random.default_rng(0).permutation(len(table))
    found = []
    for rows in (np.arange(len(table)), order):
        with one_rank(tiny_args(model, **OTHER_TERMS, loss_aggregation=aggregation)) as trainer:
            found.append(exact_step(trainer, table.select(rows))[0])
    assert_same_gradient(*found)


def test_gradient_checkpointing_does_not_matter(model: Path) -> None:
    found, passes = [], [0, 0]
    for checkpointing in (False, True):
        with one_rank(tiny_args(model, **OTHER_TERMS, gradient_checkpointing=checkpointing)) as trainer:

            def count(*_: object, at: int = checkpointing) -> None:
                passes[at] += torch.is_grad_enabled()

            trainer.model.layers[0].self_attn.register_forward_hook(count)
            found.append(exact_step(trainer, awkward_table())[0])
    assert_same_gradient(*found)
    assert passes[1] == 2 * passes[0] > 0
