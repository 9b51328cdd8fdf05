"""Calls of an engine in another process travel many in one message, and each gets its own answer or error."""

import asyncio
from collections import Counter
from concurrent.futures import Future

import pytest

from slimelite.base.threads import LoopThread
from slimelite.cluster.batches import EngineDesk, remote_engine
from slimelite.cluster.remote import ClusterError, Remote
from slimelite.engines.protocol import EngineInfo, GenerateRequest, GenerateResult, SamplingParams
from tests.support.waiting import soon

GROUPS = 32


class Slow:
    """An engine whose request number n takes n/1000 s; it refuses requests called ``bad``."""

    def __init__(self):
        self.begun, self.cancelled, self.free = [], [], False

    async def generate(self, requests):
        for request in requests:
            if request.request_id == "bad":
                raise ValueError("request bad does not fit")
            if request.request_id == "gone":
                raise asyncio.CancelledError
        self.begun += [r.request_id for r in requests]
        try:
            await asyncio.sleep(max(len(r.input_ids) for r in requests) / 1000)
            while any(r.request_id == "held" for r in requests) and not self.free:
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.cancelled += [r.request_id for r in requests]
            raise
        return [GenerateResult(r.request_id, list(r.input_ids), [0.0], [7], "stop") for r in requests]

    async def info(self):
        return EngineInfo("slow", 7, 100, 8, seeds=True)

    async def end_weight_update(self):
        pass


class Wire(Remote[EngineDesk]):
    """A desk on an event loop of its own; counts the messages. ``dead``: the process is gone."""

    def __init__(self):
        self.name, self.thread, self.desk = "engine_0", LoopThread("engine"), EngineDesk(Slow())
        self.messages, self.dead = Counter(), False

    def start(self, method, /, *args, **kwargs):
        self.messages[method] += 1
        if self.dead:
            future = Future()
            future.set_exception(ClusterError("engine_0 died"))
            return future
        return self.thread.submit(getattr(self.desk, method)(*args, **kwargs))

    def cpu_seconds(self):
        raise NotImplementedError


@pytest.fixture
def wire():
    wire = Wire()
    yield wire
    wire.thread.close()


def request(name, tokens):
    return GenerateRequest(name, tuple(range(tokens)), SamplingParams(4))


def test_the_calls_of_one_turn_are_one_message_and_few_come_back(wire):
    engine = remote_engine(wire)

    async def rollout():
        return await asyncio.gather(
            *(engine.generate([request(f"{n}-{i}", n + 1) for i in range(2)]) for n in range(GROUPS))
        )

    answers = asyncio.run(rollout())
    assert [[r.request_id for r in results] for results in answers] == [[f"{n}-0", f"{n}-1"] for n in range(GROUPS)]
    assert all(r.output_ids == list(range(n + 1)) for n, results in enumerate(answers) for r in results)
    assert wire.messages["generate_batch"] == 1
    assert wire.messages.total() < GROUPS / 2
    assert not wire.desk._batches  # nothing stays behind


def test_a_short_call_does_not_wait_for_the_long_one_beside_it(wire):
    engine, ended = remote_engine(wire), []

    async def call(name):
        await engine.generate([request(name, 1)])
        ended.append(name)
        wire.desk._engine.free = True

    async def both():
        await asyncio.gather(call("held"), call("short"))

    asyncio.run(both())
    assert ended == ["short", "held"]
    assert wire.messages == {"generate_batch": 1, "fetch": 1}


def test_an_error_belongs_to_its_call_alone(wire):
    engine = remote_engine(wire)

    async def three():
        calls = [engine.generate([request(name, 3)]) for name in ("good", "bad", "fine")]
        return await asyncio.gather(*calls, return_exceptions=True)

    good, bad, fine = asyncio.run(three())
    assert (good[0].request_id, fine[0].request_id) == ("good", "fine")
    assert isinstance(bad, ValueError)
    assert "does not fit" in str(bad)
    assert not wire.desk._errors


