"""Weight updates of SGLang servers.

Every way is a `slimelite.training.weights.WeightSink` over the same servers: `begin` ends what they are decoding,
`send` delivers a bucket, `end` flushes the KV cache, stamps the version and lets them decode again. An update that
fails raises `WeightSyncError` and leaves every server paused that does not have all of it, so that nothing is ever
sampled from half-new weights; a whole update later makes them good again.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from slimelite.engines.protocol import WeightBucket
from slimelite.engines.sglang.control import Server, ServerError, each
from slimelite.engines.sglang.payload import pickled, update_request
from slimelite.model_files import write_weights

logger = logging.getLogger(__name__)

T = TypeVar("T")
Shapes = Mapping[str, tuple[int, ...]]


class WeightSyncError(RuntimeError):
    """A server did not take an update and stays paused: nothing can go on before a whole one."""


class ServerSink(ABC):
    """What the ways have in common.

    Args:
        servers: they get every bucket, all at once.
        shapes: what a whole update consists of, see `weight_shapes`. SGLang skips a name that it does not know and
            dies of a wrong shape, so both are caught here.
    """

    # whether all trainer ranks call it, not rank 0 alone
    every_rank = False

    def __init__(self, servers: Sequence[Server], shapes: Shapes) -> None:
        self.servers = list(servers)
        self.shapes = shapes
        # of the update that is going on, and of the last one that every server has
        self.version: int | None = None
        self.delivered: int | None = None
        self._received: set[str] = set()

    def begin(self, version: int) -> None:
        """Weights of this version follow; requests that are running end with what they have, new ones wait."""
        self.version, self.delivered = version, None
        self._received.clear()
        self._attempt(self._open)

    def send(self, bucket: WeightBucket) -> None:
        """Deliver a bucket.

        Raises:
            ValueError: there was no `begin`, or the model has no such weight, or another shape of it.
            WeightSyncError: a server did not take it.
        """
        if self.version is None:
            raise ValueError("a weight update starts with begin_weight_update")
        for name, shape in zip(bucket.names, bucket.shapes, strict=True):
            if name not in self.shapes:
                raise ValueError(f"{name} is not a weight of the model that the engine was started with")
            if tuple(shape) != self.shapes[name]:
                raise ValueError(f"{name} came with shape {tuple(shape)}; the model has {self.shapes[name]}")
        self._attempt(lambda: self._transfer(bucket))
        self._received.update(bucket.names)

    def end(self) -> None:
        """All weights are there: decode with them.

        Raises:
            ValueError: a weight was not sent; the servers stay paused.
            WeightSyncError: a server did not finish.
        """
        if self.version is None:
            raise ValueError("a weight update starts with begin_weight_update")
        missing = self.shapes.keys() - self._received
        if missing:
            raise ValueError(f"the update lacks {len(missing)} weights, {min(missing)} among them")
        self._attempt(self._finish)
        self.version, self.delivered = None, self.version

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Give up what is held for later updates."""

    def _open(self) -> None:
        each(self.servers, _open)

    @abstractmethod
    def _transfer(self, bucket: WeightBucket) -> None: ...

    def _finish(self) -> None:
        each(self.servers, lambda server: _finish(server, self.version))

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except ServerError as error:
            raise self._failed(str(error)) from error

    def _failed(self, why: str) -> WeightSyncError:
        return WeightSyncError(
            f"weights {self.version} did not reach every engine: {why}. One that failed may have some new weights and "
            "some old ones: it stays paused, nothing is sampled from it. Go on from the last checkpoint with --load"
        )


class HttpSink(ServerSink):
    """Tensors in the body of ``update_weights_from_tensor``: needs nothing but a connection."""

    def _transfer(self, bucket: WeightBucket) -> None:
        host = WeightBucket(bucket.names, bucket.shapes, bucket.flat.cpu())
        blob = pickled(host)
        # every rank of a server reads a pickle of its own
        requests = {width: update_request([blob] * width) for width in {server.tp_size for server in self.servers}}
        each(self.servers, lambda server: server.post("/update_weights_from_tensor", requests[server.tp_size]))


def pause(server: Server) -> None:
    """End what a server is decoding; what is sent to it waits until `resume`.

    Pausing in mode "retract" or "in_place" would let a response go on with keys and values of the old weights: the
    cache can be flushed only while no request is there (SGLang 0.5.20). So whoever sent it sends the rest again.
    """
    server.post("/pause_generation", {"mode": "abort"})


def resume(server: Server, version: int | None) -> None:
    """Forget cached keys and values, stamp ``version`` on all that follows, decode."""
    # the wait is for requests that were aborted a moment ago
    server.post("/flush_cache?timeout=30")
    server.post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
    server.post("/continue_generation")


def _open(server: Server) -> None:
    pause(server)
    if not server.brackets_updates:
        return
    try:
        server.post("/begin_weight_update")
    except ServerError:
        # an update that broke off left it open
        server.post("/end_weight_update")
        server.post("/begin_weight_update")


def _finish(server: Server, version: int | None) -> None:
    if server.brackets_updates:
        server.post("/end_weight_update")
    resume(server, version)


CONFIG = "config.json"


class DiskSink(ServerSink):
    """A Hugging Face folder for each version, which the servers then load; they decode while it is written.

    Args:
        servers, shapes: see `ServerSink`.
        directory: the folders go here, ``weights_0000007``.
        config: path of the model's config.json.
        keep: leave the folders of earlier versions where they are.
    """

    def __init__(self, servers: Sequence[Server], shapes: Shapes, directory: Path, config: Path, keep: bool) -> None:
        super().__init__(servers, shapes)
        self.directory = directory.absolute()
        self.config = config
        self.keep = keep
        self._written: list[Path] = []
        self._files: dict[str, str] = {}

    def _open(self) -> None:
        self._files.clear()
        self._folder = self.directory / f"weights_{self.version:07d}"
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)

    def _transfer(self, bucket: WeightBucket) -> None:
        file = f"model-{len(set(self._files.values())):05d}.safetensors"
        host = WeightBucket(bucket.names, bucket.shapes, bucket.flat.cpu())
        write_weights(dict(host.tensors()), self._folder / file)
        self._files |= dict.fromkeys(bucket.names, file)

    def _finish(self) -> None:
        size = sum(file.stat().st_size for file in self._folder.iterdir())
        index = {"metadata": {"total_size": size}, "weight_map": self._files}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index))
        shutil.copy(self.config, self._folder / CONFIG)
        each(self.servers, self._load)
        if not self.keep:
            for folder in self._written:
                shutil.rmtree(folder, ignore_errors=True)
            self._written.clear()
        self._written.append(self._folder)

    def _load(self, server: Server) -> None:
        pause(server)
        server.post("/update_weights_from_disk", {"model_path": str(self._folder), "flush_cache": False})
        resume(server, self.version)


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
