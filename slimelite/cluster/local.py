"""`--launcher local`: all workers in this process. Importing this file imports no torch, since `ray_cluster` does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NamedTuple

from slimelite.arguments import Args
from slimelite.cluster.remote import LocalRemote, Progress, Remote
from slimelite.cluster.workers import EngineFactory, Target
from slimelite.data.tokenizer import load_tokenizer
from slimelite.rollout.manager import RolloutManager

if TYPE_CHECKING:
    from slimelite.cluster.trainer import TrainerWorker


class Workers(NamedTuple):
    """The workers that a launcher has started, for `Cluster`.

    ``trainers``: one for each rank, rank 0 first; ``engines``: argument of `TrainerWorker.push_to`; ``others``: more
    workers in processes of their own, whose CPU time counts.
    """

    rollout: Remote[RolloutManager]
    trainers: Sequence[Remote[TrainerWorker]]
    engines: Sequence[Target]
    others: Sequence[Remote[object]] = ()


@contextmanager
def local_workers(args: Args, progress: Progress) -> Iterator[Workers]:
    """``--launcher local``: one rank, one engine and the rollout worker, all in this process.

    The engine loads first, as in `ray_cluster.start_workers`.
    """
    import torch

    if not args.job.gpus:
        torch.set_num_threads(args.cpu_threads)
    with ExitStack() as stack:
        progress(0, 0, "loading the engine")
        engines, servers = EngineFactory(args).local(stack)
        rollout = RolloutManager(args, engines, load_tokenizer(args.tokenizer))
        stack.callback(rollout.close)
        if args.job.trains and args.offload_rollout:
            rollout.release_memory()
        progress(0, 0, "loading the trainer")
        trainers = []
        if args.job.trains:
            from slimelite.cluster.trainer import TrainerWorker

            trainer = TrainerWorker(args)
            stack.callback(trainer.close)
            trainers.append(LocalRemote(trainer, "trainer_0"))
        remotes = [LocalRemote(engine, "engine_0") for engine in engines]
        yield Workers(LocalRemote(rollout, "rollout"), trainers, servers or remotes)
