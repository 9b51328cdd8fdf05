"""Weights out of the trainer: whole tensors by Hugging Face name, in buckets for the engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from slimelite.engines.protocol import WeightBucket
from slimelite.training.model import PolicyModel
from slimelite.training.offload import HostMemory
from slimelite.training.parallel import World, whole

T = TypeVar("T")


class WeightSink(Protocol):
    """Where weights go; `begin`, then every bucket, then `end`.

    ``every_rank``: whether each trainer rank calls a sink of its own, with the same buckets; else rank 0 alone does.
    """

    every_rank: bool

    def begin(self, version: int) -> None:
        """Weights of this version follow."""
        ...

    def send(self, bucket: WeightBucket) -> None:
        """Some of them; the bucket is not used afterwards."""
        ...

    def end(self) -> None:
        """That was all of them."""
        ...


@torch.no_grad()
def full_weights(
    model: PolicyModel, dtype: torch.dtype, device: torch.device | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole tensor in ``dtype``), tied weights once; every rank runs it to the end (collective).

    A tensor may share memory with the parameter: read it before the next step. Shards are cast before they are
    gathered: in bf16 half as much travels between ranks. ``device``: where they are gathered; None: where they are.
    """
    for name, parameter in model.named_weights():
        yield name, whole(parameter.detach().to(device=device, dtype=dtype))


@torch.no_grad()
def buckets(
    weights: Iterable[tuple[str, Tensor]],
    size: int,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    memory: HostMemory | None = None,
) -> Iterator[WeightBucket]:
    """Whole weights, sharded or not, flattened together (collective); a bucket ends with the tensor that brings it to
    ``size`` bytes. ``dtype``, ``device``: of the buckets; None: those of the weights. ``memory``: where they may wait.

    A tensor is never cut: the loaders of SGLang and vLLM take whole ones. Nor does one that does not fit wait for the
    next bucket: of a 32B model, whose larger matrices are just over half of 512 MiB, each would then travel alone.
    """
    layout: list[list[tuple[str, Tensor]]] = [[]]
    for name, tensor in weights:
        if sum(t.numel() for _, t in layout[-1]) * (dtype or tensor.dtype).itemsize >= size:
            layout.append([])
        layout[-1].append((name, tensor))
    for part in filter(None, layout):
        # nothing here refers to the bucket while the next one is filled
        yield _fill(part, dtype or part[0][1].dtype, device or part[0][1].device, memory)


def _fill(
    weights: Sequence[tuple[str, Tensor]], dtype: torch.dtype, device: torch.device, memory: HostMemory | None
) -> WeightBucket:
    shapes = [tuple(tensor.shape) for _, tensor in weights]
    flat = torch.empty(sum(tensor.numel() for _, tensor in weights), dtype=dtype, device=device)
    bucket = WeightBucket([name for name, _ in weights], shapes, flat)
    # beside the bucket there is only the tensor that is being gathered
    for (_, place), (_, tensor) in zip(bucket.tensors(), weights, strict=True):
        with memory.present(tensor) if memory else nullcontext():
            place.copy_(whole(tensor.detach().to(device=device, dtype=dtype)))
    return bucket


def push(
    model: PolicyModel, world: World, sink: WeightSink | None, version: int, bucket_bytes: int, memory: HostMemory
) -> dict[str, float]:
    """Send all weights, in the dtype that the trainer computes in, through ``sink`` (collective).

    Only ranks that call their sink (see `WeightSink`) need one. Weights that wait in ``memory`` come to the device one
    at a time.

    Returns:
        ``perf/update_weights_bytes`` and ``perf/update_weights_buckets``.
    """
    if sink is not None and world.rank > 0 and not sink.every_rank:
        sink = None
    # what fails here is raised after the last gather: the other ranks would wait in the next one
    failure: Exception | None = None
    if sink is not None:
        failure = _failure(sink.begin, version)
    sent = count = 0
    for bucket in buckets(model.named_weights(), bucket_bytes, world.compute_dtype, world.device, memory):
        if sink is not None and failure is None:
            failure = _failure(sink.send, bucket)
        sent += bucket.flat.nbytes
        count += 1
        del bucket  # before the next one is filled
    if failure is not None:
        raise failure
    if sink is not None:
        sink.end()
    return {"perf/update_weights_bytes": float(sent), "perf/update_weights_buckets": float(count)}


def _failure(call: Callable[[T], None], argument: T) -> Exception | None:
    try:
        call(argument)
    except Exception as error:
        return error
    return None
