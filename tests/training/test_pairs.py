"""Preference pairs: a whole optimizer step against padded batches and a loop over pairs, however it is cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exact import Gradient, assert_same_gradient, exact_step
from tiny import exact_norms, on_ranks, one_rank, random_table, save_tiny_model, tiny_args, weights_of
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from slimelite.arguments import Args
from slimelite.table import SampleTable
from slimelite.training.trainer import Trainer

BETA, SMOOTHING = 0.3, 0.2


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
    table = random_table(seed=3, groups=pairs, group_size=2, longest=12)
    table.loss_mask[table.response_offsets[:-1]] = True
    table.rollout_id = table.unit_id = table.group_id.copy()
    table.reward = np.tile([1.0, 0.0], pairs)
    table.removed[2:4] = pairs > 1
    return table.select(np.random.default_rng(0).permutation(len(table)))


def padded_log_probs(hf: Any, table: SampleTable) -> list[Tensor]:
    """Log-probs of each row's trained tokens, from one padded batch and full logits."""
    rows = [
        np.concatenate([table.row_slice(c, r) for c in ("prompt_tokens", "response_tokens")]) for r in range(len(table))
    ]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    present = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)], present[i, : len(row)] = torch.tensor(row), 1
    log_p = torch.log_softmax(hf(input_ids=ids, attention_mask=present).logits, -1)
    of_tokens = log_p[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    found = []
    for i, row in enumerate(rows):
        response = of_tokens[i, len(table.row_slice("prompt_tokens", i)) - 1 : len(row) - 1]
        found.append(response[torch.tensor(table.row_slice("loss_mask", i))])
    return found


def naive(models: tuple[Path, Path], table: SampleTable, kind: str, smoothing: float) -> tuple[Gradient, float]:
    """Gradient and loss of one step in float64, pair by pair; a removed pair counts in the divisor."""
    log_probs = []
    for path in models:
        hf = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="sdpa")
        exact_norms(hf)
        log_probs.append(padded_log_probs(hf, table))
        if path == models[0]:
            policy = hf
    losses = []
    for unit in np.unique(table.unit_id):
        chosen, rejected = sorted(np.flatnonzero(table.unit_id == unit).tolist(), key=lambda r: -table.reward[r])
        ratios = [log_probs[0][row] - log_probs[1][row].detach() for row in (chosen, rejected)]
        if table.removed[chosen]:
            losses.append(torch.zeros((), dtype=torch.float64))
        elif kind == "ipo":
            losses.append((ratios[0].mean() - ratios[1].mean() - 1 / (2 * BETA)) ** 2)
        else:
            margin = BETA * (ratios[0].sum() - ratios[1].sum())
            losses.append(-(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin))
    loss = torch.stack(losses).mean()
    loss.backward()
    return {name: p.grad for name, p in policy.named_parameters()}, loss.item()


@pytest.mark.parametrize(("kind", "smoothing"), [("sigmoid", 0.0), ("sigmoid", SMOOTHING), ("ipo", 0.0)])
def test_a_step_is_the_padded_loop(models: tuple[Path, Path], kind: str, smoothing: float) -> None:
    table = pair_table()
    expected, loss = naive(models, table, kind, smoothing)
    with one_rank(dpo_args(models, dpo_loss=kind, dpo_label_smoothing=smoothing)) as trainer:
        gradient, means = exact_step(trainer, table)
    assert_same_gradient(gradient, expected)
    assert means["dpo_loss"] == means["loss"] == pytest.approx(loss, rel=1e-9)


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


def test_batch_sizes_count_pairs_and_the_last_step_has_its_own_divisor(models: tuple[Path, Path]) -> None:
    table = pair_table()
    with one_rank(dpo_args(models, global_batch_size=2, lr=0.0)) as trainer:
        trainer.train(0, table)
        steps = trainer.step_metrics()
    assert [step["train/global_batch_size"] for step in steps] == [2, 2, 1]
    in_order = list(dict.fromkeys(table.unit_id.tolist()))
    for step, units in zip(steps, (in_order[:2], in_order[2:4], in_order[4:]), strict=True):
        _, loss = naive(models, table.select(np.flatnonzero(np.isin(table.unit_id, units))), "sigmoid", 0.0)
        assert step["train/dpo_loss"] == pytest.approx(loss, rel=1e-4)


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
    assert abs(margins[0]) > 0.1
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
        tie = replace(table, reward=np.ones(len(table)))
        with pytest.raises(ValueError, match="no row has the higher"):
            trainer.train(0, tie)
        half = replace(table, removed=np.arange(len(table)) == 0)
        with pytest.raises(ValueError, match="mark both with remove_sample"):
            trainer.train(0, half)
