"""Weights from the trainer into SGLang servers.

Every way is a `slimelite.engines.protocol.WeightSink` over the same servers: `begin` ends what they are decoding,
`send` delivers a bucket, `end` flushes the KV cache, stamps the version and lets them decode again. An update that
fails raises `WeightSyncError` and leaves every server paused that does not have all of it, so that nothing is ever
sampled from half-new weights; a whole update later makes them good again.
"""

from __future__ import annotations

import base64
import io
import json
import logging
import os
import pickle
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.multiprocessing.reductions import reduce_tensor
from transformers import AutoConfig
from transformers.utils import cached_file

from slimelite.engines.checks import WeightUpdate, model_shapes
from slimelite.engines.protocol import SyncSetup, WeightBucket, WeightSyncError
from slimelite.engines.sglang.server import ONCE, Server, each
from slimelite.http_client import HttpError
from slimelite.model_files import write_weights

T = TypeVar("T")
logger = logging.getLogger(__name__)

CONFIG = "config.json"
JOIN_S = 120
LEAVE_S = 10.0
# where `torch.multiprocessing.reductions.rebuild_cuda_tensor` is told the device
DEVICE_ARGUMENT = 6


def check_model(url: str, info: dict[str, Any], ours: str) -> None:
    """Whether the server at ``url`` has the weights that are trained: SGLang dies of one in another shape.

    Args:
        info: what it answers to ``/model_info``.
        ours: path of the model that is trained.

    Raises:
        ValueError: it runs another model, or one that cannot be looked at from here.
    """
    path = info["model_path"]
    try:
        theirs = model_shapes(path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{url} runs {path}, which cannot be read here, so that nothing tells whether it is --hf-checkpoint "
            f"{ours}: start it with a folder that both machines see, or with a name on the Hugging Face hub"
        ) from error
    different = sorted(name for name, _ in theirs.items() ^ model_shapes(ours).items())
    if info["model_type"] != AutoConfig.from_pretrained(ours).model_type:
        different = ["model_type"]
    if different:
        raise ValueError(
            f"{url} runs {path}, whose {different[0]} is not that of --hf-checkpoint {ours}: start it with the model "
            "that is trained"
        )


class ServerSink(ABC):
    """What the ways have in common; it keeps what is worth keeping from one update to the next.

    SGLang skips a weight whose name it does not know and dies of a wrong shape, so both are caught here.
    """

    # whether all trainer ranks call it, not rank 0 alone
    every_rank = False

    def __init__(self, setup: SyncSetup) -> None:
        self.setup = setup
        self.update = WeightUpdate(model_shapes(setup.model_path))
        # all of the run, and those that this rank talks to
        self.servers: tuple[Server, ...] = ()
        self.own: list[Server] = []
        # what was met already, and the version of the last update that all of it has
        self._known: tuple[Server, ...] = ()
        self._delivered: int | None = None

    def to(self, servers: Sequence[Server]) -> Self:
        """Itself; the next update goes to ``servers``."""
        self.servers = tuple(servers)
        return self

    def begin(self, version: int) -> None:
        """Weights of this version follow; requests that are running end with what they have, new ones wait.

        Raises:
            ValueError: a server runs another model.
            WeightSyncError: a server cannot be reached, or does not join.
        """
        failure: Exception | None = None
        try:
            self._meet_the_new()
        except HttpError as error:
            failure = WeightSyncError(f"weights {version} reached no engine: {error}")
        except ValueError as error:
            failure = error
        self._raise_first(failure)
        self.update.begin(version)
        self._delivered = None
        self._attempt(self._open)

    def send(self, bucket: WeightBucket) -> None:
        """Deliver a bucket.

        Raises:
            ValueError: there was no `begin`, or the model has no such weight, or another shape of it.
            WeightSyncError: a server did not take it.
        """
        with self.update.taking(zip(bucket.names, bucket.shapes, strict=True)):
            self._attempt(lambda: self._transfer(bucket))

    def end(self) -> None:
        """All weights are there: decode with them.

        Raises:
            ValueError: a weight was not sent; the servers stay paused.
            WeightSyncError: a server did not finish.
        """
        version = self.update.whole()
        self._attempt(lambda: self._finish(version))
        self.update.end()
        self._delivered = version

    def close(self) -> None:
        """Give up what is held for later updates."""
        self.own, self._known = [], ()

    def _meet_the_new(self) -> None:
        """Of servers that are new, or were restarted, the model is checked; then they join."""
        infos = [server.get("/model_info") for server in self.servers]
        last = None if self._delivered is None else str(self._delivered)
        if self.servers == self._known and all(info["weight_version"] == last for info in infos):
            return
        self.close()
        for server, info in zip(self.servers, infos, strict=True):
            check_model(server.url, info, self.setup.model_path)
            # started without a warm-up request it has not done so yet, and every flush of the cache takes a second
            server.post("/freeze_gc")
        self.own = self._join(self.servers)
        self._known = self.servers

    def _join(self, servers: Sequence[Server]) -> list[Server]:
        """Prepare for updates to ``servers``; returns those that this rank talks to."""
        return list(servers)

    def _open(self) -> None:
        each(self.own, Server.open_update)

    @abstractmethod
    def _transfer(self, bucket: WeightBucket) -> None: ...

    def _finish(self, version: int) -> None:
        each(self.own, lambda server: server.finish_update(version))

    def _raise_first(self, failure: Exception | None) -> None:
        if failure is not None:
            raise failure

    def _attempt(self, work: Callable[[], object]) -> None:
        try:
            work()
        except HttpError as error:
            raise self._failed(str(error)) from error

    def _failed(self, why: str) -> WeightSyncError:
        return WeightSyncError(
            f"weights {self.update.version} did not reach every engine: {why}. One that failed may have some new "
            "weights and some old ones: it stays paused, nothing is sampled from it. Go on from the last checkpoint "
            "with --load"
        )


