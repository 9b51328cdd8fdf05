"""Objects that may be in another process, and futures for what they are asked.

A method is named by itself, so that its arguments and its result are checked::

    trainer: Remote[Trainer]
    written = trainer.submit(Trainer.save, folder, rollout_id)  # a Future[Checksums]
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

from slimelite.engines.protocol import Engine

T = TypeVar("T")
R = TypeVar("R")
V = TypeVar("V")
P = ParamSpec("P")
# between two looks at what is waited for [s]
POLL_S = 0.5
# told (what is done, of how much, a note)
Progress = Callable[[int, int, str], None]


class ClusterError(RuntimeError):
    """A worker died or the machines cannot hold the job; the message says which and where its log is."""


class Remote(ABC, Generic[T]):
    """An object of class ``T``, wherever it is; ``name``: what messages call it."""

    name: str

    @overload
    def submit(
        self, method: Callable[Concatenate[T, P], Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs
    ) -> Future[R]: ...
    @overload
    def submit(self, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs) -> Future[R]: ...
    def submit(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        """Start ``method``, such as ``Trainer.save``; the future has its result or its error.

        The object's own method of that name is called: ``method`` may be that of a base class or a protocol.
        """
        return self.start(method.__name__, *args, **kwargs)

    def ask(self, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """What ``method`` returns, when it has."""
        return self.submit(method, *args, **kwargs).result()

    @abstractmethod
    def start(self, method: str, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """What `submit` does, by the method's name."""
        ...

    @abstractmethod
    def cpu_seconds(self) -> Future[float]:
        """CPU time of its process since that began; 0 where that is the caller's."""
        ...

    def share(self, value: V) -> V:
        """``value``, or what stands for it: an argument that is cheap to submit to several such objects."""
        return value


class LocalRemote(Remote[T]):
    """An object of this process: its methods run at once, in the caller's thread."""

    def __init__(self, target: T, name: str) -> None:
        self.target, self.name = target, name

    def start(self, method: str, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """See `Remote.start`."""
        future: Future[Any] = Future()
        try:
            result = getattr(self.target, method)(*args, **kwargs)
            future.set_result(asyncio.run(result) if asyncio.iscoroutine(result) else result)
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


class _RemoteEngine:
    """The methods of `Engine`, each of which calls that of a remote one."""

    def __init__(self, engine: Remote[Engine]) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        if name.startswith("_") or not hasattr(Engine, name):
            raise AttributeError(name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await asyncio.wrap_future(self._engine.start(name, *args, **kwargs))

        return call


def remote_engine(engine: Remote[Engine]) -> Engine:
    """The engine protocol, spoken to a remote engine."""
    return cast(Engine, _RemoteEngine(engine))


class Pending(Future[R]):
    """The result of a verb of `Cluster`: a future whose `result` looks after the run while it waits.

    ``attend``: called now and then with what `result` was given.
    """

    def __init__(self, turns: Turns, attend: Callable[[Progress | None], None] | None = None) -> None:
        super().__init__()
        self.taken = False  # whether somebody has the result
        self.errors_before = turns.errors  # how many there had been when it was asked for
        self.left_out = False  # for an error before it
        self._turns, self._attend = turns, attend

    def result(self, timeout: float | None = None, progress: Progress | None = None) -> R:
        """Wait for what the verb returns, and show ``progress`` meanwhile.

        Raises:
            Exception: what went wrong; later verbs then go on.
        """
        while timeout is None and not self.done():
            wait([self], POLL_S)
            if self._attend and not self.done():
                self._attend(progress)
        try:
            return super().result(timeout)
        finally:
            self.taken = self.done()
            self._turns.told(self)


class Turns:
    """One thing after the other, in the order in which they were asked for, on a thread; ``inline``: in the caller's.

    After an error nothing is done any more until somebody was told of it, by the `Pending.result` that raises it.
    """

    def __init__(self, *, inline: bool) -> None:
        self.failed: BaseException | None = None
        self.errors = 0
        self._last: BaseException | None = None
        self._closed = False
        self.inline, self._over = inline, False
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name="verbs", daemon=True)
        if not inline:
            self._thread.start()

    def take(self, pending: Pending[R], work: Callable[[], R]) -> Pending[R]:
        """Let ``work`` have its turn; ``pending`` is its result."""
        job = partial(self.run, pending, work)
        if self.inline:
            job()
        else:
            self._jobs.put(job)
        return pending

    def check(self, pending: Pending[Any] | None = None) -> None:
        """Raise the error that nobody was told of, if there is one; for ``pending`` also one that somebody was told of
        after it was asked for.

        Raises:
            Exception: that error.
            ValueError: the block of `launch` was left.
        """
        error = self.failed
        if error is None and pending is not None and pending.errors_before != self.errors:
            error = self._last
        if error is not None:
            if pending is not None:
                pending.left_out = True
            raise error
        if self._closed:
            raise ValueError("the run has ended with its `with launch(...)`: call verbs inside the block")

    def told(self, pending: Future[Any]) -> None:
        """Somebody has seen the error of ``pending``."""
        if pending.done() and not pending.cancelled() and pending.exception() is self.failed:
            self.failed = None

    def finish(self) -> None:
        """Wait until everything had its turn.

        Raises:
            Exception: see `check`.
        """
        if not self.inline:
            self._jobs.put(None)
            self._thread.join()
        self.check()

    def stop(self) -> None:
        """What has not begun is left out."""
        self._over = True
        self._jobs.put(None)

    def close(self) -> None:
        """Nothing can be asked for any more."""
        self._closed = True

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def run(self, pending: Pending[R], work: Callable[[], R]) -> None:
        """Do it now, unless something went wrong or it is over."""
        if self._over:
            pending.cancel()
        if not pending.set_running_or_notify_cancel():
            return
        try:
            self.check(pending)
            result = work()
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)  # in the main thread
            if not (interrupted or pending.left_out):
                self._last, self.failed = error, self.failed or error
                self.errors += 1
            pending.set_exception(error)
            if interrupted:
                raise
        else:
            pending.set_result(result)
