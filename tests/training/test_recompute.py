"""Recomputed and compiled layers give the gradient of plain ones."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from exact import Gradient, assert_same_gradient, assert_same_run, awkward_table, exact_step
from tiny import on_ranks, one_rank, random_table, save_tiny_model, tiny_args, weights_of
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from slimelite.training.batch import MicroBatch
from slimelite.training.columns import TokenColumns
from slimelite.training.loading import build_policy
from slimelite.training.model import PolicyModel, chunked_log_probs
from slimelite.training.parallel import whole
from slimelite.training.trainer import Trainer

# compiling takes seconds of a quiet core, and minutes beside others

KEPT = {"mm", "addmm", "_scaled_dot_product_flash_attention_for_cpu"}


class Count(TorchDispatchMode):
    """Matrix products and attentions, those of the LM head too, and all other operators."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = self.others = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        slow = func.overloadpacket.__name__ in KEPT
        self.kept, self.others = self.kept + slow, self.others + (not slow)
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def step(model: Path, **flags: Any) -> tuple[Gradient, Count]:
    """The float64 gradient of one step, and what was computed for it."""
    with one_rank(tiny_args(model, **flags)) as trainer, Count() as count:
        return exact_step(trainer, awkward_table())[0], count


@pytest.mark.newest
def test_selective_recomputation_leaves_out_matrix_products_and_attention(model: Path) -> None:
    gradient, plain = step(model)
    for granularity in ("full", "selective"):
        found, count = step(model, gradient_checkpointing=True, recompute_granularity=granularity)
        assert all(torch.equal(found[name], gradient[name]) for name in gradient), granularity
        assert count.others > plain.others
        assert (count.kept > plain.kept) == (granularity == "full"), granularity


@pytest.mark.newest
def test_compiled_layers_train_as_plain_ones(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as for a GPU, under recomputation, and then run without the code that a compiler would write."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters: Any = torch._dynamo.utils.counters
    counters.clear()
    runs = []
    for flags in ({}, {"compile": True, "gradient_checkpointing": True}):
        with one_rank(tiny_args(model, **flags)) as trainer:
            start = weights_of(trainer)
            for i in range(2):
                trainer.train(i, random_table(seed=i))
            runs.append(weights_of(trainer))
        assert bool(counters["stats"]) == bool(flags)
    assert_same_run(runs[1], runs[0], start)
    # four parts of a layer, around attention, once for all three layers, and two of the head; some for other strides
    assert counters["stats"]["unique_graphs"] <= 8
    assert not counters["recompile_limit"]


def saved_and_gradient(model: PolicyModel) -> tuple[int, Gradient]:
    """Bytes that the layers and the head keep for the backward pass, and the whole gradient."""
    table, kept = random_table(), {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    batch = MicroBatch(TokenColumns.from_table(table), np.arange(len(table)))
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        log_probs = model(batch, 1.0)[0]
    log_probs.sum().backward()
    return sum(kept.values()), {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def each_way(trainer: Trainer) -> list[tuple[int, Gradient]]:
    """The same model under FSDP, plain, recomputed, compiled, and both."""
    found, compiled = [], partial(torch.compile, backend="eager")  # traced, which is what recomputation can miss
    with mock.patch.object(torch, "compile", compiled):
        for compiles, recomputes in ((False, False), (False, True), (True, False), (True, True)):
            # tracing takes long, and one of two ranks may as well do without it
            compiles &= trainer.world.rank == 0
            args = replace(trainer.args, compile=compiles, gradient_checkpointing=recomputes)
            model = build_policy(args, trainer.world, args.hf_checkpoint, trainable=True)
            assert sum(isinstance(module, FSDPModule) for module in model.modules()) == 5
            found.append(saved_and_gradient(model))
    return found


@pytest.mark.newest
def test_compiled_layers_are_recomputed_under_fsdp(tmp_path: Path) -> None:
    """On two ranks, because one rank of a CPU is not sharded."""
    model = save_tiny_model(tmp_path, num_hidden_layers=4)
    (plain, gradient), *others = on_ranks(2, each_way, tiny_args(model))
    (recomputed, _), (compiled, _), (both, _) = others
    assert recomputed < plain / 3
    assert both <= recomputed < compiled
    for _, found in others:
        assert_same_gradient(found, gradient, limit=1e-5)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_a_compiled_head_is_within_rounding_in_fp32() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 32, generator=generator, dtype=torch.float64) for n in (50, 300))
    targets = torch.randint(300, (50,), generator=generator)
    exact = chunked_log_probs(hidden, weight, targets, chunk_size=16)
    found = chunked_log_probs(hidden.float(), weight.float(), targets, chunk_size=16, compiled=True)
    for mine, theirs in zip(found, exact, strict=True):
        assert (mine - theirs).abs().max() < 2e-5
