"""`--launcher local`: the same classes in this process, for debugging and for machines without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from slimelite.arguments import Args
from slimelite.cluster.cluster import Cluster, Progress
from slimelite.cluster.engines import build_engine, build_server, connect, external_servers, server_parts, server_sync
from slimelite.cluster.workers import RolloutWorker
from slimelite.engines.protocol import Engine, WeightBucket
from slimelite.training.trainer import Trainer
from slimelite.training.weights import WeightSink

if TYPE_CHECKING:
    from slimelite.engines.sglang.control import Server
    from slimelite.engines.sglang.process import SglangServer


class LocalWorker:
    """A `Worker` in this process: at once in the caller's thread, or on threads of its own."""

    def __init__(self, target: Any, threads: ThreadPoolExecutor | None = None) -> None:
        self.target = target
        self.threads = threads

    def submit(self, method: str, *args: Any) -> Future[Any]:
        """Call the method, or start it."""
        if self.threads:
            return self.threads.submit(getattr(self.target, method), *args)
        future: Future[Any] = Future()
        future.set_result(getattr(self.target, method)(*args))
        return future


class LocalOwner:
    """Restarts a server that is a child of this process."""

    def __init__(self, server: SglangServer) -> None:
        self.server = server

    async def restart(self) -> None:
        """See `ServerOwner.restart`."""
        await asyncio.to_thread(self.server.restart)


class LocalSink:
    """Weight sync into engines of this process."""

    every_rank = False

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = engines

    def begin(self, version: int) -> None:
        """Stop every engine's decoding."""
        for engine in self.engines:
            asyncio.run(engine.begin_weight_update(version))

    def send(self, bucket: WeightBucket) -> None:
        """One bucket into every engine."""
        for engine in self.engines:
            asyncio.run(engine.load_weights(bucket))

    def end(self) -> None:
        """Every engine decodes again."""
        for engine in self.engines:
            asyncio.run(engine.end_weight_update())


@contextmanager
def local_cluster(args: Args, progress: Progress) -> Iterator[Cluster]:
    """Trainer, engine and rollout manager in this process (one rank, one engine).

    The engine loads first, as in `ray_cluster.start_workers`.
    """
    if args.device == "cpu":
        torch.set_num_threads(args.cpu_threads)
    with ExitStack() as stack:
        progress(0, 0, "loading the engine")
        engines, servers = _engines(args, stack)
        for engine in engines:
            stack.callback(asyncio.run, engine.close())
        rollout = RolloutWorker(args, engines)
        stack.callback(rollout.close)
        trains = not args.debug_rollout_only
        if trains and args.offload_rollout:
            rollout.release_memory()
        progress(0, 0, "loading the trainer")
        trainer = Trainer(args) if trains else None
        if trainer:
            stack.callback(trainer.close)
        sink = _sink(args, trainer, engines, servers, stack)
        # the rollout has threads, so that its progress can be asked for; training stays where a debugger is
        threads = stack.enter_context(ThreadPoolExecutor(3, "rollout-worker"))
        # after Ctrl-C or an error in training nobody waits for the rest of a rollout
        stack.callback(rollout.cancel)
        yield Cluster(args, LocalWorker(rollout, threads), [LocalWorker(trainer)] if trainer else [], sink)


def _engines(args: Args, stack: ExitStack) -> tuple[list[Engine], list[Server]]:
    """The engines, and the SGLang servers behind them."""
    if args.debug_train_only:
        return [], []
    if not server_parts(args):
        return [build_engine(args, index=0)], []
    from slimelite.engines.sglang.control import Server

    owner = None
    if args.rollout_external_engine_addrs:
        servers = external_servers(args)
    else:
        child = build_server(args, 0)
        stack.callback(child.close)
        servers, owner = [Server(child.start(), args.engine_place(0).width)], LocalOwner(child)
    return [connect(args, server, owner) for server in servers], servers


def _sink(
    args: Args, trainer: Trainer | None, engines: list[Engine], servers: list[Server], stack: ExitStack
) -> WeightSink | None:
    """The way of weights to the engines."""
    if trainer is None or not engines:
        return None
    if not servers:
        return LocalSink(engines)
    sync = server_sync(args, trainer.world.device)
    stack.callback(sync.close)
    sink: WeightSink = sync.to(servers)
    return sink
