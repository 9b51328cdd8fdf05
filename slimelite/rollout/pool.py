"""Manages all engines of a run. The pool tracks for each engine whether it is usable, its load, its address and its
weight version."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass

from slimelite.base import trace
from slimelite.engines.protocol import (
    Engine,
    EngineInfo,
    EngineLostError,
    GenerateRequest,
    GenerateResult,
    OnTokens,
    Restartable,
    Streaming,
)
from slimelite.samples.sample import Generated, Sample

logger = logging.getLogger(__name__)

POLL_S = 0.5
# in a generate function, this checks whether the function's engine is down
IS_GONE: ContextVar[Callable[[], Awaitable[bool]] | None] = ContextVar("IS_GONE", default=None)
# in a generate function: whether its tokens need the ids that they were drawn from, because they are trained on
TELLS: ContextVar[bool] = ContextVar("TELLS", default=True)
# if an engine dies more often than this, the run ends, because then the cause is not a single machine failure
MOST_DEATHS = 5
# the samples of one prompt, and the error of the last attempt if the samples could not be generated
Outcome = tuple[list[Sample], Exception | None]


@dataclass(slots=True)
class AgentState:
    """The engine for an agent's requests, and the time for which the agent was paused. ``engine``: the index of the
    engine on which capacity for the agent's group is reserved.

    ``tells``: whether the engine also returns from which ids each token was drawn (see `SamplingParams.telling`).
    ``since``: the time when the current pause began [s, monotonic], or None if the agent is not paused. ``before``: the
    total time of earlier pauses [s].
    """

    engine: int
    tells: bool
    since: float | None = None
    before: float = 0.0

    @property
    def paused(self) -> float:
        """The total time for which the agent was paused so far [s]. This time does not count towards the agent's time
        limits."""
        return self.before + (0.0 if self.since is None else time.monotonic() - self.since)


@dataclass(slots=True)
class WaitingGroup:
    """A ``group`` of agents that is paused until the next rollout. ``task`` generates the group's responses. ``go_on``
    is `GroupGenerator.go_on`, which continues the generation."""

    task: asyncio.Task[list[Outcome]]
    group: list[Sample]
    go_on: Callable[[int, list[Generated]], None]

    def cancel(self) -> None:
        """Cancel the group's task, and ignore its result."""
        self.task.cancel()
        self.task.add_done_callback(lambda task: task.cancelled() or task.exception())


