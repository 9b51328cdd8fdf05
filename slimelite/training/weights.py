"""Weights out of the trainer: whole tensors by Hugging Face name, in buckets for the engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from slimelite.engines.protocol import WeightBucket
from slimelite.training.model import PolicyModel
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
def full_weights(model: PolicyModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, whole tensor in ``dtype``), tied weights once; every rank runs it to the end (collective).

    A tensor may share memory with the parameter: read it before the next step.
    """
    for name, parameter in model.named_weights():
        yield name, whole(parameter.detach()).to(dtype)


def buckets(weights: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[WeightBucket]:
    """Weights of one dtype, flattened together up to ``max_bytes``; a larger tensor has a bucket to itself."""
    names: list[str] = []
    tensors: list[Tensor] = []
    size = 0
    for name, tensor in weights:
        if tensors and size + tensor.nbytes > max_bytes:
            yield _flatten(names, tensors)
            names, tensors, size = [], [], 0
        names.append(name)
        tensors.append(tensor)
        size += tensor.nbytes
    if tensors:
        yield _flatten(names, tensors)


def push(model: PolicyModel, world: World, sink: WeightSink | None, version: int, max_bytes: int) -> dict[str, float]:
    """Send all weights, in the dtype that the trainer computes in, through ``sink`` (collective).

    Only ranks that call their sink (see `WeightSink`) need one.

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
    for bucket in buckets(full_weights(model, world.compute_dtype), max_bytes):
        if sink is not None and failure is None:
            failure = _failure(sink.send, bucket)
        sent += bucket.flat.nbytes
        count += 1
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


def _flatten(names: list[str], tensors: list[Tensor]) -> WeightBucket:
    return WeightBucket(names, [tuple(t.shape) for t in tensors], torch.cat([t.flatten() for t in tensors]))
