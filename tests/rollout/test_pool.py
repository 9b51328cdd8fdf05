"""Engines that die and come back, with an engine whose life the test decides."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from slimelite.engines.protocol import EngineInfo, EngineLostError, GenerateRequest, GenerateResult, SamplingParams
from slimelite.rollout import pool as pool_module
from slimelite.rollout.pool import EnginePool
from tests.rollout.scripted import ScriptedEngine
from tests.support.waiting import soon


class Mortal(ScriptedEngine):
    """Dead while ``alive`` is not set; the first ``hang`` calls of `generate` never end."""

    def __init__(self, hang: int = 0) -> None:
        super().__init__()
        self.alive = True
        self.hang = hang
        self.restarts = 0
        self.may_start = asyncio.Event()

    async def info(self) -> EngineInfo:
        if not self.alive:
            raise ConnectionError("nobody is there")
        return await super().info()

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        if self.hang:
            self.hang -= 1
            await asyncio.Event().wait()
        if not self.alive:
            raise ConnectionError("nobody is there")
        return await super().generate(requests)

    async def restart(self) -> None:
        await self.may_start.wait()
        self.alive, self.version = True, -1
        self.restarts += 1


def request() -> GenerateRequest:
    return GenerateRequest("r", (20, 21), SamplingParams(max_new_tokens=5))


def make_pool(engines: list[Mortal], **options: bool) -> EnginePool:
    return EnginePool(engines, 8, **{"restarts": True, **options})


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "POLL_S", 0.01)


@pytest.mark.chaos
def test_what_waits_on_a_dead_engine_fails_and_goes_elsewhere() -> None:
    async def scenario() -> None:
        engines = [Mortal(hang=1), Mortal()]
        pool = make_pool(engines)
        await pool.refresh()
        stuck = asyncio.create_task(pool.generate(0, [request()]))
        await asyncio.sleep(0)
        engines[0].alive = False
        await pool.check(0)
        with pytest.raises(ConnectionError, match="engine 0"):
            await stuck
        assert pool.capacity == 8
        for wanted in (None, 0):
            async with pool.lease(1, wanted) as engine:
                assert engine == 1
                assert len(await pool.generate(engine, [request()])) == 1

    asyncio.run(scenario())


@pytest.mark.chaos
def test_a_restarted_engine_serves_only_after_a_sync(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        engines = [Mortal(), Mortal()]
        pool = make_pool(engines)
        await pool.refresh()
        engines[0].alive = False
        await pool.check(0)
        settled = asyncio.create_task(pool.settle())
        await asyncio.sleep(0.05)
        assert not settled.done()
        engines[0].may_start.set()
        await settled
        await asyncio.sleep(0.05)
        assert pool.up == [1]
        assert not pool.needs_weights, "the other engine goes on"
        engines[0].version = 3
        await soon(lambda: pool.up == [0, 1])

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert "engine 0 has died: nobody is there" in caplog.text
    assert "engine 0 has weight version 3" in caplog.text


@pytest.mark.chaos
def test_an_engine_with_weights_is_back_for_the_very_next_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "POLL_S", 1000.0)

    async def scenario() -> None:
        engines = [Mortal(), Mortal()]
        pool = make_pool(engines)
        await pool.refresh()
        engines[0].may_start.set()
        for restarts in (1, 2):
            engines[0].alive = False
            await pool.check(0)
            await pool.settle()
            engines[0].version = restarts
            assert pool.up == [1]
            await pool.refresh()
            assert pool.up == [0, 1]
            assert pool.infos[0].weight_version == engines[0].restarts == restarts

    asyncio.run(scenario())


@pytest.mark.chaos
def test_a_restart_that_fails_once_is_tried_again() -> None:
    class Shaky(Mortal):
        async def restart(self) -> None:
            if self.restarts == 0:
                self.restarts += 1
                raise ConnectionResetError("died while it started")
            await super().restart()

    async def scenario() -> None:
        engines = [Shaky(), Shaky()]
        pool = make_pool(list(engines))
        await pool.refresh()
        engines[0].alive = False
        engines[0].may_start.set()
        await pool.check(0)
        await asyncio.wait_for(pool.settle(), 120)
        assert pool.deaths[0] == 2

    asyncio.run(scenario())


@pytest.mark.chaos
def test_the_last_engine_is_waited_for_and_asks_for_weights() -> None:
    async def scenario() -> None:
        engines = [Mortal()]
        pool = make_pool(engines)
        await pool.refresh()
        engines[0].alive = False
        await pool.check(0)

        async def take() -> int:
            async with pool.lease(1, avoid=0) as engine:
                return engine

        waiting = asyncio.create_task(take())
        engines[0].may_start.set()
        await soon(lambda: pool.needs_weights)
        assert not waiting.done()
        engines[0].version = 1
        assert await asyncio.wait_for(waiting, 120) == 0
        assert not pool.needs_weights

    asyncio.run(scenario())


@pytest.mark.chaos
def test_an_engine_whose_process_is_a_new_one_is_found_by_its_weights() -> None:
    """Ray has started it again before anybody missed it."""

    async def scenario() -> None:
        engines = [Mortal(), Mortal()]
        pool = make_pool(engines)
        await pool.refresh()
        engines[0].version = -1
        await pool.refresh()
        assert pool.up == [1]
        engines[0].may_start.set()
        await soon(lambda: engines[0].restarts)
        engines[0].version = 2
        await soon(lambda: pool.up == [0, 1])

    asyncio.run(scenario())


@pytest.mark.chaos
def test_without_restarts_a_death_is_an_error_and_too_many_are_too() -> None:
    async def scenario() -> None:
        engines = [Mortal()]
        pool = make_pool(engines, restarts=False)
        engines[0].alive = False
        with pytest.raises(EngineLostError, match="with --launcher ray the run would restart it"):
            await pool.refresh()
        pool = make_pool(engines, syncs=False)
        engines[0].may_start.set()
        for death in range(pool_module.MOST_DEATHS + 1):
            engines[0].alive = False
            await pool.check(0)
            if death < pool_module.MOST_DEATHS:
                await soon(lambda: pool.up)
        with pytest.raises(EngineLostError, match="engine 0 cannot be restarted"):
            await pool.settle()
        with pytest.raises(EngineLostError, match="engine 0 cannot be restarted"):
            async with pool.lease(1):
                pass

    asyncio.run(scenario())


@pytest.mark.chaos
def test_the_watch_finds_an_engine_that_nobody_asks() -> None:
    async def scenario() -> None:
        engines = [Mortal(), Mortal()]
        pool = EnginePool(engines, 8, restarts=True, interval=0.01, timeout=1.0)
        await pool.refresh()
        await pool.watch()
        engines[1].alive = False
        await soon(lambda: pool.up == [0])
        await pool.rest()

    asyncio.run(scenario())
