"""Calls to objects that may be in another process. Each call returns a future.

The caller passes the method itself instead of its name. So type checkers know the method's arguments and its result::

    trainer: Remote[Trainer]
    written = trainer.submit(Trainer.save, folder, rollout_id)  # a Future[Checksums]
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Thread
from types import SimpleNamespace
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

from slimelite.arguments import Args
from slimelite.base import trace
from slimelite.base.lifecycle import StopSignals
from slimelite.engines.protocol import Engine, WeightBucket, WeightSyncError
from slimelite.samples.table import SampleTable

T_co = TypeVar("T_co", covariant=True)
R = TypeVar("R")
V = TypeVar("V")
P = ParamSpec("P")
# interval between two polls of a future [s]
POLL_S = 0.5
# error texts of gloo, NCCL and torch's store if another rank does not answer
SILENCE = re.compile(
    r"Timed out waiting|Application timeout caused pair closure|Connection closed by peer|Watchdog caught collective|"
    r"Connection reset by peer|wait timeout after|Timed out after \d+ seconds waiting"
)
# called with (amount done, total, note)
Progress = Callable[[int, int, str], None]


class ClusterError(RuntimeError):
    """A worker died, or the machines have too few devices for the job. The message names the worker and its log."""


class MemoryShortage(ClusterError):
    """A worker was killed. The worker's machine had no memory left, or the reason is unknown."""


class RestartWaitError(ClusterError):
    """The machines of a run did not come back within ``--restart-wait``. A run that fails with this error is not
    started again."""


def not_there(problem: str, patience: float) -> ClusterError:
    """The error for a missing cluster or missing devices. ``patience``: how long a restart has waited for them [s]; 0
    at the first start of a run."""
    if not patience:
        return ClusterError(problem)
    return RestartWaitError(f"a restart has waited {patience:g} s for its machines (--restart-wait): {problem}")


def with_memory(error: BaseException, args: Args) -> BaseException:
    """Return ``error``, or a new error that explains it. If memory was full, the new error names the memory that the
    run needed, and settings that would have fitted. If a collective failed, the new error states that a rank did not
    answer."""
    from slimelite.plan.run import is_shortage, needs_and_remedies, shortage  # only needed after an error

    if isinstance(error, MemoryShortage):
        explained = ClusterError(f"{error}. {needs_and_remedies(args)}")
    elif is_shortage(error) and not isinstance(error, ClusterError):
        explained = ClusterError(shortage(error, args))
    elif isinstance(error, RuntimeError) and not isinstance(error, ClusterError) and SILENCE.search(str(error)):
        explained = ClusterError(
            "a training rank got no answer from another rank: the other rank is stopped or hangs; its machine or its "
            "network failed; or a collective takes more than --distributed-timeout-minutes "
            f"{args.distributed_timeout_minutes} ({' '.join(str(error).rpartition(']')[2].split())[:200]}). The "
            "ranks' logs are in logs/ of the run folder"
        )
    else:
        return error
    explained.__cause__ = error
    for note in getattr(error, "__notes__", []):
        explained.add_note(note)
    return explained


class Names:
    """Replaces a class that this process does not import. `Remote.submit` needs only the names of the class's
    methods."""

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(__name__=name)


class Closing(Protocol):
    """A worker that must be closed at the end of a run."""

    def close(self) -> None:
        """End all threads and processes that the worker has started."""
        ...


