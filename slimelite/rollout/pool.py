"""The engines of a run behind one door: who is free, who has which address, which weights they hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from slimelite.engines.protocol import Engine, EngineInfo, GenerateRequest, GenerateResult
from slimelite.rollout.health import Health


class EnginePool:
    """Engines, the requests in flight on each, and the base URL of its HTTP front once somebody asked for it.

    ``concurrency``: requests in flight for each engine, on average; ``health``: which of them can be used.
    """

    def __init__(self, engines: Sequence[Engine], concurrency: int, health: Health | None = None) -> None:
        self.engines = list(engines)
        self.health = health or Health(self.engines)
        self.health.changed = self._engine_changed
        self.load = [0] * len(self.engines)
        self._concurrency = concurrency
        self._room = asyncio.Condition()
        self._calls: list[set[asyncio.Future[list[GenerateResult]]]] = [set() for _ in self.engines]
        self._urls: dict[int, asyncio.Task[str]] = {}

    @property
    def capacity(self) -> int:
        """Requests in flight on all engines together."""
        return self._concurrency * len(self.health.up)

    @property
    def infos(self) -> dict[int, EngineInfo]:
        """What each engine last said of itself."""
        return self.health.infos

    async def refresh(self) -> None:
        """Ask every engine for its limits and its weight version.

        Raises:
            ValueError: there is no engine, or one is gone for good.
        """
        if not self.engines:
            raise ValueError(
                "there is no engine to generate with; --debug-train-only needs --load-debug-rollout-data or SFT"
            )
        await asyncio.gather(*(self.health.check(engine) for engine in range(len(self.engines))))

    @property
    def weight_version(self) -> int:
        """The newest weights any engine holds."""
        return max(info.weight_version for info in self.infos.values())

    @asynccontextmanager
    async def lease(self, requests: int, engine: int | None = None, avoid: int | None = None) -> AsyncIterator[int]:
        """Wait until there is room for ``requests`` together and hold it; yields the engine that takes them.

        That is the one with the least to do, and not ``avoid`` if there is another. A given ``engine`` is taken at
        once, whatever its load, unless it is out of use. While all are, it waits for one.

        Raises:
            ValueError: an engine is gone for good.
        """
        if engine is None or engine in self.health.down:
            async with self._room:
                await self._room.wait_for(lambda: self.health.broken or self._has_room(requests))
                if self.health.broken:
                    raise self.health.broken
                up = self.health.up
                engine = min([i for i in up if i != avoid] or up, key=self.load.__getitem__)
                self.load[engine] += requests
        else:
            self.load[engine] += requests
        try:
            yield engine
        finally:
            async with self._room:
                self.load[engine] -= requests
                self._room.notify_all()

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
            if engine in self.health.down and not (task and task.cancelling()):
                raise ConnectionError(f"engine {engine} is gone") from None
            raise
        finally:
            self._calls[engine].discard(call)

    async def abort(self) -> None:
        """End everything in flight, on the engines that can."""
        await asyncio.gather(*(self._abort(i) for i in self.health.up if self.infos[i].capabilities.abort))

    async def _abort(self, engine: int) -> None:
        try:
            await self.engines[engine].abort()
        except ConnectionError:
            await self.health.check(engine)

    def _has_room(self, requests: int) -> bool:
        return bool(self.health.up) and (not any(self.load) or sum(self.load) + requests <= self.capacity)

    def _engine_changed(self, engine: int) -> None:
        """What waits for a dead engine's answers fails now, and what waits for an engine looks again."""
        if engine in self.health.down:
            for call in self._calls[engine]:
                call.cancel()
        self._waking = asyncio.create_task(self._wake())

    async def _wake(self) -> None:
        async with self._room:
            self._room.notify_all()

    async def url(self, engine: int) -> str:
        """Base URL of the engine's HTTP front, started when first asked for."""
        if engine not in self._urls:
            self._urls[engine] = asyncio.create_task(self._start_http(engine))
        return await self._urls[engine]

    async def _start_http(self, engine: int) -> str:
        info = self.infos.get(engine) or await self.engines[engine].info()
        return info.url or await self.engines[engine].start_http()
