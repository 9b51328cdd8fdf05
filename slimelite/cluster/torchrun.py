"""Implements ``--launcher torchrun``, for runs without engines. Each process that torchrun has started is a rank.

Rank 0 runs the loop of train.py and the rollout side. The trainer of rank 0 runs on a thread. The other ranks run
`follow` and wait for calls of their trainers' methods. Each call is pickled, and sent through torchrun's rendezvous
store. torch's object collectives pickle their values too.
"""

from __future__ import annotations

import os
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist

from slimelite.arguments import Args
from slimelite.cluster.remote import Closing, LocalRemote, Progress, Remote
from slimelite.cluster.workers import Workers, make_trainer
from slimelite.data.tokenizer import load_tokenizer
from slimelite.rollout.manager import RolloutManager

if TYPE_CHECKING:
    from slimelite.training.trainer import Trainer

R = TypeVar("R")
V = TypeVar("V")
# requests to a rank that are not methods of its trainer
BEGIN, LEAVE, CPU_SECONDS = "begin a run", "leave", "cpu_seconds"
# a wait at the store is renewed after this time [s]; it fails if the store no longer exists
RENEW_S = 60.0
# counts over all runs of this process (--stages makes several runs): the number of calls of each rank, and of runs
_numbers: Counter[int | str] = Counter()


def meet() -> dist.Store:
    """Open a connection to torchrun's store. While one thread waits on a connection, other threads cannot use this
    connection."""
    store, _, _ = next(dist.rendezvous("env://"))
    return cast("dist.Store", store)


class Desk:
    """A thread that runs its jobs in order. The thread is a daemon thread, so a failed process does not wait for a
    collective."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, work: Callable[[], R]) -> Future[R]:
        """Run ``work`` after all earlier jobs."""
        future: Future[R] = Future()
        self._queue.put((future, work))
        return future

    def _work(self) -> None:
        while True:
            future, work = self._queue.get()
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)


class Shared:
    """A value that rank 0 sends only once, for all ranks. The other ranks read the value from the store with ``key``.
    Rank 0 uses ``value`` directly."""

    def __init__(self, key: str, value: object = None) -> None:
        self.key, self.value = key, value

    def __reduce__(self) -> tuple[type[Shared], tuple[str]]:
        return Shared, (self.key,)


class OwnTrainer(Remote["Trainer"]):
    """The trainer of rank 0, on a thread of this process."""

    def __init__(self, make: Callable[[], Trainer]) -> None:
        self.name, self._desk, self._store = "trainer_0", Desk("trainer_0"), meet()
        self.made = self._desk.submit(make)

    def start(self, method: str, /, *args: object, **kwargs: object) -> Future[Any]:
        """See `Remote.start`."""
        values = [arg.value if isinstance(arg, Shared) else arg for arg in args]
        return self._desk.submit(
            lambda: LocalRemote(self.made.result(), self.name).start(method, *values, **kwargs).result()
        )

    def cpu_seconds(self) -> Future[float]:
        """See `Remote.cpu_seconds`."""
        return self._desk.submit(lambda: 0.0)

    def share(self, value: V) -> V:
        """See `Remote.share`. Each new value replaces the previous shared value, because the verb that used the
        previous value is over."""
        _numbers["shared"] += 1
        self._store.delete_key(f"slimelite/shared/{_numbers['shared'] - 1}")
        shared = Shared(f"slimelite/shared/{_numbers['shared']}", value)
        _put(self._store, shared.key, value)
        return cast("V", shared)


class OtherTrainer(Remote["Trainer"]):
    """The trainer of another rank, in its process."""

    def __init__(self, rank: int) -> None:
        self.name, self._rank = f"trainer_{rank}", rank
        self._calls, self._answers, self._desk = meet(), meet(), Desk(f"answers of trainer_{rank}")

    def start(self, method: str, /, *args: object, **kwargs: object) -> Future[Any]:
        """See `Remote.start`."""
        number, _numbers[self._rank] = _numbers[self._rank], _numbers[self._rank] + 1
        _put(self._calls, f"slimelite/call/{self._rank}/{number}", (method, args, kwargs))
        return self._desk.submit(partial(self._answer, f"slimelite/answer/{self._rank}/{number}"))

    def _answer(self, key: str) -> Any:
        value, error = _take(self._answers, key)
        if error is not None:
            raise error
        return value

    def cpu_seconds(self) -> Future[float]:
        """See `Remote.cpu_seconds`."""
        return self.start(CPU_SECONDS)


@contextmanager
def torchrun_workers(args: Args, progress: Progress) -> Iterator[Workers]:
    """Start the workers of ``--launcher torchrun`` on rank 0: the rollout side in this process, and a trainer in each
    process."""
    with ExitStack() as stack:
        progress(0, 0, "reading the data")
        rollout = RolloutManager(args, [], load_tokenizer(args.tokenizer))
        stack.callback(rollout.close)
        progress(0, 0, "loading the trainers")
        _numbers["runs"] += 1
        run, ranks = _numbers["runs"], args.training_ranks
        others = [OtherTrainer(rank) for rank in range(1, ranks)]
        begun = [other.start(BEGIN, args, run) for other in others]
        own = OwnTrainer(partial(_make, args, run, 0))
        done, _ = wait([own.made, *begun], return_when=FIRST_EXCEPTION)  # if a rank fails, other ranks may wait for it
        for each in done:
            each.result()
        yield Workers(LocalRemote(rollout, "rollout"), [own, *others], [])
        for closing in [trainer.submit(Closing.close) for trainer in (own, *others)]:
            closing.result()


def follow() -> int:
    """Handle the requests of rank 0 until rank 0 leaves. All ranks except rank 0 call this function. Returns the exit
    status."""
    rank, store, trainer = int(os.environ["RANK"]), meet(), None
    while True:
        number, _numbers[rank] = _numbers[rank], _numbers[rank] + 1
        method, values, kwargs = _take(store, f"slimelite/call/{rank}/{number}")
        if method == LEAVE:
            return 0
        value, problem = None, None
        try:
            if method == BEGIN:
                args, run = values
                trainer = _make(args, run, rank)
            elif method == CPU_SECONDS:
                value = time.process_time()
            else:
                values = [pickle.loads(store.get(arg.key)) if isinstance(arg, Shared) else arg for arg in values]
                value = getattr(trainer, method)(*values, **kwargs)
        except Exception as error:
            problem = error
        _put(store, f"slimelite/answer/{rank}/{number}", (value, problem))


def leave() -> None:
    """Tell the other ranks to end. Rank 0 calls this function."""
    store = meet()
    for rank in range(1, int(os.environ["WORLD_SIZE"])):
        _put(store, f"slimelite/call/{rank}/{_numbers[rank]}", (LEAVE, (), {}))


def _make(args: Args, run: int, rank: int) -> Trainer:
    if not args.job.gpus:
        torch.set_num_threads(args.cpu_threads)
    return make_trainer(args, rank, args.training_ranks, store=dist.PrefixStore(f"slimelite/run/{run}", meet()))


def _put(store: dist.Store, key: str, value: object) -> None:
    store.set(key, cast("str", pickle.dumps(value)))  # the store also accepts bytes


def _take(store: dist.Store, key: str) -> Any:
    """Wait for the value of ``key``, and remove the value from the store."""
    while True:
        try:
            store.wait([key], timedelta(seconds=RENEW_S))
        except dist.DistStoreError:
            store.check([key])  # raises an error if the store no longer exists
        else:
            value = pickle.loads(store.get(key))
            store.delete_key(key)
            return value
