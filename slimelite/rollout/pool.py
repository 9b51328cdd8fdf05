"""The engines of a run behind one door: who is free, who has which address, which weights they hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from slimelite.engines.protocol import Engine, EngineInfo, GenerateRequest, GenerateResult


class EnginePool:
    """Engines, the requests in flight on each, and the base URL of its HTTP front once somebody asked for it.

    ``concurrency``: requests in flight for each engine, on average.
    """

    def __init__(self, engines: Sequence[Engine], concurrency: int) -> None:
        self.engines = list(engines)
        self.capacity = concurrency * len(self.engines)
        self.load = [0] * len(self.engines)
        self.infos: list[EngineInfo] = []
        self._room = asyncio.Condition()
        self._urls: dict[int, asyncio.Task[str]] = {}

    async def refresh(self) -> None:
        """Ask every engine for its limits and its weight version.

        Raises:
            ValueError: there is no engine.
        """
        if not self.engines:
            raise ValueError(
                "there is no engine to generate with; --debug-train-only needs --load-debug-rollout-data or SFT"
            )
        self.infos = list(await asyncio.gather(*(e.info() for e in self.engines)))

    @property
    def weight_version(self) -> int:
        """The newest weights any engine holds."""
        return max(info.weight_version for info in self.infos)

    @asynccontextmanager
    async def lease(self, requests: int, engine: int | None = None, avoid: int | None = None) -> AsyncIterator[int]:
        """Wait until there is room for ``requests`` together and hold it; yields the engine that takes them.

        That is the one with the least to do, and not ``avoid`` if there is another. A given ``engine`` is taken at
        once, whatever its load.
        """
        if engine is None:
            async with self._room:
                await self._room.wait_for(lambda: not any(self.load) or sum(self.load) + requests <= self.capacity)
                others = [i for i in range(len(self.engines)) if i != avoid or len(self.engines) == 1]
                engine = min(others, key=self.load.__getitem__)
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
        """The requests, in order, on one engine."""
        return await self.engines[engine].generate(requests) if requests else []

    async def abort(self) -> None:
        """End everything in flight, on the engines that can."""
        await asyncio.gather(
            *(e.abort() for e, info in zip(self.engines, self.infos, strict=True) if info.capabilities.abort)
        )

    async def url(self, engine: int) -> str:
        """Base URL of the engine's HTTP front, started when first asked for."""
        if engine not in self._urls:
            self._urls[engine] = asyncio.create_task(self._start_http(engine))
        return await self._urls[engine]

    async def _start_http(self, engine: int) -> str:
        info = self.infos[engine] if self.infos else await self.engines[engine].info()
        return info.url or await self.engines[engine].start_http()
