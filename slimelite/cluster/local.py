"""`--launcher local`, and what both launchers make in the process of a trainer.

Importing this file imports no torch: `ray_cluster` does in train.py's own process, which needs none.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from slimelite.arguments import Args
from slimelite.cluster.remote import LocalRemote, Progress, Remote
from slimelite.cluster.workers import (
    LOCAL_HOST,
    RemoteOwner,
    RolloutWorker,
    build_engine,
    build_server,
    connect,
    external_servers,
    server_parts,
)
from slimelite.engines.protocol import Engine
from slimelite.engines.registry import ServerAddress

if TYPE_CHECKING:
    from slimelite.cluster.trainer import TrainerWorker


def build_trainer(
    args: Args,
    rank: int = 0,
    world_size: int = 1,
    address: str | None = None,
    host: str = LOCAL_HOST,
    listener: socket.socket | None = None,
) -> TrainerWorker:
    """The trainer of a rank in this process; see `TrainerWorker`."""
    from slimelite.cluster.trainer import TrainerWorker  # it needs torch

    return TrainerWorker(args, rank, world_size, address, host, listener)


def check_models(args: Args) -> None:
    """Raise ValueError for what `slimelite.training.inspection.inspect_models` finds."""
    from slimelite.training.inspection import inspect_models  # it needs torch

    problems, _ = inspect_models(args)
    if problems:
        raise ValueError("\ntrain.py: ".join(problems))


class Workers(NamedTuple):
    """The workers that a launcher has started, for `Cluster`.

    ``trainers``: one for each rank, rank 0 first; ``engines``: argument of `TrainerWorker.push_to`; ``others``: more
    workers in processes of their own, whose CPU time counts.
    """

    rollout: Remote[RolloutWorker]
    trainers: Sequence[Remote[TrainerWorker]]
    engines: Sequence[Any]
    others: Sequence[Remote[Any]] = ()


@contextmanager
def local_workers(args: Args, progress: Progress) -> Iterator[Workers]:
    """``--launcher local``: one rank, one engine and the rollout worker, all in this process.

    The engine loads first, as in `ray_cluster.start_workers`.
    """
    import torch

    if args.device == "cpu":
        torch.set_num_threads(args.cpu_threads)
    with ExitStack() as stack:
        progress(0, 0, "loading the engine")
        engines, servers = _local_engines(args, stack)
        rollout = RolloutWorker(args, engines)
        stack.callback(rollout.close)
        trains = not args.debug_rollout_only
        if trains and args.offload_rollout:
            rollout.release_memory()
        progress(0, 0, "loading the trainer")
        trainers = []
        if trains:
            trainer = build_trainer(args)
            stack.callback(trainer.close)
            trainers.append(LocalRemote(trainer, "trainer_0"))
        remotes = [LocalRemote(engine, "engine_0") for engine in engines]
        yield Workers(LocalRemote(rollout, "rollout"), trainers, servers or remotes)


def _local_engines(args: Args, stack: ExitStack) -> tuple[list[Engine], list[ServerAddress]]:
    """The engines, and the servers behind them, if they are servers."""
    engines: list[Engine] = []
    servers: list[ServerAddress] = []
    if args.debug_train_only:
        return engines, servers
    if not server_parts(args):
        engines.append(build_engine(args, 0))
    elif args.rollout_external_engine_addrs:
        servers += external_servers(args)
        engines += [connect(args, server, None) for server in servers]
    else:
        process = build_server(args, 0)
        stack.callback(process.close)
        servers.append(ServerAddress(process.start(), args.engine_place(0).width))
        engines.append(connect(args, servers[0], RemoteOwner(LocalRemote(process, "engine_0"))))
    for engine in engines:
        stack.callback(asyncio.run, engine.close())
    return engines, servers
