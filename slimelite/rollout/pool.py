"""The engines of a run behind one door: which of them can be used, who is free, who has which address and weights."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from slimelite.engines.protocol import Engine, EngineInfo, GenerateRequest, GenerateResult, Restartable

logger = logging.getLogger(__name__)

POLL_S = 0.5
# deaths of one engine in a run that end it: there is something wrong with more than a machine
MOST_DEATHS = 5


class EnginePool:
    """Engines by their number, the requests in flight on each, and the way back of those that died.

    A restarted engine has the weights it began with, so it serves nothing until a weight sync has stamped it: the next
    one, or, when no other engine is left, one that the driver makes on purpose (`needs_weights`).

    Args:
        concurrency: requests in flight for each engine, on average.
        restarts: ``--use-fault-tolerance``; without it a dead engine ends the run.
        interval, timeout: between two checks of an engine, and for its answer to one [s].
        syncs: whether the run has weight syncs at all.
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
        self.infos: dict[int, EngineInfo] = {}  # what each engine last said of itself
        self.deaths: Counter[int] = Counter()
        self.load = [0] * len(self.engines)
        self._concurrency = concurrency
        self._restarts, self._syncs = restarts, syncs
        self._interval, self._timeout = interval, timeout
        self._room = asyncio.Condition()
        self._calls: list[set[asyncio.Future[list[GenerateResult]]]] = [set() for _ in self.engines]
        self._urls: dict[int, asyncio.Task[str]] = {}
        self._down: set[int] = set()
        self._unsynced: set[int] = set()  # of those that are down: alive again, without weights
        self._revivals: dict[int, asyncio.Task[None]] = {}
        self._started: dict[int, asyncio.Event] = {}  # of every engine that died: whether it runs again
        self._broken: ValueError | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def up(self) -> list[int]:
        """Engines that can be used."""
        return [i for i in range(len(self.engines)) if i not in self._down]

    @property
    def capacity(self) -> int:
        """Requests in flight on all engines together."""
        return self._concurrency * len(self.up)

    @property
    def weight_version(self) -> int:
        """The newest weights any engine holds."""
        return max(info.weight_version for info in self.infos.values())

    @property
    def needs_weights(self) -> bool:
        """Whether nothing can go on before somebody sends the current weights."""
        return not self.up and bool(self._unsynced)

    async def refresh(self) -> None:
        """Ask every engine for its limits and its weight version.

        Raises:
            ValueError: there is no engine, or one is gone for good.
        """
        if not self.engines:
            raise ValueError(
                "there is no engine to generate with; --debug-train-only needs --load-debug-rollout-data or SFT"
            )
        await asyncio.gather(*(self.check(engine) for engine in range(len(self.engines))))

    @asynccontextmanager
    async def lease(self, requests: int, engine: int | None = None, avoid: int | None = None) -> AsyncIterator[int]:
        """Wait until there is room for ``requests`` together and hold it; yields the engine that takes them.

        That is the one with the least to do, and not ``avoid`` if there is another. A given ``engine`` is taken at
        once, whatever its load, unless it is out of use. While all are, it waits for one.

        Raises:
            ValueError: an engine is gone for good.
        """
        if engine is None or engine in self._down:
            async with self._room:
                await self._room.wait_for(lambda: self._broken or self._has_room(requests))
                if self._broken:
                    raise self._broken
                engine = min([i for i in self.up if i != avoid] or self.up, key=self.load.__getitem__)
        self.load[engine] += requests
        try:
            yield engine
        finally:
            async with self._room:
                self.load[engine] -= requests
                self._room.notify_all()

    def _has_room(self, requests: int) -> bool:
        return bool(self.up) and (not any(self.load) or sum(self.load) + requests <= self.capacity)

    async def generate(self, engine: int, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """The requests, in order, on one engine.

        Raises:
            ConnectionError: the engine is gone.
        """
        if not requests:
            return []
        call = asyncio.ensure_future(self.engines[engine].generate(requests))
        self._calls[engine].add(call)
        try:
            return await call
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if engine in self._down and not (task and task.cancelling()):
                raise ConnectionError(f"engine {engine} is gone") from None
            raise
        finally:
            self._calls[engine].discard(call)

    async def abort(self) -> None:
        """End everything in flight."""

        async def abort(engine: int) -> None:
            try:
                await self.engines[engine].abort()
            except ConnectionError:
                await self.check(engine)

        await asyncio.gather(*(abort(i) for i in self.up))

    async def url(self, engine: int) -> str:
        """Base URL of the engine's HTTP front, started when first asked for."""

        async def start() -> str:
            info = self.infos.get(engine) or await self.engines[engine].info()
            return info.url or await self.engines[engine].start_http()

        if engine not in self._urls:
            self._urls[engine] = asyncio.create_task(start())
        return await self._urls[engine]

    async def check(self, engine: int) -> None:
        """Ask for its info; without an answer it is out of use and started anew, with weights again it takes part.

        Raises:
            ValueError: it is dead, and nothing is restarted in this run.
        """
        if engine in self._unsynced:
            with suppress(ConnectionError, TimeoutError):  # its revival notices too
                await self._take_back(engine)
        if engine in self._down:
            return
        # a slow answer is a death only where a restart can mend it
        limit = self._timeout if self._restarts else None
        try:
            self.infos[engine] = await asyncio.wait_for(self.engines[engine].info(), limit)
        except (ConnectionError, TimeoutError) as error:
            self._lost(engine, f"{error or f'no answer within {self._timeout:g} s'}")

    async def watch(self) -> None:
        """Check every engine now and then, until `rest`."""

        async def check_now_and_then() -> None:
            while True:
                await asyncio.sleep(self._interval)
                await asyncio.gather(*(self.check(engine) for engine in self.up))

        if self._restarts and self._watch is None:
            self._watch = asyncio.create_task(check_now_and_then())

    async def rest(self) -> None:
        """No more checks."""
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch
            self._watch = None

    async def settle(self) -> None:
        """Every engine answers: the dead are found, and waited for until they have started.

        Raises:
            ValueError: an engine does not start again.
        """
        await asyncio.gather(*(self.check(engine) for engine in self.up))
        await asyncio.gather(*(event.wait() for event in self._started.values()))
        if self._broken:
            raise self._broken

    def _lost(self, engine: int, why: str) -> None:
        if engine in self._down:
            return
        if not self._restarts:
            raise ValueError(f"engine {engine} is gone: {why}; --use-fault-tolerance would start it anew")
        logger.error("engine %d is gone: %s; its requests go to others until it runs again", engine, why)
        self._down.add(engine)
        self.deaths[engine] += 1
        if engine not in self._started or self._started[engine].is_set():  # else somebody may wait for it
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
                raise ValueError(f"it died {self.deaths[engine]} times, the last time of: {why}")
            await target.restart()
            logger.warning("engine %d runs again after %.0f s", engine, time.monotonic() - begin)
            self._unsynced.add(engine)
            self._started[engine].set()
            while not await self._take_back(engine):
                await asyncio.sleep(POLL_S)
        except (ConnectionError, TimeoutError) as error:
            self._down.discard(engine)
            self._lost(engine, f"dead once more: {error}")
        except Exception as error:
            self._broken = ValueError(f"engine {engine} does not start again: {error}")
            self._started[engine].set()
        finally:
            self._unsynced.discard(engine)
            self._wake()

    async def _take_back(self, engine: int) -> bool:
        """Whether an engine that was out of use serves again: it must have got weights since it was started anew."""
        info = await asyncio.wait_for(self.engines[engine].info(), self._timeout)
        if self._syncs and info.weight_version < 0:
            return False
        if engine in self._unsynced:
            logger.warning("engine %d has weights %d and takes part again", engine, info.weight_version)
            self.infos[engine] = info
            self._unsynced.discard(engine)
            self._down.discard(engine)
            self._wake()
        return True

    def _wake(self) -> None:
        """Whoever waits for an engine looks again."""

        async def wake() -> None:
            async with self._room:
                self._room.notify_all()

        self._waking = asyncio.create_task(wake())
