"""Sends weights from the trainer to SGLang servers.

Each transport is a `slimelite.engines.protocol.WeightSink`. `begin` ends the requests that the servers are decoding,
and `send` delivers a bucket. `end` flushes the KV cache, sets the weight version and resumes decoding. A failed update
raises `WeightSyncError`. Every server without the complete update stays paused, so that no token is sampled from a mix
of old and new weights. A later complete update resumes these servers.
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
from collections.abc import Callable, Collection, Sequence
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

from slimelite.base.http_client import HttpError
from slimelite.engines.checks import WeightUpdate, model_shapes
from slimelite.engines.protocol import AdapterFormat, SyncSetup, WeightBucket, WeightSyncError
from slimelite.engines.registry import ServerAddress
from slimelite.engines.sglang.front import ADAPTER
from slimelite.engines.sglang.server import ONCE, Server, each
from slimelite.engines.sglang.wire import TARGET, update_request
from slimelite.models.files import write_weights

T = TypeVar("T")
logger = logging.getLogger(__name__)

CONFIG = "config.json"
JOIN_S = 120
LEAVE_S = 10.0
# index of the device among the arguments of `torch.multiprocessing.reductions.rebuild_cuda_tensor`
DEVICE_ARGUMENT = 6


def check_model(url: str, info: dict[str, Any], ours: str) -> None:
    """Check that the server at ``url`` runs the model that is trained. A weight with another shape would crash SGLang.

    Args:
        info: the server's answer to ``/model_info``.
        ours: path of the trained model.

    Raises:
        ValueError: the server runs another model, or a model with a config that cannot be read on this machine.
    """
    path = info["model_path"]
    try:
        theirs = model_shapes(path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{url} runs {path}, but this machine cannot read that model to compare it with --hf-checkpoint {ours}. "
            "Start the server with a folder that both machines can read, or with a name on the Hugging Face hub"
        ) from error
    different = sorted(name for name, _ in theirs.items() ^ model_shapes(ours).items())
    if info["model_type"] != AutoConfig.from_pretrained(ours).model_type:
        different = ["model_type"]
    if different:
        raise ValueError(
            f"{url} runs {path}, but its {different[0]} differs from the {different[0]} of --hf-checkpoint {ours}; "
            "start the server with the model that is trained"
        )


class ServerSink(ABC):
    """Base class of all transports. Between updates, a sink keeps its connections to the servers, and remembers which
    servers it has checked.

    SGLang ignores a weight with an unknown name and crashes if the shape is wrong, so `send` refuses both.
    """

    # see `WeightSink.every_rank`
    every_rank = False

    def __init__(self, setup: SyncSetup) -> None:
        self.setup = setup
        self.update = WeightUpdate(model_shapes(setup.model_path))
        # servers: all servers of the run; own: the servers that this rank sends requests to
        self.servers: tuple[Server, ...] = ()
        self.own: list[Server] = []
        # _known: the servers that were checked and joined. _delivered: the version of the last update that all of them
        # have
        self._known: tuple[Server, ...] = ()
        self._delivered: int | None = None

    def to(self, servers: Sequence[ServerAddress]) -> Self:
        """Send the next updates to ``servers``. Returns the sink itself."""
        self.servers = tuple(map(Server.at, servers))
        return self

    def begin(self, version: int, changed: Collection[str] | None = None) -> bool:
        """Start the update to ``version``. Running requests end with the tokens that they have, and new requests wait.
        See `Engine.begin_weight_update`. A new or restarted server needs all weights.

        Raises:
            ValueError: a server runs another model.
            WeightSyncError: a server cannot be reached, or cannot prepare for updates.
        """
        failure: Exception | None = None
        try:
            self._meet_the_new()
        except HttpError as error:
            failure = WeightSyncError(f"weights {version} did not reach any engine: {error}")
        except ValueError as error:
            failure = error
        self._raise_first(failure)
        partial = self.update.begin(version, changed if self.setup.partial else None)
        self._delivered = None
        self._attempt(self._open)
        return partial

    def send(self, bucket: WeightBucket) -> None:
        """Deliver a bucket.

        Raises:
            ValueError: `begin` was not called, the model has no weight of a given name, or the shape differs.
            WeightSyncError: a server did not accept the bucket.
        """
        with self.update.taking(zip(bucket.names, bucket.shapes, strict=True)):
            self._attempt(lambda: self._transfer(bucket))

    def end(self) -> None:
        """Finish the update after all weights were sent. The servers then decode with the new weights.

        Raises:
            ValueError: a weight was not sent. The servers stay paused.
            WeightSyncError: a server did not finish.
        """
        version = self.update.whole()
        self._attempt(lambda: self._finish(version))
        self.update.end()
        self._delivered = version

    def close(self) -> None:
        """Close the connections that are kept for later updates."""
        self.own, self._known = [], ()

    def _meet_the_new(self) -> None:
        """If a server is new or was restarted, check the model of every server, and join all servers again."""
        infos = [server.get("/model_info") for server in self.servers]
        last = None if self._delivered is None else str(self._delivered)
        if self.servers == self._known and all(info["weight_version"] == last for info in infos):
            return
        self.close()
        self.update.complete = False
        for server, info in zip(self.servers, infos, strict=True):
            check_model(server.url, info, self.setup.model_path)
            # a server that started without a warm-up request has not frozen its objects, and then each cache flush
            # takes a second
            server.post("/freeze_gc")
        self.own = self._join(self.servers)
        self._known = self.servers

    def _join(self, servers: Sequence[Server]) -> list[Server]:
        """Prepare for updates to ``servers``. Returns the servers that this rank sends requests to."""
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
            f"weights {self.update.version} did not reach every engine: {why}. A failed engine may have a mix "
            "of new and old weights, so it stays paused and samples nothing. Resume the run from the last checkpoint "
            "with --load"
        )


class HttpSink(ServerSink):
    """Sends tensors in the body of ``update_weights_from_tensor``. This transport needs only an HTTP connection."""

    def _transfer(self, bucket: WeightBucket) -> None:
        blob = pickled(WeightBucket(bucket.names, bucket.shapes, bucket.flat.cpu()))
        # a request has one pickle for each tensor-parallel rank of the server
        requests = {width: update_request([blob] * width) for width in {server.tp_size for server in self.own}}
        each(self.own, lambda server: server.post("/update_weights_from_tensor", requests[server.tp_size]))


class DiskSink(ServerSink):
    """Writes a Hugging Face folder for each version, such as ``weights_0000007``. The servers continue to decode until
    they load the folder."""

    def __init__(self, setup: SyncSetup) -> None:
        super().__init__(setup)
        self._directory = Path(str(setup.directory)).absolute()
        self._written: set[Path] = set()
        self._files: dict[str, str] = {}

    def begin(self, version: int, changed: Collection[str] | None = None) -> bool:  # noqa: ARG002
        """See `ServerSink.begin`. ``changed`` has no effect, because a folder always contains the whole model."""
        return super().begin(version)

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
    """Broadcasts each bucket from this process to all ranks of the servers. These ranks and this process form a process
    group.

    The backend is NCCL, or gloo on a CPU. The first update creates the group, and `close` destroys it.
    """

    _group: dist.ProcessGroup | None = None

    def _join(self, servers: Sequence[Server]) -> list[Server]:
        self._name = f"slimelite-{os.urandom(4).hex()}"
        self._threads = ThreadPoolExecutor(max(1, len(servers)), "weight-sync")
        host, backend = self.setup.host, "nccl" if self.setup.device.type == "cuda" else "gloo"
        widths = [server.tp_size for server in servers]
        world = 1 + sum(widths)
        # rank 0 of the group hosts the store; the servers try to connect until the store exists
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
        # torch has no public function for a group with processes outside the default group. SGLang calls this private
        # function too, and both sides must use the same keys in the store
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
            **TARGET,
        }
        # no retry, because a server that received the first request has already entered the broadcast
        path = "/update_weights_from_distributed"
        answers = [self._threads.submit(server.post, path, request, ONCE) for server in self.own]
        sent = dist.broadcast(bucket.flat.view(torch.uint8), src=0, group=self._group, async_op=True)
        done, _ = wait(answers, return_when=FIRST_EXCEPTION)
        for answer in done:
            answer.result()
        assert sent is not None
        sent.wait()

    def close(self) -> None:
        """Take the servers and this process out of the process group."""
        if self._group is not None:
            for server in self.own:
                try:
                    # a server that still waits for a failed broadcast does not answer
                    server.post("/destroy_weights_update_group", {"group_name": self._name}, ONCE, LEAVE_S)
                except HttpError as error:
                    logger.warning("%s did not leave the process group of weight updates: %s", server.url, error)
            dist.destroy_process_group(self._group)
            self._threads.shutdown()
            self._group = None
        super().close()


class IpcSink(ServerSink):
    """Each trainer rank shares its copy of a bucket through CUDA IPC with the server rank on the same GPU (collective).

    The first trainer rank on a server's GPUs sends the request for all ranks on these GPUs. On a CPU, tensors are sent
    by value. The servers use the trainer ranks' GPUs in order, from rank 0 on. A ``first_gpu`` may skip ranks; skipped
    ranks have no server.
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
        # ranks without a server do not send a handle: if a handle is never opened, its memory is never freed
        blobs = _from_all(pickled(bucket) if self._serves else b"")
        for server in self.own:
            request = update_request(blobs[self._rank : self._rank + server.tp_size])
            server.post("/update_weights_from_tensor", request)

    def _raise_first(self, failure: Exception | None) -> None:
        # if one rank fails, all ranks raise; otherwise the other ranks would wait for it in the next collective call
        for each_failure in _from_all(failure):
            super()._raise_first(each_failure)

    def _attempt(self, work: Callable[[], object]) -> None:
        failure = ""
        try:
            work()
        except HttpError as error:
            failure = str(error)
        # all ranks keep the shared memory and wait here until every server has copied it; if one server fails, all
        # ranks raise
        failures = [text for text in _from_all(failure) if text]
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()
        if failures:
            raise self._failed("; ".join(failures))


