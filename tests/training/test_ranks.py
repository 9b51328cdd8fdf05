"""However rows are dealt to ranks, training is the same."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from exact import (
    CORRECTIONS,
    ESTIMATORS,
    Gradient,
    assert_same_gradient,
    assert_same_run,
    awkward_table,
    exact_step,
)
from tiny import Recorder, on_ranks, one_rank, save_tiny_model, tiny_args, weights_of
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slimelite.samples.table import SampleTable
from slimelite.training import optimizer as optimizers
from slimelite.training.lora import gathered
from slimelite.training.parallel import whole
from slimelite.training.trainer import Trainer
from slimelite.training.weights import buckets

# every term of the loss at once; fan-out siblings, a removed sample and an empty row are in the table
EVERYTHING = {
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "use_reference": True,
    "entropy_coef": 0.01,
    "correction": "tis",
    "rollout_temperature": 0.8,
    "token_stats": "all",
}
# every estimator and every correction once
CASES = [
    {"advantage_estimator": estimator, **ESTIMATORS[estimator], **CORRECTIONS[correction]}
    for estimator, correction in zip(ESTIMATORS, cycle(CORRECTIONS))
]


def five_steps(trainer: Trainer, table: SampleTable) -> list[dict[str, float]]:
    return [trainer.train(i, table) for i in range(5)]


class Gathers(TorchDispatchMode):
    """Notes the dtypes of what ranks gather from each other."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "all_gather_into_tensor" in str(func):
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def in_half(trainer: Trainer) -> tuple[list[torch.dtype], dict[str, torch.Tensor]]:
    """Dtypes that travel when the weights are asked for in bf16, and what arrives, in buckets and one by one."""
    with Gathers() as gathers:
        found = {n: gathered(weight, torch.bfloat16, None) for n, weight in trainer.model.named_weights()}
        for bucket in buckets(trainer.model.named_weights(), 10_000, torch.bfloat16):
            for name, tensor in bucket.tensors():
                assert torch.equal(tensor, found[name])
    return gathers.dtypes, found


# rows that ranks share unevenly, and fewer rows than ranks
MATRICES = [(7, 5)] * 5 + [(12, 30)] * 2 + [(1, 4)] + [(40, 8)] * 3