def test_a_call_that_the_engine_cancels_is_lost_alone(wire):
    engine = remote_engine(wire)

    async def two():
        calls = [engine.generate([request(name, 3)]) for name in ("gone", "fine")]
        return await asyncio.gather(*calls, return_exceptions=True)

    gone, fine = asyncio.run(two())
    assert isinstance(gone, ConnectionError)
    assert fine[0].request_id == "fine"


def test_when_the_process_dies_every_call_says_so(wire):
    engine = remote_engine(wire)

    async def two():
        calls = [asyncio.ensure_future(engine.generate([request(str(n), n)])) for n in (1, 500)]
        await calls[0]
        wire.dead = True
        late = asyncio.ensure_future(engine.generate([request("late", 1)]))
        return await asyncio.gather(late, return_exceptions=True), calls[1]

    async def whole():
        (late,), long = await two()
        return late, (await asyncio.gather(long, return_exceptions=True))[0]

    late, long = asyncio.run(whole())
    assert isinstance(late, ConnectionError)
    assert isinstance(long, list)  # its message was on the way before the process died


def test_a_cancelled_caller_ends_its_own_call_and_leaves_the_others_alone(wire):
    engine = remote_engine(wire)

    async def two():
        first = asyncio.ensure_future(engine.generate([request("first", 60_000)]))
        second = asyncio.ensure_future(engine.generate([request("second", 50)]))
        await soon(lambda: "first" in wire.desk._engine.begun)
        first.cancel()
        await soon(lambda: wire.desk._engine.cancelled)
        return (await second)[0].request_id, (await engine.info()).name

    assert asyncio.run(two()) == ("second", "slow")
    assert wire.desk._engine.cancelled == ["first"]


def test_a_cancelled_rollout_leaves_nothing_behind(wire):
    engine = remote_engine(wire)

    async def rollout():
        calls = [asyncio.ensure_future(engine.generate([request(str(n), 60_000)])) for n in range(3)]
        await soon(lambda: len(wire.desk._engine.begun) == 3)
        others = asyncio.all_tasks() - {asyncio.current_task()}  # the exchange too, as RolloutManager.cancel does
        for task in others:
            task.cancel()
        await asyncio.wait(calls)

    asyncio.run(rollout())
    wire.thread.run(soon(lambda: len(wire.desk._engine.cancelled) == 3))
    assert not wire.desk._batches
    assert not wire.desk._errors
    assert sorted(wire.desk._engine.cancelled) == ["0", "1", "2"]


def test_a_batch_that_nobody_fetches_any_more_leaves_no_error_behind(wire):
    async def batch():
        assert await wire.desk.generate_batch((0, 0), [[request("bad", 1)]]) == [(0, None)]
        await wire.desk.cancel((0, 0))

    wire.thread.run(batch())
    assert not wire.desk._errors


def test_an_engine_that_was_started_again_serves_nothing_before_its_weights(wire):
    """Its process has those of the checkpoint, and samples of these would count as samples of the newest."""
    engine = remote_engine(wire)
    wire.desk = EngineDesk(Slow(), syncs=True)
    wire.desk.begin_again()

    async def again():
        assert (await engine.info()).weight_version == -1
        with pytest.raises(ConnectionError, match="waits for its weights"):
            await engine.generate([request("r", 1)])
        await engine.end_weight_update()
        assert (await engine.info()).weight_version == 7
        return await engine.generate([request("r", 1)])

    assert asyncio.run(again())[0].request_id == "r"


def test_a_restart_waits_until_the_process_answers_again(wire, monkeypatch):
    monkeypatch.setattr("slimelite.cluster.batches.POLL_S", 0.01)
    engine, wire.dead = remote_engine(wire), True

    async def back():
        with pytest.raises(ConnectionError, match="engine_0 died"):
            await engine.info()
        waiting = asyncio.ensure_future(engine.restart())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        wire.dead = False
        await asyncio.wait_for(waiting, 120)

    asyncio.run(back())