class Remote(ABC, Generic[T_co]):
    """An object of class ``T_co`` in this or another process. ``name``: the object's name in messages."""

    name: str

    @overload
    def submit(
        self, method: Callable[Concatenate[T_co, P], Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs
    ) -> Future[R]: ...
    @overload
    def submit(self, method: Callable[Concatenate[T_co, P], R], *args: P.args, **kwargs: P.kwargs) -> Future[R]: ...
    def submit(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """Start ``method``, such as ``Trainer.save``. The future gets the method's result or error.

        The object's own method of the same name is called, so ``method`` may belong to a base class or a protocol.
        """
        return self.start(method.__name__, *args, **kwargs)

    def ask(self, method: Callable[Concatenate[T_co, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call ``method`` and wait for its result."""
        return self.submit(method, *args, **kwargs).result()

    @abstractmethod
    def start(self, method: str, /, *args: object, **kwargs: object) -> Future[Any]:
        """Like `submit`, but takes the method's name."""
        ...

    @abstractmethod
    def cpu_seconds(self) -> Future[float]:
        """The CPU time of the object's process since its start [s]. The result is 0 if the object is in the caller's
        process."""
        ...

    def share(self, value: V) -> V:
        """Return ``value``, or a reference to it. A reference can be passed cheaply to several remote objects."""
        return value


class LocalRemote(Remote[T_co]):
    """An object in this process. The object's methods run immediately, in the caller's thread."""

    def __init__(self, target: T_co, name: str) -> None:
        self.target, self.name = target, name

    def start(self, method: str, /, *args: object, **kwargs: object) -> Future[Any]:
        """See `Remote.start`."""
        future: Future[Any] = Future()
        try:
            with trace.call(self.name, method, args):
                result = getattr(self.target, method)(*args, **kwargs)
                result = asyncio.run(result) if asyncio.iscoroutine(result) else result
            future.set_result(result)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            future.set_exception(error)
        return future

    def cpu_seconds(self) -> Future[float]:
        """See `Remote.cpu_seconds`."""
        future: Future[float] = Future()
        future.set_result(0.0)
        return future


class RemoteSink:
    """Sends weights to remote engines. Each bucket of weights is shared only once (`Remote.share`), and all engines
    read this copy."""

    every_rank = False

    def __init__(self, engines: Sequence[Remote[Engine]]) -> None:
        self.engines = engines

    def begin(self, version: int, changed: Collection[str] | None = None) -> bool:
        """Stop every engine's decoding."""
        # a user's engine may not have the second parameter, because only runs with adapters need it
        update = (version,) if changed is None else (version, changed)
        return all(self._each(Engine.begin_weight_update, *update))

    def send(self, bucket: WeightBucket) -> None:
        """Load one bucket into every engine."""
        shared = self.engines[0].share(bucket)
        self._each(Engine.load_weights, shared)

    def end(self) -> None:
        """Let every engine decode again."""
        self._each(Engine.end_weight_update)

    def _each(
        self, method: Callable[Concatenate[Engine, P], Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        futures = [engine.submit(method, *args, **kwargs) for engine in self.engines]
        try:
            return [future.result() for future in futures]
        except ClusterError as error:  # an engine is dead
            raise WeightSyncError(f"weights did not reach every engine: {error}") from error


def check_number(verb: str, name: str, value: object) -> None:
    """Check that the argument ``name`` of ``verb`` is a whole number of at least 0. Raises ValueError for any other
    value."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{verb}: {name} must be a whole number of at least 0, not {value!r}")


def check_table(verb: str, value: object) -> None:
    """Check that the argument of ``verb`` is a table of samples. Raises ValueError for any other value."""
    if not isinstance(value, SampleTable):
        has = isinstance(value, Pending) and ": take the .table of its result()"
        has = has or (hasattr(value, "table") and ": take its .table") or ""
        raise ValueError(f"{verb}: the table must be a SampleTable, not a {type(value).__name__}{has}")


class Pending(Future[R]):
    """A future for the result of a verb of `Cluster`. While the method `result` waits, it also checks the state of the
    run.

    For this check, `result` calls ``attend(progress)`` every ``POLL_S`` seconds, with the ``progress`` that its caller
    gave.
    """

    def __init__(self, turns: Turns, attend: Callable[[Progress | None], None] | None = None) -> None:
        super().__init__()
        self.taken = False  # whether `result` has returned or raised
        self.failure = turns.failure  # shared with the verbs that are called before the next error is seen
        self._turns, self._attend = turns, attend

    def result(self, timeout: float | None = None, progress: Progress | None = None) -> R:
        """Wait for the verb's result. During the wait, ``progress`` is called with the progress of the verb.

        Raises:
            Exception: the verb's error. After this error is raised, new verbs can run.
            Stopped: Ctrl-C or SIGTERM was received (see `StopSignals`).
            TimeoutError: there is no result after ``timeout`` [s]. The verb continues to run in spite of this error.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        StopSignals.check()
        while not self.done() and (left := end - time.monotonic()) > 0:
            wait([self], min(POLL_S, left))
            StopSignals.check()
            if self._attend and not self.done():
                self._attend(progress)
        try:
            return super().result(0)
        finally:
            self.taken = self.done()
            self._turns.seen(self)


@dataclass(slots=True)
class Failure:
    """The first error that a verb raises; None before that. Verbs that are called after the caller has seen the error
    share a new `Failure`."""

    error: BaseException | None = None


class Turns:
    """Runs jobs one after the other on a thread, in the order of the calls. ``inline``: whether the jobs run in the
    caller's thread instead.

    After an error, no job runs until a `Pending.result` has raised this error to the caller. Jobs that were queued
    before the error always fail with this error. ``explained``: a function, such as `with_memory`, that converts an
    error to the error that is raised.
    """

    def __init__(
        self, *, inline: bool, explained: Callable[[BaseException], BaseException] = lambda error: error
    ) -> None:
        self._explained = explained
        self.failure = Failure()
        self._closed = False
        self.inline, self._over = inline, False
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name="verbs", daemon=True)
        if not inline:
            self._thread.start()

    def take(self, pending: Pending[R], work: Callable[[], R]) -> Pending[R]:
        """Queue ``work``. ``pending`` gets the result of ``work``."""
        job = partial(self.run, pending, work)
        if self.inline:
            job()
        else:
            self._jobs.put(job)
        return pending

    def check(self, pending: Pending[Any] | None = None) -> None:
        """Raise the error of a failed verb, unless a `Pending.result` has already raised this error. An error that was
        already raised is raised again only if the verb of ``pending`` was called before that.

        Raises:
            Exception: the error of the failed verb.
            ValueError: the block of `launch` has ended.
        """
        error = self.failure.error or (None if pending is None else pending.failure.error)
        if error is not None:
            raise error
        if self._closed:
            raise ValueError("the run has ended with its `with launch(...)` block: call verbs inside the block")

    def seen(self, pending: Future[Any]) -> None:
        """Record that the caller has seen the error of ``pending``. After that, new jobs can run although an earlier
        job has failed."""
        if pending.done() and not pending.cancelled() and pending.exception() is self.failure.error is not None:
            self.failure = Failure()

    def finish(self) -> None:
        """Wait until every job has run.

        Raises:
            Exception: see `check`.
        """
        if not self.inline:
            self._jobs.put(None)
            self._thread.join()
        self.check()

    def stop(self) -> None:
        """Cancel all jobs that have not begun."""
        self._over = True
        self._jobs.put(None)

    def close(self) -> None:
        """Raise an error for all further verbs."""
        self._closed = True

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def run(self, pending: Pending[R], work: Callable[[], R]) -> None:
        """Run ``work`` now, unless an earlier job failed or `stop` was called."""
        if self._over:
            pending.cancel()
        if not pending.set_running_or_notify_cancel():
            return
        try:
            self.check(pending)
            result = work()
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)  # Ctrl-C in the main thread
            left_out = error is self.failure.error or error is pending.failure.error
            if not (interrupted or left_out):
                error = self._explained(error)
                self.failure.error = self.failure.error or error
            pending.set_exception(error)
            if interrupted:
                raise
        else:
            pending.set_result(result)
