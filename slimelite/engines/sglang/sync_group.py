"""Weights over a process group of trainer rank 0 and every GPU of the servers: NCCL, or gloo on a CPU."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from slimelite.engines.protocol import WeightBucket
from slimelite.engines.sglang.control import Server, ServerError
from slimelite.engines.sglang.weights import ServerSink, Shapes

logger = logging.getLogger(__name__)
JOIN_S = 120
LEAVE_S = 10.0


class GroupSink(ServerSink):
    """A broadcast of each bucket from this process. The group is made once, and left by `close`.

    Args:
        servers, shapes: see `ServerSink`.
        device: where buckets lie; it decides the backend.
        host: a name of this machine that the servers can reach.
        timeout_s: of a broadcast that does not end [s].

    Raises:
        ServerError: a server did not join.
    """

    def __init__(
        self, servers: Sequence[Server], shapes: Shapes, device: torch.device, host: str, timeout_s: float = 600.0
    ) -> None:
        super().__init__(servers, shapes)
        self.name = f"slimelite-{os.urandom(4).hex()}"
        self._threads = ThreadPoolExecutor(max(1, len(servers)), "weight-sync")
        backend = "nccl" if device.type == "cuda" else "gloo"
        widths = [server.tp_size for server in servers]
        world = 1 + sum(widths)
        # the servers knock until the store is there; rank 0 of the group holds it
        store = dist.TCPStore(host, 0, world, True, timedelta(seconds=JOIN_S), wait_for_workers=False)
        joining = [
            self._threads.submit(
                server.post,
                "/init_weights_update_group",
                {
                    "master_address": host,
                    "master_port": store.port,
                    "rank_offset": offset,
                    "world_size": world,
                    "group_name": self.name,
                    "backend": backend,
                },
                1,
            )
            for server, offset in zip(servers, accumulate(widths, initial=1), strict=False)
        ]
        self._group = _join(store, world, backend, self.name, timeout_s)
        for joined in joining:
            joined.result()

    def _transfer(self, bucket: WeightBucket) -> None:
        dtype = str(bucket.flat.dtype).removeprefix("torch.")
        request = {
            "names": bucket.names,
            "dtypes": [dtype] * len(bucket.names),
            "shapes": bucket.shapes,
            "group_name": self.name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        # once: a server that got the first request is in the broadcast already
        path = "/update_weights_from_distributed"
        answers = [self._threads.submit(server.post, path, request, 1) for server in self.servers]
        sent = dist.broadcast(bucket.flat.view(torch.uint8), src=0, group=self._group, async_op=True)
        done, _ = wait(answers, return_when=FIRST_EXCEPTION)
        for answer in done:
            answer.result()
        assert sent is not None
        sent.wait()

    def close(self) -> None:
        """Servers and this process leave the group."""
        for server in self.servers:
            try:
                # one that still waits for a broadcast that failed does not answer
                server.post("/destroy_weights_update_group", {"group_name": self.name}, 1, LEAVE_S)
            except ServerError as error:
                logger.warning("%s did not leave the process group of weight updates: %s", server.url, error)
        dist.destroy_process_group(self._group)
        self._threads.shutdown()


def _join(store: Any, world: int, backend: str, name: str, timeout_s: float) -> Any:
    # torch has no public way to a second group that reaches beyond the default one; SGLang enters by this door too,
    # and the keys of both sides in the store must be the same
    group, _ = c10d._new_process_group_helper(
        world,
        0,
        [],
        dist.Backend(backend),
        dist.PrefixStore(name, store),
        group_name=c10d.GroupName(name),
        timeout=timedelta(seconds=timeout_s),
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world)}
    return group
