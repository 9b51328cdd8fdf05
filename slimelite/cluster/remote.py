"""Objects that may be in another process, and what is started there: methods are named by themselves, so that arguments
and results are checked.

::

    trainer: Remote[Trainer]
    written = trainer.submit(Trainer.save, folder, rollout_id)  # a Future[Checksums]
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

from slimelite.engines.protocol import Engine

T = TypeVar("T")
R = TypeVar("R")
V = TypeVar("V")
P = ParamSpec("P")
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
    """An object of this process: its methods run at once in the caller's thread, or on ``threads``."""

    def __init__(self, target: T, name: str, threads: ThreadPoolExecutor | None = None) -> None:
        self.target, self.name, self.threads = target, name, threads

    def start(self, method: str, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """See `Remote.start`."""
        if self.threads:
            return self.threads.submit(self._run, method, *args, **kwargs)
        future: Future[Any] = Future()
        try:
            future.set_result(self._run(method, *args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    def cpu_seconds(self) -> Future[float]:
        """See `Remote.cpu_seconds`."""
        future: Future[float] = Future()
        future.set_result(0.0)
        return future

    def _run(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self.target, method)(*args, **kwargs)
        return asyncio.run(result) if asyncio.iscoroutine(result) else result


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
