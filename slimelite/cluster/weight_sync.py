"""Which way weights go to SGLang servers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers.utils import cached_file

from slimelite.arguments import Args
from slimelite.arguments.engines import Transport
from slimelite.cluster.servers import check_model
from slimelite.engines.checks import weight_shapes
from slimelite.engines.protocol import WeightBucket
from slimelite.engines.sglang.control import Server, ServerError
from slimelite.engines.sglang.transports import (
    CONFIG,
    DiskSink,
    GroupSink,
    HttpSink,
    IpcSink,
    ServerSink,
    WeightSyncError,
    from_all,
)


def choose_transport(args: Args, *, external: bool) -> Transport:
    """How weights reach the servers: as ``--update-weight-transport`` says, else by where they are.

    On the trainers' own GPUs through CUDA IPC, else by broadcast in a process group (NCCL; gloo on a CPU, where it is
    many times faster than HTTP: docs/benchmarks.md). ``external`` servers, which someone else runs, may be anywhere:
    HTTP, or the shared folder of ``--update-weight-disk-dir``. NCCL takes one rank on a GPU: as in slime, ``nccl`` is
    for engines with GPUs of their own.
    """
    shared_gpus = args.colocate and args.device == "cuda"
    if args.update_weight_transport == "nccl" and shared_gpus:
        return "ipc"
    if args.update_weight_transport is not None:
        return args.update_weight_transport
    if args.update_weight_disk_dir:
        return "disk"
    if external:
        return "http"
    return "ipc" if shared_gpus else "nccl"


class SglangSync:
    """The `WeightSink` over the servers of a run: it keeps what is worth keeping from one update to the next.

    Args:
        args: resolved arguments.
        device: where this rank's weights are.
        host: a name of this machine that the servers can reach.
        external: whether someone else runs the servers.
    """

    def __init__(self, args: Args, device: torch.device, host: str, *, external: bool = False) -> None:
        self.transport = choose_transport(args, external=external)
        # through CUDA IPC each rank serves the engine on its own GPU
        self.every_rank = self.transport == "ipc"
        self.servers: tuple[Server, ...] = ()
        self._args, self._device, self._host = args, device, host
        self._shapes = weight_shapes(str(args.hf_checkpoint))
        self._known: tuple[Server, ...] = ()
        self._sink: ServerSink | None = None

    def to(self, servers: Sequence[Server]) -> SglangSync:
        """Itself; the next update goes to ``servers``."""
        self.servers = tuple(servers)
        return self

    def begin(self, version: int) -> None:
        """Meet servers that are new or were restarted, and begin.

        Raises:
            ValueError: a server runs another model.
            WeightSyncError: a server cannot be reached, or does not join the process group.
        """
        failure: Exception | None = None
        try:
            self._meet_the_new()
        except ServerError as error:
            failure = WeightSyncError(f"weights {version} reached no engine: {error}")
        except ValueError as error:
            failure = error
        # of the ranks that talk to servers all go on, or none: the others would wait for one that did not
        for each_failure in from_all(failure) if self.every_rank else [failure]:
            if each_failure is not None:
                raise each_failure
        self._current().begin(version)

    def send(self, bucket: WeightBucket) -> None:
        """See `ServerSink.send`."""
        self._current().send(bucket)

    def end(self) -> None:
        """See `ServerSink.end`."""
        self._current().end()

    def close(self) -> None:
        """Leave the process group, if there is one."""
        if self._sink is not None:
            self._sink.close()
        self._sink, self._known = None, ()

    def _current(self) -> ServerSink:
        assert self._sink is not None, "begin comes first"
        return self._sink

    def _meet_the_new(self) -> None:
        infos = [json.loads(server.get("/model_info")) for server in self.servers]
        last = None if self._sink is None else str(self._sink.delivered)
        if self.servers == self._known and all(info["weight_version"] == last for info in infos):
            return
        self.close()
        for server, info in zip(self.servers, infos, strict=True):
            check_model(server.url, info, self._args)
            # started without a warm-up request it has not done so yet, and every flush of the cache takes a second
            server.post("/freeze_gc")
        self._sink, self._known = self._make(self.servers), self.servers

    def _make(self, servers: Sequence[Server]) -> ServerSink:
        args, shapes = self._args, self._shapes
        if self.transport == "ipc":
            return IpcSink(servers, shapes)
        if self.transport == "nccl":
            timeout_s = 60.0 * args.distributed_timeout_minutes
            return GroupSink(servers, shapes, self._device, self._host, timeout_s)
        if self.transport == "disk":
            directory = Path(str(args.update_weight_disk_dir))
            config = Path(str(cached_file(args.hf_checkpoint, CONFIG)))
            return DiskSink(servers, shapes, directory, config, keep=args.update_weight_disk_keep_files)
        return HttpSink(servers, shapes)
