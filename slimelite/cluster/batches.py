"""Calls an engine in another process, and puts many calls into one message.

A message between two processes costs about a millisecond of CPU time, as much as a decoding step of a tiny model. A
rollout of 32 groups makes 32 calls of `Engine.generate` at the same time. These calls are sent as one batch, and their
results come back in a few messages.
"""

from __future__ import annotations

import asyncio
import time
from asyncio import wrap_future
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from slimelite.base.heap import return_freed_memory
from slimelite.base.threads import Gathered
from slimelite.cluster.remote import POLL_S, ClusterError, Remote
from slimelite.engines.protocol import Engine, EngineInfo, GenerateRequest, GenerateResult

P = ParamSpec("P")
R = TypeVar("R")
# after the first call of a batch is done, wait this time for other calls to send their results in the same message [s]
GATHER_S = 0.02
# time limit for a restarted engine to load [s]
START_S = 600.0
# freed memory that stays allocated in an engine's process for the next batch [bytes]
KEPT_BYTES = 2**26
Results = list[GenerateResult]
# (position in the batch, results) of calls that are done; the results are None if the call has failed
Done = list[tuple[int, Results | None]]


class EngineDesk:
    """Wraps an engine, and runs in the engine's process. `remote_engine` calls the desk's methods from another process.

    ``syncs``: whether the run sends weights to this engine. ``empty``: whether the engine's process was restarted and
    has not received weights since then.
    """

    def __init__(self, engine: Engine, *, syncs: bool = False) -> None:
        self._engine, self._syncs, self.empty = engine, syncs, False
        self._batches: dict[tuple[int, int], dict[asyncio.Task[Results], int]] = {}
        self._errors: dict[tuple[tuple[int, int], int], BaseException] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def begin_again(self) -> None:
        """Record that this process replaces an earlier process of the engine."""
        self.empty = self._syncs

    async def info(self) -> EngineInfo:
        """See `Engine.info`. The weight version is -1 while a restarted engine waits for its weights."""
        info = await self._engine.info()
        return replace(info, weight_version=-1) if self.empty else info

    async def end_weight_update(self) -> None:
        """See `Engine.end_weight_update`."""
        await self._engine.end_weight_update()
        self.empty = False

    async def generate_batch(self, batch: tuple[int, int], calls: Sequence[Sequence[GenerateRequest]]) -> Done:
        """Start the ``calls`` of a new ``batch``, and return the first results as `fetch` does.

        Raises:
            ConnectionError: the engine was restarted, and waits for its weights.
        """
        if self.empty:
            raise ConnectionError("the engine was restarted, and waits for its weights")
        self._batches[batch] = {asyncio.ensure_future(self._engine.generate(c)): i for i, c in enumerate(calls)}
        return await self.fetch(batch)

    async def fetch(self, batch: tuple[int, int]) -> Done:
        """Wait until some calls of ``batch`` are done, and return their results. If a call failed, `error` raises its
        error."""
        tasks, done = self._batches[batch], Done()
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in (await asyncio.wait(tasks, timeout=GATHER_S))[0]:
            call = tasks.pop(task)
            error = ConnectionError("the engine cancelled the call") if task.cancelled() else task.exception()
            if error is None:
                done.append((call, task.result()))
            else:
                if batch in self._batches:
                    self._errors[batch, call] = error
                done.append((call, None))
        if not tasks:
            self._batches.pop(batch, None)
            if not self._batches:
                return_freed_memory(above=KEPT_BYTES)
        return done

    async def cancel(self, batch: tuple[int, int], call: int | None = None) -> None:
        """Cancel one ``call`` of ``batch``, because its caller is gone. If ``call`` is None, cancel all calls. The
        results of this batch are then never fetched."""
        tasks = self._batches.get(batch, {}) if call is not None else self._batches.pop(batch, {})
        for task in [task for task, number in tasks.items() if call in (None, number)]:
            task.cancel()
        if call is None:  # the errors of this batch will not be fetched either
            self._errors = {place: error for place, error in self._errors.items() if place[0] != batch}

    async def error(self, batch: tuple[int, int], call: int) -> None:
        """Raise the stored error of a ``call`` of ``batch``, and delete the stored error."""
        raise self._errors.pop((batch, call))


