"""Preference pairs: a step is the same however it is cut; `test_oracle.py` has what a step is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exact import Gradient, assert_same_gradient, exact_step
from tiny import on_ranks, one_rank, random_table, save_tiny_model, tiny_args, weights_of

from slimelite.arguments import Args
from slimelite.samples.table import SampleTable
from slimelite.training.trainer import Trainer

BETA = 0.3


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Policy and reference."""
    folder = tmp_path_factory.mktemp("models")
    return save_tiny_model(folder / "policy"), save_tiny_model(folder / "reference", seed=1)


def dpo_args(models: tuple[Path, Path], **changes: Any) -> Args:
    given = {"loss_type": "dpo_loss", "use_reference": True, "ref_load": str(models[1]), "dpo_beta": BETA}
    return tiny_args(models[0], **given | {"rollout_temperature": 0.5} | changes)  # which nothing may divide by


def pair_table(pairs: int = 5) -> SampleTable:
    """Pairs whose rows are shuffled among each other, masked in the middle; the second is removed."""
    table = random_table(seed=3, groups=pairs, group_size=2, longest=12, prompt=(16, 25))
    table.loss_mask[table.response_offsets[:-1]] = True
    table.rollout_id = table.unit_id = table.group_id.copy()
    table.reward = np.tile([1.0, 0.0], pairs)
    table.removed[2:4] = pairs > 1
    return table.select(np.random.default_rng(0).permutation(len(table)))


@pytest.fixture(scope="module")
def one_batch(models: tuple[Path, Path]) -> tuple[Gradient, dict[str, float]]:
    with one_rank(dpo_args(models, max_tokens_per_gpu=10_000)) as trainer:
        return exact_step(trainer, pair_table())


@pytest.mark.parametrize("packing", [{"max_tokens_per_gpu": 40}, {"use_dynamic_batch_size": False}])
def test_micro_batches_and_order_do_not_matter(
    models: tuple[Path, Path], packing: dict[str, Any], one_batch: tuple[Gradient, dict[str, float]]
) -> None:
    table = pair_table()
    order = np.random.default_rng(1).permutation(len(table))
    with one_rank(dpo_args(models, **packing)) as trainer:
        gradient, means = exact_step(trainer, table.select(order))
        dealt = trainer._deal(table, np.arange(len(table)))[0]
    assert len(dealt) > 2
    assert all(len(rows) == 2 * len(np.unique(table.unit_id[rows])) for rows in dealt), "a pair is split"
    assert_same_gradient(gradient, one_batch[0])
    assert means == pytest.approx(one_batch[1], rel=1e-9, abs=1e-12)


def gradients_on_ranks(trainer: Trainer, tables: list[SampleTable]) -> list[tuple[Gradient, dict[str, float]]]:
    return [exact_step(trainer, table) for table in tables]


def test_ranks_do_not_matter(models: tuple[Path, Path], one_batch: tuple[Gradient, dict[str, float]]) -> None:
    """Also where there is one pair for two ranks."""
    tables = [pair_table(), pair_table(1)]
    both, single = on_ranks(2, gradients_on_ranks, dpo_args(models, max_tokens_per_gpu=40), tables)
    with one_rank(dpo_args(models)) as trainer:
        alone = exact_step(trainer, tables[1])
    for found, expected in ((both, one_batch), (single, alone)):
        assert_same_gradient(found[0], expected[0])
        assert found[1] == pytest.approx(expected[1], rel=1e-9, abs=1e-12)


def test_batch_sizes_count_pairs(models: tuple[Path, Path]) -> None:
    table = pair_table()
    with one_rank(dpo_args(models, global_batch_size=2, lr=0.0)) as trainer:
        trainer.train(0, table)
        assert [step["train/global_batch_size"] for step in trainer.step_metrics] == [2, 2, 1]


def test_rewards_start_at_zero_and_the_margin_grows(models: tuple[Path, Path]) -> None:
    with one_rank(dpo_args((models[0], models[0]), ci_test=True)) as trainer:
        history = [trainer.train(i, pair_table()) for i in range(5)]
    first, last = history[0], history[-1]
    assert first["train/rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert last["train/rewards/margins"] > 1
    assert last["train/rewards/accuracies"] == 1
    assert last["train/rewards/chosen"] - last["train/rewards/rejected"] == pytest.approx(
        last["train/rewards/margins"], rel=1e-4
    )
    moved = last["train/logps/chosen"] - first["train/logps/chosen"]
    assert BETA * moved == pytest.approx(last["train/rewards/chosen"], rel=1e-3, abs=1e-4)
    assert "rollout/ref_log_probs" in last
    assert "rollout/advantages" not in last
    assert "perf/log_probs_time" not in last, "no pass for old log-probs"


def test_a_reference_that_is_updated_starts_again(models: tuple[Path, Path]) -> None:
    with one_rank(dpo_args(models, ref_update_interval=1)) as trainer:
        margins = [trainer.train(i, pair_table())["train/rewards/margins"] for i in range(2)]
    assert abs(margins[0]) > 1e-3
    assert margins[1] == pytest.approx(0, abs=1e-5)


def test_resumed_equals_straight(models: tuple[Path, Path], tmp_path: Path) -> None:
    tables = [pair_table(pairs) for pairs in (5, 4, 3, 6)]
    args = dpo_args(models, global_batch_size=2)
    with one_rank(args) as trainer:
        straight = [trainer.train(i, table) for i, table in enumerate(tables)][2:]
        expected = weights_of(trainer)
    with one_rank(args) as trainer:
        for i in range(2):
            trainer.train(i, tables[i])
        trainer.save(str(tmp_path), 1)
    with one_rank(args) as trainer:
        trainer.load(str(tmp_path))
        resumed = [trainer.train(i, tables[i]) for i in (2, 3)]
        assert all(torch.equal(weight, expected[name]) for name, weight in weights_of(trainer).items())
    for mine, theirs in zip(resumed, straight, strict=True):
        train = {name for name in theirs if name.startswith("train/")}
        assert {name: mine[name] for name in train} == {name: theirs[name] for name in train}


def test_the_first_step_truth_is_fatal(models: tuple[Path, Path]) -> None:
    with one_rank(dpo_args((models[0], models[0]), ci_test=True)) as trainer:
        trainer.reference = type(trainer.reference)(dpo_args(models), trainer.world, str(models[1]))
        with pytest.raises(AssertionError, match="on the first step"):
            trainer.train(0, pair_table())


def test_what_is_no_pair_is_refused(models: tuple[Path, Path]) -> None:
    table = pair_table()
    with one_rank(dpo_args(models)) as trainer:
        with pytest.raises(ValueError, match=r"units \[\d\] do not have two rows"):
            trainer.train(0, table.select(np.arange(len(table) - 1)))
        tie = pair_table()
        tie.reward = np.ones(len(table))
        with pytest.raises(ValueError, match="the two rewards are equal"):
            trainer.train(0, tie)
        half = pair_table()
        half.removed = np.arange(len(table)) == 0
        with pytest.raises(ValueError, match="set remove_sample for both"):
            trainer.train(0, half)