class EnginePool:
    """Distributes requests over numbered engines, and restarts engines that died.

    A restarted engine has its initial weights, so it gets no requests before the next weight sync. Usually the engine
    waits for the next regular sync. If no engine is usable, the driver starts an extra sync (`needs_weights`).

    Args:
        concurrency: the maximum number of requests in flight per engine, averaged over the engines.
        restarts: whether an engine that died is restarted. If restarts is False, the death of an engine ends the run.
        interval: the time between two health checks [s]. ``timeout``: the time limit for the answer to a health check
            [s].
        syncs: whether the run has weight syncs.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        concurrency: int,
        *,
        restarts: bool = False,
        interval: float = 30.0,
        timeout: float = 30.0,
        syncs: bool = True,
    ) -> None:
        self.engines = list(engines)
        self.infos: dict[int, EngineInfo] = {}  # the last answer of each engine
        self.deaths: Counter[int] = Counter()
        self.load = [0] * len(self.engines)
        self._concurrency = concurrency
        self._restarts, self._syncs = restarts, syncs
        self._interval, self._timeout = interval, timeout
        self._room = asyncio.Condition()
        self._calls: list[set[asyncio.Future[list[GenerateResult]]]] = [set() for _ in self.engines]
        self._urls: dict[int, asyncio.Task[str]] = {}
        self._down: set[int] = set()
        self._unsynced: set[int] = set()  # engines in _down that were restarted and wait for a weight sync
        self._revivals: dict[int, asyncio.Task[None]] = {}
        self._started: dict[int, asyncio.Event] = {}  # one event per dead engine, set after its restart
        self._broken: EngineLostError | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def up(self) -> list[int]:
        """Indices of the usable engines."""
        return [i for i in range(len(self.engines)) if i not in self._down]

    @property
    def capacity(self) -> int:
        """The maximum number of requests in flight, summed over all usable engines."""
        return self._concurrency * len(self.up)

    @property
    def weight_version(self) -> int:
        """The highest weight version that any engine has."""
        return max(info.weight_version for info in self.infos.values())

    @property
    def needs_weights(self) -> bool:
        """Whether no engine is usable, and a restarted engine waits for a weight sync."""
        return not self.up and bool(self._unsynced)

    async def refresh(self) -> None:
        """Ask every engine for its limits and its weight version.

        Raises:
            ValueError: there is no engine, or an engine is dead and ``restarts`` is off.
        """
        if not self.engines:
            raise ValueError(
                "there is no engine for generation; --debug-train-only works only with --load-debug-rollout-data or SFT"
            )
        await asyncio.gather(*(self.check(engine) for engine in range(len(self.engines))))

    @asynccontextmanager
    async def lease(self, requests: int, engine: int | None = None, avoid: int | None = None) -> AsyncIterator[int]:
        """Wait until there is capacity for ``requests`` requests, and reserve this capacity. Yields the index of the
        engine to use.

        The least loaded engine is chosen. The engine ``avoid`` is chosen only if there is no other engine. If
        ``engine`` is passed and is usable, it is chosen at once, whatever its load. While all engines are down, the
        caller waits.

        Raises:
            EngineLostError: an engine could not be restarted.
        """
        if engine is None or engine in self._down:
            async with self._room:
                await self._room.wait_for(lambda: self._broken or self._has_room(requests))
                if self._broken:
                    raise self._broken
                engine = min([i for i in self.up if i != avoid] or self.up, key=self.load.__getitem__)
        load = self.load
        load[engine] += requests
        try:
            yield engine
        finally:
            async with self._room:
                load[engine] -= requests  # after `forget_load`, this is an old list
                self._room.notify_all()

    def _has_room(self, requests: int) -> bool:
        return bool(self.up) and (not any(self.load) or sum(self.load) + requests <= self.capacity)

    async def usable(self, engine: int | None) -> int:
        """Return ``engine`` if it is usable, else the least loaded engine. The caller must have reserved capacity for
        its request with `lease`.

        Raises:
            EngineLostError: an engine could not be restarted.
        """
        async with self._room:
            await self._room.wait_for(lambda: self._broken or self.up)
        if self._broken:
            raise self._broken
        return engine if engine in self.up else min(self.up, key=self.load.__getitem__)

    def forget_load(self) -> None:
        """Free the capacity of all current leases. The groups with these leases are paused until the next rollout, and
        other requests need the capacity until then."""
        self.load = [0] * len(self.engines)
        self._wake()

    async def generate(
        self, engine: int, requests: Sequence[GenerateRequest], on_tokens: OnTokens | None = None
    ) -> list[GenerateResult]:
        """Generate the responses to ``requests`` on one engine. The results are in the order of the requests.

        Pass ``on_tokens`` only with a single request. If the engine supports streaming, ``on_tokens`` is called with
        the request's tokens while they are sampled.

        Raises:
            ConnectionError: the engine died.
        """
        if not requests:
            return []
        target = self.engines[engine]
        if on_tokens is not None and isinstance(target, Streaming):
            call = asyncio.ensure_future(_alone(target.stream(requests[0], on_tokens)))
        else:
            call = asyncio.ensure_future(target.generate(requests))
        self._calls[engine].add(call)
        try:
            with trace.span(f"engine_{engine}", "requests", requests[0].request_id, requests=len(requests)) as facts:
                results = await call
                facts["tokens"] = sum(result.length for result in results)
            return results
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if engine in self._down and not (task and task.cancelling()):
                raise ConnectionError(f"engine {engine} is gone") from None
            raise
        finally:
            self._calls[engine].discard(call)

    async def abort(self) -> None:
        """Abort all requests in flight on all usable engines."""

        async def abort(engine: int) -> None:
            try:
                await self.engines[engine].abort()
            except ConnectionError:
                await self.check(engine)

        await asyncio.gather(*(abort(i) for i in self.up))

    async def url(self, engine: int) -> str:
        """The base URL of the engine's HTTP server. The first call starts the server."""

        async def start() -> str:
            info = self.infos.get(engine) or await self.engines[engine].info()
            return info.url or await self.engines[engine].start_http()

        if engine not in self._urls:
            self._urls[engine] = asyncio.create_task(start())
        return await self._urls[engine]

    async def check(self, engine: int) -> None:
        """Ask an engine for its info. An engine that does not answer is marked as down and restarted. It is used again
        after its next weight sync.

        Raises:
            EngineLostError: the engine is dead and ``restarts`` is off.
        """
        if engine in self._unsynced:
            with suppress(ConnectionError, TimeoutError):  # `_revive` handles the error
                await self._take_back(engine)
        if engine in self._down:
            return
        # a slow answer counts as a death only if the engine can be restarted
        limit = self._timeout if self._restarts else None
        try:
            info = await asyncio.wait_for(self.engines[engine].info(), limit)
        except (ConnectionError, TimeoutError) as error:
            self._lost(engine, f"{error or f'no answer within {self._timeout:g} s'}")
        else:
            if self._restarts and self._syncs and info.weight_version < 0 <= self._version_of(engine):
                self._lost(engine, "the engine was restarted and has lost its weights")
            else:
                self.infos[engine] = info

    def _version_of(self, engine: int) -> int:
        """The weight version in an engine's last answer, or -1 if there was no answer."""
        return self.infos[engine].weight_version if engine in self.infos else -1

    async def is_gone(self, engine: int) -> bool:
        """Call `check` for an engine. Returns whether the engine is now down."""
        await self.check(engine)
        return engine in self._down

    async def watch(self) -> None:
        """Start to check every engine each ``interval`` seconds, until `rest` is called. If ``restarts`` is off, this
        method does nothing."""

        async def check_now_and_then() -> None:
            while True:
                await asyncio.sleep(self._interval)
                await asyncio.gather(*(self.check(engine) for engine in self.up))

        if self._restarts and self._watch is None:
            self._watch = asyncio.create_task(check_now_and_then())

    async def rest(self) -> None:
        """Stop the checks that `watch` started."""
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch
            self._watch = None

    async def settle(self) -> None:
        """Check every engine, and wait until dead engines are restarted.

        Raises:
            EngineLostError: an engine cannot be restarted.
        """
        await asyncio.gather(*(self.check(engine) for engine in self.up))
        await asyncio.gather(*(event.wait() for event in self._started.values()))
        if self._broken:
            raise self._broken

    def _lost(self, engine: int, why: str) -> None:
        if engine in self._down:
            return
        if not self._restarts:
            raise EngineLostError(
                f"engine {engine} has died: {why}; with --launcher ray the run would restart it "
                "(for an external server, --use-fault-tolerance would make the run wait for it)"
            )
        logger.error("engine %d has died: %s; other engines take its requests until it runs again", engine, why)
        self._down.add(engine)
        self.deaths[engine] += 1
        if engine not in self._started or self._started[engine].is_set():  # `settle` may wait for the old event
            self._started[engine] = asyncio.Event()
        earlier = self._revivals.get(engine)
        if earlier is not None and earlier is not asyncio.current_task():
            earlier.cancel()
        self._revivals[engine] = asyncio.create_task(self._revive(engine, why))
        for call in self._calls[engine]:
            call.cancel()
        self._wake()

    async def _revive(self, engine: int, why: str) -> None:
        begin = time.monotonic()
        try:
            target = self.engines[engine]
            if self.deaths[engine] > MOST_DEATHS or not isinstance(target, Restartable):
                raise EngineLostError(f"the engine died {self.deaths[engine]} times; the last cause was: {why}")
            await target.restart()
            logger.warning("engine %d was restarted in %.0f s", engine, time.monotonic() - begin)
            self._unsynced.add(engine)
            self._started[engine].set()
            while not await self._take_back(engine):
                await asyncio.sleep(POLL_S)
        except (ConnectionError, TimeoutError) as error:
            self._down.discard(engine)
            self._lost(engine, f"dead again: {error}")
        except Exception as error:
            self._broken = EngineLostError(f"engine {engine} cannot be restarted: {error}")
            self._started[engine].set()
        finally:
            self._unsynced.discard(engine)
            self._wake()

    async def _take_back(self, engine: int) -> bool:
        """Whether an engine has received weights since its restart. If it has, it is used again."""
        info = await asyncio.wait_for(self.engines[engine].info(), self._timeout)
        if self._syncs and info.weight_version < 0:
            return False
        if engine in self._unsynced:
            logger.warning("engine %d has weight version %d and is in use again", engine, info.weight_version)
            self.infos[engine] = info
            self._unsynced.discard(engine)
            self._down.discard(engine)
            self._wake()
        return True

    def _wake(self) -> None:
        """Wake the callers that wait in `lease`. These callers check again whether there is capacity."""

        async def wake() -> None:
            async with self._room:
                self._room.notify_all()

        self._waking = asyncio.create_task(wake())


async def _alone(result: Awaitable[GenerateResult]) -> list[GenerateResult]:
    return [await result]
