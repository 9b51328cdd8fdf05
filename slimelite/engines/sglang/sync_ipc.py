"""Weights on the GPUs that trainer and servers share: handles of the trainers' memory, through CUDA IPC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from slimelite.engines.protocol import WeightBucket
from slimelite.engines.sglang.control import Server, ServerError
from slimelite.engines.sglang.payload import pickled, update_request
from slimelite.engines.sglang.weights import ServerSink, Shapes

T = TypeVar("T")


class IpcSink(ServerSink):
    """Each trainer rank offers its own copy of a bucket to the server rank on its GPU (collective).

    The first trainer rank on a server's GPUs talks to it, for all of them. On a CPU tensors travel by value.

    Args:
        servers: in the order of the trainer ranks, on whose GPUs they are: side by side from rank 0 on, unless their
            ``first_gpu`` leaves ranks out.
        shapes: see `ServerSink`.
    """

    every_rank = True

    def __init__(self, servers: Sequence[Server], shapes: Shapes) -> None:
        self.rank, world = dist.get_rank(), dist.get_world_size()
        end, ranks = 0, []
        for server in servers:
            first = end if server.first_gpu is None else server.first_gpu
            end = first + server.tp_size
            ranks.append(range(first, end))
        assert end <= world, f"{end} ranks of colocated engines on {world} trainer ranks"
        self.serves = any(self.rank in own for own in ranks)
        super().__init__([s for s, own in zip(servers, ranks, strict=True) if own[0] == self.rank], shapes)

    def _transfer(self, bucket: WeightBucket) -> None:
        # the memory behind a handle that nobody opens would never be free again
        blobs = from_all(pickled(bucket) if self.serves else b"")
        for server in self.servers:
            server.post("/update_weights_from_tensor", update_request(blobs[self.rank : self.rank + server.tp_size]))

    def _attempt(self, work: Callable[[], None]) -> None:
        failure = ""
        try:
            work()
        except ServerError as error:
            failure = str(error)
        # all wait here, holding their memory, until every server has copied it; and all fail together
        failures = [text for text in from_all(failure) if text]
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()
        if failures:
            raise self._failed("; ".join(failures))


def from_all(value: T) -> list[T]:
    """``value`` of every trainer rank, in their order (collective)."""
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
