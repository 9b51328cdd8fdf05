"""A tiny Qwen2, rollouts of random tokens for it, and several ranks in as many processes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from slimelite.arguments import Args
from slimelite.engines.protocol import WeightBucket
from slimelite.samples.sample import Sample, Status
from slimelite.samples.table import SampleTable
from slimelite.training.batch import MicroBatch
from slimelite.training.columns import TokenColumns
from slimelite.training.lora import frozen, gathered
from slimelite.training.parallel import whole
from slimelite.training.planning import split_steps
from slimelite.training.trainer import Trainer
from tests.ranks import start_ranks

VOCAB = 61


def save_tiny_model(path: Path, *, seed: int = 0, **changes: Any) -> Path:
    """A random Qwen2 of 30 thousand parameters with grouped-query attention and tied embeddings."""
    config = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,  # far from uniform, so that losses and gradients are of ordinary size
    } | changes
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **config)).save_pretrained(path)
    return path


def exact_norms(model: nn.Module) -> None:
    """RMS norms of transformers round to fp32 whatever the model's dtype; these keep float64."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_rms_norm, module)


def _rms_norm(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.rms_norm(x, x.shape[-1:], module.weight, module.variance_epsilon)


def tiny_args(model: Path | str, **changes: Any) -> Args:
    """Arguments of a small run."""
    given = {
        "hf_checkpoint": str(model),
        "device": "cpu",
        "lr": 1e-2,
        "global_batch_size": 64,
        "num_steps_per_rollout": 1,
        "num_rollout": 100,
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 128,
        "rollout_max_response_len": 16,
    }
    return Args(**(given | changes))


def random_table(
    *,
    seed: int = 0,
    groups: int = 4,
    group_size: int = 4,
    zero_advantage: float = 0.0,
    masked: float = 0.2,
    longest: int = 16,
    prompt: tuple[int, int] = (2, 9),
) -> SampleTable:
    """Groups of responses of 1 to ``longest`` random tokens with random advantages, masks and engine log-probs.

    ``prompt``: tokens of the shortest prompt, and one more than of the longest.
    """
    rng = np.random.default_rng(seed)
    samples = []
    for g in range(groups):
        start = rng.integers(0, VOCAB, rng.integers(*prompt)).tolist()
        samples.append([])
        for i in range(group_size):
            sample = Sample(group_index=g, index=g * group_size + i, tokens=list(start), reward=float(rng.random()))
            response = rng.integers(0, VOCAB, rng.integers(1, longest + 1)).tolist()
            sample.append_response_tokens(response, log_probs=(-rng.random(len(response)) - 3.5).tolist())
            sample.loss_mask = [int(rng.random() > masked) for _ in response]
            sample.status = Status.COMPLETED
            samples[-1].append(sample)
    table = SampleTable.from_samples(samples)
    table.advantage = rng.normal(size=len(table)) * (rng.random(len(table)) >= zero_advantage)
    return table


def loss_batch(args: Args, table: SampleTable, rows: Sequence[int] | None = None) -> MicroBatch:
    """What the loss of a micro-batch of ``rows`` (None: all) gets; ``old`` are random log-probs of the table."""
    steps = split_steps(table.rollout_id, table.unit_id, args.global_batch_size or len(table))
    columns = TokenColumns.from_table(table, steps)
    columns.set_weights(args)
    columns.values = torch.linspace(-1, 1, len(columns.mask))
    columns.spread_advantages(args)
    columns.old = -torch.rand(len(columns.mask), generator=torch.Generator().manual_seed(0)) - 3.5
    chosen = np.array(range(len(table)) if rows is None else rows, np.int64)
    return MicroBatch(columns, chosen).fetch()


@contextmanager
def one_rank(args: Args) -> Iterator[Trainer]:
    """A trainer in this process."""
    trainer = Trainer(args)
    try:
        yield trainer
    finally:
        trainer.close()


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The whole gradient of every weight."""
    return {n: whole(p.grad).clone() for n, p in trainer.model.named_weights() if p.grad is not None}


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Every whole weight, adapters merged."""
    return {n: gathered(weight, frozen(weight).dtype, None).clone() for n, weight in trainer.model.named_weights()}


class Recorder:
    """A weight sink that keeps what it is given."""

    every_rank = False

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.partial = False
        self.bucket_bytes: list[int] = []
        self.tensors: dict[str, torch.Tensor] = {}

    def begin(self, version: int, changed: Collection[str] | None = None) -> bool:
        self.calls.append(f"begin {version}")
        self.changed = changed
        return changed is not None and self.partial

    def send(self, bucket: WeightBucket) -> None:
        self.calls.append("send")
        self.bucket_bytes.append(bucket.flat.nbytes)
        for name, tensor in bucket.tensors():
            assert name not in self.tensors, f"{name} came twice"
            self.tensors[name] = tensor.clone()

    def end(self) -> None:
        self.calls.append("end")


def on_ranks(world_size: int, work: Callable[..., Any], args: Args, *rest: Any) -> Any:
    """``work(trainer, *rest)`` in ``world_size`` processes, one trainer each; what rank 0 returned."""
    with tempfile.TemporaryDirectory() as folder:
        start_ranks(_rank, (world_size, folder, work, args, rest), world_size)
        return torch.load(f"{folder}/result", weights_only=False)


def _rank(rank: int, world_size: int, folder: str, work: Callable[..., Any], args: Args, rest: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    trainer = Trainer(args, rank=rank, world_size=world_size, store=dist.FileStore(f"{folder}/meet", world_size))
    result = work(trainer, *rest)
    if rank == 0:
        torch.save(result, f"{folder}/result")
    trainer.close()