class HttpSink(ServerSink):
    """Tensors in the body of ``update_weights_from_tensor``: needs nothing but a connection."""

    def _transfer(self, bucket: WeightBucket) -> None:
        blob = pickled(WeightBucket(bucket.names, bucket.shapes, bucket.flat.cpu()))
        # every rank of a server reads a pickle of its own
        requests = {width: _update_request([blob] * width) for width in {server.tp_size for server in self.own}}
        each(self.own, lambda server: server.post("/update_weights_from_tensor", requests[server.tp_size]))


class DiskSink(ServerSink):
    """A Hugging Face folder for each version, ``weights_0000007``, which the servers load; until then they decode."""

    def __init__(self, setup: SyncSetup) -> None:
        super().__init__(setup)
        self._directory = Path(str(setup.directory)).absolute()
        self._written: set[Path] = set()
        self._files: dict[str, str] = {}

    def _open(self) -> None:
        self._files.clear()
        self._folder = self._directory / f"weights_{self.update.version:07d}"
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)

    def _transfer(self, bucket: WeightBucket) -> None:
        file = f"model-{len(set(self._files.values())):05d}.safetensors"
        host = WeightBucket(bucket.names, bucket.shapes, bucket.flat.cpu())
        write_weights(dict(host.tensors()), self._folder / file)
        self._files |= dict.fromkeys(bucket.names, file)

    def _finish(self, version: int) -> None:
        size = sum(file.stat().st_size for file in self._folder.iterdir())
        index = {"metadata": {"total_size": size}, "weight_map": self._files}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index))
        shutil.copy(str(cached_file(self.setup.model_path, CONFIG)), self._folder / CONFIG)
        each(self.own, lambda server: self._load(server, version))
        if not self.setup.keep_folders:
            for folder in self._written - {self._folder}:
                shutil.rmtree(folder, ignore_errors=True)
            self._written.clear()
        self._written.add(self._folder)

    def _load(self, server: Server, version: int) -> None:
        server.pause()
        server.post("/update_weights_from_disk", {"model_path": str(self._folder), "flush_cache": False})
        server.resume(version)


