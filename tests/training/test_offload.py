"""Memory that a trainer lends to engines comes back as it was, through the same host memory every time."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import Recorder, one_rank, random_table, save_tiny_model, tiny_args, weights_of
from torch import Tensor

from slimelite.base import heap
from slimelite.training import offload
from slimelite.training.offload import HostMemory
from slimelite.training.parallel import local
from slimelite.training.trainer import Trainer


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that most matrices of the tiny model do not fit into."""
    monkeypatch.setattr(offload, "BLOCK_BYTES", 4096)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def bytes_held(trainer: Trainer) -> int:
    tensors = (tensor for learner in trainer.learners for tensor in learner.tensors())
    return sum(local(t).untyped_storage().nbytes() for t in tensors)


def train(model: Path, rank: int, between: Callable[[Trainer, int], None]) -> dict[str, Tensor]:
    """The weights after three rollouts, with adapters of a ``rank`` above 0."""
    with one_rank(tiny_args(model, lora_rank=rank)) as trainer:
        for i in range(3):
            trainer.train(i, random_table(seed=i))
            between(trainer, i)
        return weights_of(trainer)


@pytest.mark.parametrize("rank", [0, 4])
def test_training_goes_on_as_if_nothing_had_happened_and_host_memory_is_kept(model: Path, rank: int) -> None:
    blocks: list[list[int]] = []

    def lend(trainer: Trainer, rollout_id: int) -> None:
        held, before = bytes_held(trainer), weights_of(trainer)
        trainer.memory.offload()
        trained = sum(p.numel() * 4 for p in trainer.model.trained().values())
        assert held >= trained * 3 + (sum(weight.nbytes for weight in before.values()) if rank else 0)
        assert bytes_held(trainer) == 0
        sink = Recorder()
        trainer.push_weights(sink, rollout_id)
        assert all(torch.equal(tensor, before[name]) for name, tensor in sink.tensors.items())
        assert bytes_held(trainer) == 0
        blocks.append([block.data_ptr() for block in trainer.memory._blocks])
        assert held <= len(blocks[-1]) * offload.BLOCK_BYTES < held + offload.BLOCK_BYTES
        trainer.memory.onload()
        assert bytes_held(trainer) == held

    lent, kept = train(model, rank, lend), train(model, rank, lambda trainer, rollout_id: None)
    assert all(torch.equal(lent[name], kept[name]) for name in kept)
    assert blocks[0] == blocks[1] == blocks[2]


def test_what_did_not_change_is_not_copied_again() -> None:
    weights = [torch.arange(3000.0), torch.ones(1, dtype=torch.bfloat16)]
    memory = HostMemory(lambda: weights, torch.device("cpu"))
    memory.offload()
    memory.onload()
    assert torch.equal(weights[0], torch.arange(3000.0))
    weights[0].zero_()
    memory.offload(unchanged=True)
    memory.onload()
    assert torch.equal(weights[0], torch.arange(3000.0))
    weights[0].zero_()
    memory.offload()
    memory.onload()
    assert torch.equal(weights[0], torch.zeros(3000))
    assert weights[1].tolist() == [1.0]


# page faults of a third rollout; how much a heap shrinks that holds more free memory than is kept, and how much of it
# there is [bytes]
HEAP = """
import resource, sys
import psutil, torch
from tiny import one_rank, random_table, save_tiny_model, tiny_args
from slimelite.base import heap
from slimelite.training import trainer
if sys.argv[2] == "given back":
    trainer.keep_freed_memory = lambda tight: heap.set_heap(mapped_above=2**17, trimmed_above=2**17)
model = save_tiny_model(sys.argv[1], hidden_size=256, intermediate_size=1024, num_hidden_layers=1)
table = random_table(groups=16, group_size=8)
with one_rank(tiny_args(model, max_tokens_per_gpu=4096, global_batch_size=128)) as trainer:
    for i in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        trainer.train(i, table)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
freed = [torch.ones(2**22) for _ in range(8)]  # 16 MiB each
guard = bytearray(1000)
del freed
heap.return_freed_memory()
held = psutil.Process().memory_info().rss
heap.return_freed_memory(above=2**26)
print(held - psutil.Process().memory_info().rss, 8 * 2**24)
"""


@pytest.mark.skipif(heap.GLIBC is None, reason="another C library")
def test_freed_memory_is_kept_for_the_next_rollout_unless_it_is_much(tmp_path: Path) -> None:
    here = Path(__file__).parent
    env = os.environ | {"PYTHONPATH": f"{here}:{here.parents[1]}"}

    def figures(freed: str) -> list[int]:
        command = [sys.executable, "-c", HEAP, str(tmp_path), freed]
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True, text=True)
        return [int(figure) for figure in done.stdout.split()]

    faults, returned, free = figures("kept")
    assert faults < figures("given back")[0] / 4
    assert returned > free / 2


@pytest.mark.parametrize(("launcher", "times"), [("ray", 1), ("local", 0)])
def test_the_engine_of_the_same_process_has_what_training_freed(
    model: Path, monkeypatch: pytest.MonkeyPatch, launcher: str, times: int
) -> None:
    returned: list[None] = []
    monkeypatch.setattr("slimelite.training.trainer.return_freed_memory", lambda: returned.append(None))
    with one_rank(tiny_args(model, launcher=launcher)) as trainer:
        trainer.train(0, random_table())
    assert len(returned) == times


def test_python_seldom_collects_while_a_process_loads_and_then_as_before() -> None:
    def collections() -> int:
        before = gc.get_stats()[0]["collections"]
        _kept = [[] for _ in range(70_000)]
        return int(gc.get_stats()[0]["collections"]) - before

    assert collections() > 50
    with heap.loading():
        assert collections() < 3
    assert collections() > 50