@dataclass(slots=True)
class _Call:
    """A call of `Engine.generate`. ``place``: the batch of the call, and its number in the batch. ``place`` is None
    until the call is sent."""

    requests: Sequence[GenerateRequest]
    answer: asyncio.Future[Results]
    place: tuple[tuple[int, int], int] | None = None


class _RemoteEngine:
    """The methods of `Engine`. Each method calls the method with the same name in a remote `EngineDesk`."""

    def __init__(self, engine: Remote[Engine]) -> None:
        self._engine = engine
        self._numbers = count()
        self._leaving = Gathered(self._send)
        self._sending: set[asyncio.Task[None]] = set()

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, object]]:
        if name.startswith("_"):
            raise AttributeError(name)
        method = getattr(Engine, name)

        async def call(*args: object, **kwargs: object) -> object:
            try:
                return await wrap_future(self._engine.submit(method, *args, **kwargs))
            except ClusterError as error:
                raise ConnectionError(str(error)) from error

        return call

    async def restart(self) -> None:
        """Wait until the engine answers again. Ray restarts the engine's dead process.

        Raises:
            ConnectionError: the engine does not answer within `START_S`.
        """
        deadline = time.monotonic() + START_S
        while True:
            try:
                await wrap_future(self._engine.submit(Engine.info))
                return
            except ClusterError as error:
                if time.monotonic() > deadline:
                    raise ConnectionError(str(error)) from error
            await asyncio.sleep(POLL_S)

    async def generate(self, requests: Sequence[GenerateRequest]) -> Results:
        """See `Engine.generate`. All calls that are made in one turn of the event loop are sent together. If this
        coroutine is cancelled, the call is cancelled too."""
        call = _Call(requests, asyncio.get_running_loop().create_future())
        self._leaving.add(call)
        try:
            return await call.answer
        except asyncio.CancelledError:
            if call.place is not None:
                self._submit(EngineDesk.cancel, *call.place)
            raise

    def _send(self, calls: list[_Call]) -> None:
        calls = [call for call in calls if not call.answer.cancelled()]
        if not calls:
            return
        task = asyncio.create_task(self._exchange(calls))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _exchange(self, calls: list[_Call]) -> None:
        """Send the calls, and fetch results until each call has its answer."""
        batch, left = (id(self), next(self._numbers)), len(calls)
        for number, call in enumerate(calls):
            call.place = batch, number
        answers = [call.answer for call in calls]
        try:
            done = await wrap_future(self._submit(EngineDesk.generate_batch, batch, [call.requests for call in calls]))
            while True:
                for number, results in done:
                    await self._hand_over(answers[number], batch, number, results)
                left -= len(done)
                if not left:
                    return
                done = await wrap_future(self._submit(EngineDesk.fetch, batch))
        except asyncio.CancelledError:
            for answer in answers:
                answer.cancel()
            self._submit(EngineDesk.cancel, batch)
            raise
        except Exception as error:  # the process or the connection failed, so no call of the batch will be answered
            failure = ConnectionError(str(error)) if isinstance(error, ClusterError) else error
            for answer in answers:
                if not answer.done():
                    answer.set_exception(failure)

    async def _hand_over(
        self, answer: asyncio.Future[Results], batch: tuple[int, int], call: int, results: Results | None
    ) -> None:
        if results is None:
            try:
                await wrap_future(self._submit(EngineDesk.error, batch, call))
            except Exception as error:
                if not answer.done():
                    answer.set_exception(error)
        elif not answer.done():  # the caller may have been cancelled
            answer.set_result(results)

    def _submit(
        self, method: Callable[Concatenate[EngineDesk, P], Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs
    ) -> Future[R]:
        """Call a method of the engine's `EngineDesk`."""
        return self._engine.start(method.__name__, *args, **kwargs)


def remote_engine(engine: Remote[Engine]) -> Engine:
    """An `Engine` that forwards its method calls to the remote ``engine``, which is an `EngineDesk`."""
    return cast(Engine, _RemoteEngine(engine))