class AdapterSink(ServerSink):
    """Sends only the adapter, in one request. The servers have read the frozen weights from the model's files.

    The adapter has the same name in every version, so a request that waits for the update does not have to know the new
    version. This is possible because no request runs while the new version replaces the old one.
    """

    def __init__(self, setup: SyncSetup, adapter: AdapterFormat) -> None:
        super().__init__(setup)
        self.update = WeightUpdate(adapter.shapes)
        self._config = adapter.config

    def _transfer(self, bucket: WeightBucket) -> None:
        tensors = base64.b64encode(pickled(WeightBucket(bucket.names, bucket.shapes, bucket.flat.cpu())))
        each(self.own, lambda server: server.load_adapter(ADAPTER, self._config, tensors))


SINKS: dict[str, type[ServerSink]] = {"http": HttpSink, "disk": DiskSink, "nccl": GroupSink, "ipc": IpcSink}


def build_sink(setup: SyncSetup) -> ServerSink:
    """The sink for ``setup.transport``, or for an adapter."""
    if setup.adapter is not None:
        return AdapterSink(setup, setup.adapter)
    return SINKS[setup.transport](setup)


def _from_all(value: T) -> list[T]:
    """The ``value`` of every trainer rank, in rank order (collective)."""
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def pickled(bucket: WeightBucket) -> bytes:
    """The bucket in SGLang's ``flattened_bucket`` format, which ``update_weights_from_tensor`` reads.

    A tensor in host memory is sent by value, because the server could not use torch's shared memory after this process
    has ended. A GPU tensor is sent as a CUDA IPC handle, so the caller must keep it until the server has answered.
    """
    metadata = []
    end = 0
    for name, tensor in bucket.tensors():
        start, end = end, end + tensor.nbytes
        metadata.append(
            # used in place of SGLang's FlattenedTensorMetadata: SGLang reads only attributes, and its unpickler allows
            # the module `types`
            SimpleNamespace(
                name=name, shape=tensor.shape, dtype=tensor.dtype, start_idx=start, end_idx=end, numel=tensor.nbytes
            )
        )
    buffer = io.BytesIO()
    content = {"flattened_tensor": bucket.flat.view(torch.uint8), "metadata": metadata}
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(content)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: object) -> Any:
        # host tensors use torch's own pickle function, because SGLang 0.5.23 allows only a few functions in its
        # unpickler
        if not (isinstance(value, Tensor) and value.is_cuda):
            return NotImplemented
        rebuild, arguments = reduce_tensor(value)
        # two processes may number the same GPU differently, so SGLang finds the device by its UUID
        uuid = str(torch.cuda.get_device_properties(value.device).uuid)
        return rebuild, (*arguments[:DEVICE_ARGUMENT], uuid, *arguments[DEVICE_ARGUMENT + 1 :])
