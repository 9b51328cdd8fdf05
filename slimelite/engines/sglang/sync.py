"""Which way weights go to SGLang servers."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers.utils import cached_file

from slimelite.arguments import Args
from slimelite.arguments.weight_sync import Transport
from slimelite.engines.sglang.control import Server
from slimelite.engines.sglang.sync_disk import CONFIG, DiskSink
from slimelite.engines.sglang.sync_group import GroupSink
from slimelite.engines.sglang.sync_ipc import IpcSink
from slimelite.engines.sglang.weights import HttpSink, ServerSink, weight_shapes


def choose_transport(args: Args, *, external: bool) -> Transport:
    """How weights reach the servers: as ``--update-weight-transport`` says, else by where they are.

    On the trainers' own GPUs through CUDA IPC, on other GPUs of the job by NCCL broadcast, on a CPU through HTTP
    (docs/benchmarks.md compares). ``external`` servers, which someone else runs, may be anywhere: HTTP, or the shared
    folder of ``--update-weight-disk-dir``.
    """
    if args.update_weight_transport is not None:
        return args.update_weight_transport
    if args.update_weight_disk_dir:
        return "disk"
    if external or args.device == "cpu":
        return "http"
    return "ipc" if args.colocate else "nccl"


class SglangSync:
    """The sink of a run, which a trainer rank keeps from one update to the next.

    Args:
        args: resolved arguments.
        device: where this rank's weights are.
        host: a name of this machine that the servers can reach.
        external: whether someone else runs the servers.
    """

    def __init__(self, args: Args, device: torch.device, host: str, *, external: bool = False) -> None:
        self.transport = choose_transport(args, external=external)
        self._args, self._device, self._host = args, device, host
        self._shapes = weight_shapes(str(args.hf_checkpoint))
        self._servers: tuple[Server, ...] = ()
        self._sink: ServerSink | None = None

    def sink(self, servers: Sequence[Server]) -> ServerSink:
        """The sink over ``servers``: the one of the last update, unless a server was replaced since.

        Raises:
            ValueError: a server runs another model.
            ServerError: a server cannot be reached, or does not join the process group.
        """
        if self._sink is None or tuple(servers) != self._servers:
            self.close()
            for server in servers:
                self._check_model(server)
                # started without a warm-up request it has not done so yet, and every flush of the cache takes a second
                server.post("/freeze_gc")
            self._sink, self._servers = self._make(servers), tuple(servers)
        return self._sink

    @property
    def every_rank(self) -> bool:
        """Whether all trainer ranks need a sink, not rank 0 alone."""
        return self.transport == "ipc"

    def close(self) -> None:
        """Leave the process group, if there is one."""
        if self._sink is not None:
            self._sink.close()
        self._sink = None

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

    def _check_model(self, server: Server) -> None:
        path = json.loads(server.get("/model_info"))["model_path"]
        # the folder may be one of the server's machine
        if os.path.isfile(os.path.join(path, CONFIG)):
            theirs = weight_shapes(path)
            different = sorted(dict(theirs.items() ^ self._shapes.items()))
            if different:
                raise ValueError(
                    f"{server.url} runs {path}, whose {different[0]} is not that of --hf-checkpoint "
                    f"{self._args.hf_checkpoint}: start it with the model that is trained"
                )