def muon_steps(trainer: Trainer | None) -> tuple[list[torch.Tensor], list[tuple[int, ...]]]:
    """MATRICES in float64 after three steps of Muon, with shards on the ranks of ``trainer``; the shapes of the stacks
    that were orthogonalized, of all ranks.
    """
    generator, stacks = torch.Generator().manual_seed(0), []
    original = optimizers.orthogonalize

    def watched(matrices: torch.Tensor) -> torch.Tensor:
        stacks.append(tuple(matrices.shape))
        return original(matrices)

    def draw(shape: tuple[int, int]) -> torch.Tensor:
        whole = torch.randn(shape, generator=generator, dtype=torch.float64)
        return whole if trainer is None else distribute_tensor(whole, trainer.world.mesh["shard"], [Shard(0)])

    optimizers.orthogonalize = watched
    parameters = [torch.nn.Parameter(draw(shape)) for shape in MATRICES]
    optimizer = optimizers.Muon(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = draw(tuple(parameter.shape))
        optimizer.step()
    optimizers.orthogonalize = original
    if trainer is None:
        return [p.detach() for p in parameters], stacks
    everyones: list[Any] = [None] * trainer.world.ranks
    dist.all_gather_object(everyones, stacks)
    return [whole(p.detach()) for p in parameters], [stack for part in everyones for stack in part]


def everything_on_ranks(trainer: Trainer, table: SampleTable, folder: str) -> dict[str, Any]:
    """All that is compared with one rank, in one go: starting processes is what takes time."""
    before = trainer.log_probs(table)
    history, stats = five_steps(trainer, table), trainer.token_stats
    sink = Recorder()
    trainer.push_weights(sink, 7)
    trainer.save(f"{folder}/checkpoint", 4)
    trainer.save_hf(f"{folder}/hf")
    rank, size = trainer.world.rank, trainer.world.ranks

    def another(**changes: Any) -> Trainer:
        return Trainer(replace(trainer.args, **changes), rank=rank, world_size=size, store=dist.HashStore())

    muon_history = five_steps(another(optimizer="muon"), table)
    plugin = f"{Path(__file__).parent / 'plugins.py'}:nan_on_the_last_rank"
    # all rows in one step, so that the last rank has some
    once = another(loss_type="custom_loss", custom_loss_function_path=plugin, global_batch_size=len(table))
    broken = once.train(0, table)
    return {
        "muon_history": muon_history,
        "muon_steps": muon_steps(trainer),
        "skipped_steps": broken["train/skipped_steps"],
        "log_probs": before,
        "history": history,
        "token_stats": stats,
        "pushed": sink.tensors,
        "in_half": in_half(trainer),
        "weights": weights_of(trainer),
        "exact": [exact_step(another(**case), table) for case in CASES],
        "exact_of_each_batch": exact_step(another(**CASES[0], reduce_once_a_step=False), table),
        "exact_of_replicas": exact_step(another(**CASES[0], dp_replicate_size=size), table),
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def exact(model: Path) -> list[tuple[Gradient, dict[str, float]]]:
    """The step of each case on one rank, in one micro-batch."""
    found = []
    for case in CASES:
        with one_rank(tiny_args(model, **EVERYTHING | case, max_tokens_per_gpu=10_000)) as trainer:
            found.append(exact_step(trainer, awkward_table()))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_do_not_matter(
    model: Path, tmp_path: Path, ranks: int, exact: list[tuple[Gradient, dict[str, float]]]
) -> None:
    table = awkward_table()
    given = EVERYTHING | {"global_batch_size": 8, "max_tokens_per_gpu": 60, "lr": 1e-3}
    many = on_ranks(ranks, everything_on_ranks, tiny_args(model, **given), table, str(tmp_path))
    with one_rank(tiny_args(model, **given)) as trainer:
        start = weights_of(trainer)
        np.testing.assert_allclose(many["log_probs"], trainer.log_probs(table), rtol=1e-5, atol=1e-5)
        for mine, theirs in zip(five_steps(trainer, table), many["history"], strict=True):
            assert mine.keys() == theirs.keys()
            for name in ("train/loss", "train/pg_loss", "train/kl_loss", "train/entropy_loss", "train/grad_norm"):
                assert theirs[name] == pytest.approx(mine[name], rel=1e-5, abs=1e-5), name
        assert_same_run(many["weights"], weights_of(trainer), start)
        stats = trainer.token_stats
        assert stats is not None
        for name in ("sample_id", "offsets", "log_probs", "entropy"):
            mine, theirs = getattr(stats, name), getattr(many["token_stats"], name)
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-3, equal_nan=False, err_msg=name)
    with one_rank(tiny_args(model, **given, optimizer="muon")) as trainer:
        for mine, theirs in zip(five_steps(trainer, table), many["muon_history"], strict=True):
            assert theirs["train/loss"] == pytest.approx(mine["train/loss"], rel=1e-4, abs=1e-5)
    assert many["skipped_steps"] == 1, "what is wrong on one rank is left out on all"
    (matrices, stacks), (expected_matrices, _) = many["muon_steps"], muon_steps(None)
    for mine, theirs in zip(matrices, expected_matrices, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
    # no matrix is worked on twice
    assert sum(count for count, *_ in stacks) == 3 * len(MATRICES)
    theirs = [many["exact_of_each_batch"], many["exact_of_replicas"], *many["exact"]]
    for (gradient, means), (expected, expected_means) in zip(theirs, [exact[0], exact[0], *exact], strict=True):
        assert_same_gradient(gradient, expected)
        assert means == pytest.approx(expected_means, rel=1e-9, abs=1e-12)

    # what engines get in bf16 travels between ranks in bf16, and is the weight rounded once
    dtypes, half = many["in_half"]
    assert len(dtypes) == 2 * len(many["weights"])
    assert set(dtypes) == {torch.bfloat16}
    assert half.keys() == many["weights"].keys()
    for name, weight in many["weights"].items():
        assert torch.equal(half[name], weight.bfloat16()), name

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
