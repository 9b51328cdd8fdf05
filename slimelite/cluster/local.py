"""`--launcher local`: the same classes in this process, for debugging and for machines without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from slimelite.arguments import Args
from slimelite.cluster.cluster import Cluster
from slimelite.cluster.workers import RolloutWorker, build_engine
from slimelite.engines.protocol import Engine, WeightBucket
from slimelite.training.trainer import Trainer


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
def local_cluster(args: Args) -> Iterator[Cluster]:
    """Trainer, engine and rollout manager in this process (one rank, one engine)."""
    if args.device == "cpu":
        torch.set_num_threads(args.cpu_threads)
    trainer = None if args.debug_rollout_only else Trainer(args)
    engines = [] if args.debug_train_only else [build_engine(args, index=0)]
    rollout = RolloutWorker(args, engines)
    # the rollout has threads, so that its progress can be asked for; training stays where a debugger is
    threads = ThreadPoolExecutor(2, "rollout-worker")
    try:
        trainers = [LocalWorker(trainer)] if trainer else []
        yield Cluster(args, LocalWorker(rollout, threads), trainers, LocalSink(engines) if engines else None)
    finally:
        threads.shutdown()
        rollout.close()
        for engine in engines:
            asyncio.run(engine.close())
        if trainer:
            trainer.close()
