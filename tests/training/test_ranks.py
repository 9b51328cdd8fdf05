"""However rows are cut into micro-batches and dealt to ranks, training is the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import (
    Recorder,
    exact_norms,
    gradients,
    on_ranks,
    one_rank,
    random_table,
    save_tiny_model,
    tiny_args,
    weights_of,
)

from slimelite.table import SampleTable
from slimelite.training.metrics import MetricSums
from slimelite.training.schedule import Step, split_steps
from slimelite.training.trainer import Trainer

# every term of the loss at once; fan-out siblings, a removed sample and an empty row are in the table
EVERYTHING = {
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "use_reference": True,
    "entropy_coef": 0.01,
    "use_tis": True,
    "rollout_temperature": 0.8,
}


def awkward_table() -> SampleTable:
    table = random_table(seed=3, groups=5, group_size=4)
    table.rollout_id[1] = table.rollout_id[0]
    table.removed[5] = True
    table.loss_mask[table.response_offsets[9] : table.response_offsets[10]] = False
    return table


def exact_gradient(trainer: Trainer, table: SampleTable) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The float64 gradient of one optimizer step over the whole table, and the metrics; ``trainer`` is fresh."""
    models = [trainer.model, *([trainer.reference.model] if trainer.reference else [])]
    for model in models:
        model.double()
        exact_norms(model)
    (rows,) = split_steps(table.rollout_id, table.unit_id, 1000)
    columns = trainer._columns(table, [rows])
    sums = MetricSums(trainer.world)
    trainer.forward_backward(table, columns, Step(rows, trainer._deal(table, rows[table.mask_sums[rows] > 0])), sums)
    found = gradients(trainer)
    trainer.model.zero_grad()
    return found, sums.means()[0]


def five_steps(trainer: Trainer, table: SampleTable) -> list[dict[str, float]]:
    return [trainer.train(i, table) for i in range(5)]


def everything_on_ranks(trainer: Trainer, table: SampleTable, folder: str) -> dict[str, Any]:
    """All that is compared with one rank, in one go: starting processes is what takes time."""
    before = trainer.log_probs(table)
    history = five_steps(trainer, table)
    sink = Recorder()
    trainer.push_weights(sink, 7)
    trainer.save(f"{folder}/checkpoint", 4)
    trainer.save_hf(f"{folder}/hf")
    rank, size = trainer.world.rank, trainer.world.size
    gradient, means = exact_gradient(Trainer(trainer.args, rank=rank, world_size=size, init_method="met"), table)
    replicated = replace(trainer.args, dp_replicate_size=size)
    gradient_of_replicas, _ = exact_gradient(Trainer(replicated, rank=rank, world_size=size, init_method="met"), table)
    muon = Trainer(replace(trainer.args, optimizer="muon"), rank=rank, world_size=size, init_method="met")
    muon_history = five_steps(muon, table)
    return {
        "muon_history": muon_history,
        "log_probs": before,
        "history": history,
        "pushed": sink.tensors,
        "weights": weights_of(trainer),
        "gradient": gradient,
        "gradient_of_replicas": gradient_of_replicas,
        "means": means,
    }


def assert_same_gradient(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], limit: float = 1e-9) -> None:
    assert mine.keys() == theirs.keys()
    for name in mine:
        scale = theirs[name].norm()
        assert scale > 0, name
        assert (mine[name] - theirs[name]).norm() / scale < limit, name


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference_gradient(model: Path) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    with one_rank(tiny_args(model, **EVERYTHING, max_tokens_per_gpu=10_000)) as trainer:
        return exact_gradient(trainer, awkward_table())


@pytest.mark.parametrize("aggregation", ["rollout", "token", "constant"])
@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo"])
def test_micro_batches_do_not_matter(model: Path, estimator: str, aggregation: str) -> None:
    found = []
    for packing in ({"max_tokens_per_gpu": 10_000}, {"max_tokens_per_gpu": 40}, {"use_dynamic_batch_size": False}):
        given = EVERYTHING | {"advantage_estimator": estimator, "loss_aggregation": aggregation} | packing
        with one_rank(tiny_args(model, **given)) as trainer:
            found.append(exact_gradient(trainer, awkward_table()))
    for gradient, means in found[1:]:
        assert_same_gradient(gradient, found[0][0])
        assert means == pytest.approx(found[0][1], rel=1e-9, abs=1e-12)


def test_row_order_does_not_matter(
    model: Path, reference_gradient: tuple[dict[str, torch.Tensor], dict[str, float]]
) -> None:
    table = awkward_table()
    order = np.random.default_rng(0).permutation(len(table))
    with one_rank(tiny_args(model, **EVERYTHING)) as trainer:
        gradient, _ = exact_gradient(trainer, table.select(order))
    assert_same_gradient(gradient, reference_gradient[0])


def test_gradient_checkpointing_does_not_matter(
    model: Path, reference_gradient: tuple[dict[str, torch.Tensor], dict[str, float]]
) -> None:
    with one_rank(tiny_args(model, **EVERYTHING, gradient_checkpointing=True)) as trainer:
        assert trainer.model.hf.is_gradient_checkpointing
        gradient, _ = exact_gradient(trainer, awkward_table())
    assert_same_gradient(gradient, reference_gradient[0])


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_do_not_matter(
    model: Path,
    tmp_path: Path,
    ranks: int,
    reference_gradient: tuple[dict[str, torch.Tensor], dict[str, float]],
) -> None:
    table = awkward_table()
    given = EVERYTHING | {"global_batch_size": 8, "max_tokens_per_gpu": 60, "lr": 1e-3}
    many = on_ranks(ranks, everything_on_ranks, tiny_args(model, **given), table, str(tmp_path))
    with one_rank(tiny_args(model, **given)) as trainer:
        np.testing.assert_allclose(many["log_probs"], trainer.log_probs(table), rtol=1e-5, atol=1e-5)
        for mine, theirs in zip(five_steps(trainer, table), many["history"], strict=True):
            assert mine.keys() == theirs.keys()
            for name in ("train/loss", "train/pg_loss", "train/kl_loss", "train/entropy_loss", "train/grad_norm"):
                assert theirs[name] == pytest.approx(mine[name], rel=1e-5, abs=1e-5), name
        for name, weight in weights_of(trainer).items():
            torch.testing.assert_close(many["weights"][name], weight, rtol=1e-3, atol=1e-4)
    with one_rank(tiny_args(model, **given, optimizer="muon")) as trainer:
        for mine, theirs in zip(five_steps(trainer, table), many["muon_history"], strict=True):
            assert theirs["train/loss"] == pytest.approx(mine["train/loss"], rel=1e-4, abs=1e-5)
    assert_same_gradient(many["gradient"], reference_gradient[0])
    assert_same_gradient(many["gradient_of_replicas"], reference_gradient[0])
    for name, mean in reference_gradient[1].items():
        assert many["means"][name] == pytest.approx(mean, rel=1e-9, abs=1e-12), name

    # weights sent to engines, saved for others and saved for ourselves are those weights
    assert many["pushed"].keys() == many["weights"].keys()
    with one_rank(tiny_args(tmp_path / "hf", **given)) as trainer:
        saved = weights_of(trainer)
    with one_rank(tiny_args(model, **given)) as trainer:
        assert trainer.load(str(tmp_path / "checkpoint")) == 4
        loaded = weights_of(trainer)
    for name, weight in many["weights"].items():
        for copy in (many["pushed"], saved, loaded):
            assert torch.equal(copy[name], weight), name