class GroupSink(ServerSink):
    """A broadcast of each bucket from this process in a process group with every GPU of the servers.

    NCCL, or gloo on a CPU. The group is made once, and left by `close`.
    """

    _group: dist.ProcessGroup | None = None

    def _join(self, servers: Sequence[Server]) -> list[Server]:
        self._name = f"slimelite-{os.urandom(4).hex()}"
        self._threads = ThreadPoolExecutor(max(1, len(servers)), "weight-sync")
        host, backend = self.setup.host, "nccl" if self.setup.device.type == "cuda" else "gloo"
        widths = [server.tp_size for server in servers]
        world = 1 + sum(widths)
        # the servers knock until the store is there; rank 0 of the group holds it
        store = dist.TCPStore(host, 0, world, True, timedelta(seconds=JOIN_S), wait_for_workers=False)
        place = {"master_address": host, "master_port": store.port, "world_size": world, "backend": backend}
        joining = [
            self._threads.submit(
                server.post,
                "/init_weights_update_group",
                {**place, "rank_offset": offset, "group_name": self._name},
                ONCE,
            )
            for server, offset in zip(servers, accumulate(widths, initial=1), strict=False)
        ]
        self._group = self._enter(store, world, backend)
        for joined in joining:
            joined.result()
        return list(servers)

    def _enter(self, store: dist.TCPStore, world: int, backend: str) -> dist.ProcessGroup:
        # torch has no public way to a second group that reaches beyond the default one; SGLang enters by this door
        # too, and the keys of both sides in the store must be the same
        group, _ = c10d._new_process_group_helper(
            world,
            0,
            [],
            dist.Backend(backend),
            dist.PrefixStore(self._name, store),
            group_name=c10d.GroupName(self._name),
            timeout=timedelta(seconds=self.setup.timeout_s),
        )
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world)}
        return group

    def _transfer(self, bucket: WeightBucket) -> None:
        dtype = str(bucket.flat.dtype).removeprefix("torch.")
        request = {
            "names": bucket.names,
            "dtypes": [dtype] * len(bucket.names),
            "shapes": bucket.shapes,
            "group_name": self._name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        # once: a server that got the first request is in the broadcast already
        path = "/update_weights_from_distributed"
        answers = [self._threads.submit(server.post, path, request, ONCE) for server in self.own]
        sent = dist.broadcast(bucket.flat.view(torch.uint8), src=0, group=self._group, async_op=True)
        done, _ = wait(answers, return_when=FIRST_EXCEPTION)
        for answer in done:
            answer.result()
        assert sent is not None
        sent.wait()

    def close(self) -> None:
        """Servers and this process leave the group."""
        if self._group is not None:
            for server in self.own:
                try:
                    # one that still waits for a broadcast that failed does not answer
                    server.post("/destroy_weights_update_group", {"group_name": self._name}, ONCE, LEAVE_S)
                except HttpError as error:
                    logger.warning("%s did not leave the process group of weight updates: %s", server.url, error)
            dist.destroy_process_group(self._group)
            self._threads.shutdown()
            self._group = None
        super().close()


class IpcSink(ServerSink):
    """Each trainer rank offers its own copy of a bucket to the server rank on its GPU, through CUDA IPC (collective).

    The first trainer rank on a server's GPUs talks to it, for all of them. On a CPU tensors travel by value. The
    servers stand on the trainer ranks' GPUs in their order, side by side from rank 0 on, unless their ``first_gpu``
    leaves ranks out.
    """

    every_rank = True

    def _join(self, servers: Sequence[Server]) -> list[Server]:
        self._rank, world = dist.get_rank(), dist.get_world_size()
        end, ranks = 0, []
        for server in servers:
            first = end if server.first_gpu is None else server.first_gpu
            end = first + server.tp_size
            ranks.append(range(first, end))
        assert end <= world, f"{end} ranks of colocated engines on {world} trainer ranks"
        self._serves = any(self._rank in own for own in ranks)
        return [server for server, own in zip(servers, ranks, strict=True) if own[0] == self._rank]

    def _transfer(self, bucket: WeightBucket) -> None:
        # the memory behind a handle that nobody opens would never be free again
        blobs = _from_all(pickled(bucket) if self._serves else b"")
        for server in self.own:
            request = _update_request(blobs[self._rank : self._rank + server.tp_size])
            server.post("/update_weights_from_tensor", request)

    def _raise_first(self, failure: Exception | None) -> None:
        # all ranks go on, or none: the others would wait for one that did not
        for each_failure in _from_all(failure):
            super()._raise_first(each_failure)

    def _attempt(self, work: Callable[[], object]) -> None:
        failure = ""
        try:
            work()
        except HttpError as error:
            failure = str(error)
        # all wait here, holding their memory, until every server has copied it; and all fail together
        failures = [text for text in _from_all(failure) if text]
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()
        if failures:
            raise self._failed("; ".join(failures))


SINKS: dict[str, type[ServerSink]] = {"http": HttpSink, "disk": DiskSink, "nccl": GroupSink, "ipc": IpcSink}


def build_sink(setup: SyncSetup) -> ServerSink:
    """The way that ``setup`` names."""
    return SINKS[setup.transport](setup)


def _from_all(value: T) -> list[T]:
    """``value`` of every trainer rank, in their order (collective)."""
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def pickled(bucket: WeightBucket) -> bytes:
    """The bucket in SGLang's ``flattened_bucket`` format, as ``update_weights_from_tensor`` reads it.

    A tensor in host memory travels by value (torch's shared memory would tie the server to our process), one on a GPU
    as a CUDA IPC handle: keep it until the server has answered.
    """
    metadata = []
    end = 0
    for name, tensor in bucket.tensors():
        start, end = end, end + tensor.nbytes
        metadata.append(
            # stands for SGLang's FlattenedTensorMetadata, which is read by attribute; its unpickler admits `types`
            SimpleNamespace(
                name=name, shape=tensor.shape, dtype=tensor.dtype, start_idx=start, end_idx=end, numel=tensor.nbytes
            )
        )
    buffer = io.BytesIO()
    content = {"flattened_tensor": bucket.flat.view(torch.uint8), "metadata": metadata}
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(content)
    return buffer.getvalue()


def _update_request(blobs: list[bytes]) -> bytes:
    """The JSON body for the pickles of all ranks; the cache is flushed once, at the end, not here."""
    # base64 needs no escapes: joining is a copy less per blob than json.dumps
    quoted = b",".join(b'"%b"' % base64.b64encode(blob) for blob in blobs)
    return b'{"serialized_named_tensors":[%b],"load_format":"flattened_bucket","flush_cache":false}' % quoted


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: object) -> Any:
        # a tensor in host memory goes torch's own way, one of the few that SGLang 0.5.23 unpickles
        if not (isinstance(value, Tensor) and value.is_cuda):
            return NotImplemented
        rebuild, arguments = reduce_tensor(value)
        # two processes may number the same GPU differently: SGLang finds it by its UUID
        uuid = str(torch.cuda.get_device_properties(value.device).uuid)
        return rebuild, (*arguments[:DEVICE_ARGUMENT], uuid, *arguments[DEVICE_ARGUMENT + 1 :])
