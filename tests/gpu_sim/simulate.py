"""Trainers on a CUDA device that is not there: ``LD_PRELOAD=guard.so python simulate.py '[{"shape": "7B", ...}]'``.

Each case is a trainer of the product itself, on one rank of so many: built, offloaded and onloaded, trained for one
rollout with a reference pass, offloaded, its weights pushed, onloaded. Prints what was found of each as a line of
JSON. The guard is loaded first of all because torch asks once, early, whether CUDA is there.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import fake_cuda
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from slimelite.arguments import Args
from slimelite.samples.sample import Sample
from slimelite.samples.table import SampleTable
from slimelite.training import attention, critic, loading, lora, model, parallel, trainer
from slimelite.training.batch import MicroBatch
from slimelite.training.columns import TokenColumns
from slimelite.training.learner import Learner, MetricSums, Scores
from slimelite.training.offload import HostMemory
from slimelite.training.packing import Packing
from slimelite.training.trainer import Trainer


class Sink:
    """Takes weights, and keeps nothing."""

    every_rank = True

    def begin(self, version: int, changed: object = None) -> bool:
        return False

    def send(self, bucket: Any) -> None:
        assert bucket.flat.device.type == "cuda"

    def end(self) -> None: ...


def model_folder(shape: str, layers: int) -> str:
    folder = tempfile.mkdtemp()
    with open(f"{folder}/config.json", "w") as file:
        json.dump(fake_cuda.model_config(shape, layers), file)
    return folder


def rollout(rows: int, prompt: int, response: int, shared: bool) -> SampleTable:
    """Each sample has a prompt of its own, or, if ``shared``, two have one."""
    rng, samples = np.random.default_rng(0), []
    prompts = rng.integers(0, 1000, (rows, prompt)).tolist()
    for row in range(rows):
        sample = Sample(group_index=row // 2, index=row, reward=0.0, tokens=prompts[row // 2 if shared else row])
        sample.append_response_tokens(rng.integers(0, 1000, response).tolist(), log_probs=[-1.0] * response)
        samples.append([sample])
    table = SampleTable.from_samples(samples)
    table.advantage = rng.normal(size=rows)
    return table


def keep_the_hosts_numbers() -> None:
    """What runs on the host, on numbers, keeps its numbers; what the host reads from the device is made up."""
    gather = Scores.gather

    def gathered(scores: Scores) -> tuple[torch.Tensor, ...]:
        found = [(tuple(x.shape), x.dtype) for x in gather(scores)]
        return fake_cuda.outside(lambda: tuple(torch.full(shape, -1.0, dtype=dtype) for shape, dtype in found))()

    Scores.gather = gathered
    for name, method in list(vars(TokenColumns).items()):
        if isinstance(method, classmethod):
            setattr(TokenColumns, name, classmethod(fake_cuda.outside(method.__func__)))
        elif callable(method) and not name.startswith("__"):
            setattr(TokenColumns, name, fake_cuda.outside(method))
    MetricSums._local_sums = lambda sums: dict.fromkeys(sums._pairs, (1.0, 1.0))
    dist.all_gather_object = alone
    critic.explained_variance = lambda *_: (1.0, 1.0)
    loading._may_pack = lambda *_: Packing.SHARED  # seen on a small copy of the model, with numbers
    trainer.join_world = fake_cuda.outside(parallel.join_world)


def alone(everyone: list[Any], own: Any) -> None:
    """What a rank gathers of objects when no other answers."""
    everyone[:] = [own]


def plain_attention(*qkv: Any) -> torch.Tensor:
    """What torch does without a layout."""
    q, k, v = (x.transpose(0, 1)[None] for x in qkv[:3])
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)[0].transpose(0, 1)


def plant(name: str) -> Any:
    """A mistake that no CPU test would see."""
    take, patch, empty, onload = MicroBatch.take, mock.patch.object, torch.empty, HostMemory.onload
    faults = {
        "column left on the host": (MicroBatch, "take", lambda batch, column: take(batch, column).cpu()),
        "fp32 compute": (parallel, "MixedPrecisionPolicy", lambda **_: MixedPrecisionPolicy()),
        "attention of CPUs": (attention._MergedAttention, "apply", plain_attention),
        "logits rounded to bf16": (model, "_product", lambda left, right: (left @ right).float()),
        "weights gathered in fp32": (lora, "whole", lambda t: parallel.whole(t.float()).to(t.dtype)),
        "offload forgotten": (HostMemory, "offload", lambda memory, **_: None),
        "moments not offloaded": (Learner, "tensors", lambda learner: learner.model.parameters()),
        "pageable memory": (torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options)),
        "fresh memory": (HostMemory, "onload", lambda memory: (onload(memory), memory._blocks.clear())),
        "gradients kept": (torch.optim.Optimizer, "zero_grad", lambda optimizer: None),
    }
    return patch(*faults[name])


def simulate(
    shape: str,
    ranks: int,
    rank: int = 0,
    layers: int = 2,
    again: bool = False,
    tokens: tuple[int, int] = (64, 256),
    shared: bool = False,
    **flags: Any,
) -> dict[str, Any]:
    """What was found; memory in bytes. ``again``: train once more when it is back on the device. ``tokens``: of a
    prompt and of a response. ``shared``: two responses have one prompt.
    """
    given: dict[str, Any] = {"num_rollout": 9, "num_steps_per_rollout": 1, "global_batch_size": 6 * ranks}
    given |= {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 1024, "rollout_max_response_len": 256}
    given |= {"use_reference": True, "use_kl_loss": True, "kl_loss_coef": 0.1, "rollout_temperature": 0.8}
    args = Args(hf_checkpoint=model_folder(shape, layers), device="cuda", **given | flags)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    table = rollout(6 * ranks, *tokens, shared)  # by default two micro-batches of 960 tokens for each rank
    with fake_cuda.simulation() as meter, closing(Trainer(args, rank=rank, world_size=ranks, store=FakeStore())) as t:
        found: dict[str, Any] = {"parameters": sum(lora.frozen(p).numel() for _, p in t.model.named_weights())}
        found["shard"] = sum(local(lora.frozen(p)).numel() for _, p in t.model.named_weights())
        t.offload()  # as a run begins: weights go to the engines before anything is trained
        found["offloaded_first"] = meter.now
        t.onload()
        t.train(0, table)
        found["state"] = sum(local(x).untyped_storage().nbytes() for each in t.learners for x in each.tensors())
        found["resting"] = meter.now
        found["products"], found["sent"] = dict(meter.products), dict(meter.sent)
        meter.sent.clear()
        t.offload()
        found["offloaded"], found["pinned"], meter.peak = meter.now, meter.pinned, 0
        found["pushed"] = t.push_weights(Sink(), 1)["perf/update_weights_bytes"]
        found["push_peak"], found["after_push"] = meter.peak, meter.now
        found["push_sent"] = dict(meter.sent)
        t.onload()
        found["onloaded"] = meter.now
        found["peaks"] = peaks = dict[str, int]()
        if again:  # the first step makes the optimizer's state at its end
            t.timed.around = partial(peak_of, meter, peaks)
            t.train(1, table)
            found["peak"] = max(peaks.values())
        t.offload()
        found["pinned_later"] = meter.pinned
    return found


@contextmanager
def peak_of(meter: fake_cuda.Meter, peaks: dict[str, int], name: str) -> Iterator[None]:
    """Put the largest memory during a pass into ``peaks``."""
    meter.peak = meter.now
    yield
    peaks[name] = meter.peak


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def main() -> None:
    fake_cuda.install()
    keep_the_hosts_numbers()
    for case in json.loads(sys.argv[1]):
        try:
            with plant(case.pop("plant")) if "plant" in case else nullcontext():
                found = simulate(**case)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"[:500]}
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
