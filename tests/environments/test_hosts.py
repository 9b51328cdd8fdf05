"""Environments in the process, in worker processes and behind an address: the same answers; failures are bounded."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import AsyncMock

import aiohttp
import pytest
from aiohttp import web

from slimelite.base.http_server import listen
from slimelite.environments.hosts import EnvironmentFailure, Host, load
from slimelite.environments.protocol import Row, Step
from slimelite.environments.serve import serve
from slimelite.environments.tools import Tool
from tests.environments.acted import ASKED, Echo, Weather, called

ECHO = f"{Path(__file__).with_name('acted.py')}:Echo"
ROW = Row([{"role": "user", "content": "hello"}], "7", {"x": [1]}, 5)
PATIENT = {"call_seconds": 120.0, "seconds": 180.0}  # a test of a hang shortens it, for the call that hangs
STARTED = '{"id": "1", "messages": [{"role": "user", "content": "a"}]}'


def played(environment: str, play: Callable[[Host], Awaitable[None]], processes: int = 0) -> None:
    """Run ``play`` with a host of ``environment``, whose calls have the time `PATIENT`."""

    async def run() -> None:
        host = Host(environment, processes=processes, **PATIENT)
        try:
            await play(host)
        finally:
            await host.close()

    asyncio.run(run())


async def check_echo(host: Host) -> None:
    """Assert that an episode of `Echo` at ``host`` sees its row, answers, scores and ends, within its time."""
    began = time.monotonic()
    live = await host.open()
    start = await live.reset(ROW)
    assert list(start.messages) == [{"role": "user", "content": "hello"}, {"role": "user", "content": "seed 5"}]
    await live.step({"content": "loud"})  # more than a pipe holds
    step = await live.step({"content": "end"})
    assert step == Step([{"role": "user", "content": "end"}], {"a": 1.0, "b": 0.5}, done=True, metrics={"n": 1})
    await live.close()
    assert 0 < live.spent < time.monotonic() - began


@pytest.mark.parametrize("processes", [0, 1])
def test_an_episode_is_the_same_here_and_in_a_process_of_its_own(processes: int) -> None:
    played(ECHO, check_echo, processes)


def test_behind_an_address() -> None:
    async def run() -> None:
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        server = asyncio.create_task(serve(Echo, "127.0.0.1", 0, ready.set_result))
        host = Host(await ready, **PATIENT)
        await check_echo(host)
        live = await host.open()
        await live.reset(ROW)
        with pytest.raises(EnvironmentFailure, match=r"LookupError: no such thing \(.*acted.py, line \d+, in step\)"):
            await live.step({"content": "raise"})
        live._environment._id = "x"  # type: ignore[union-attr]
        with pytest.raises(EnvironmentFailure, match="there is no episode 'x'; was the server restarted"):
            await live.step({"content": "end"})
        await host.close()
        server.cancel()
        gone = Host("http://127.0.0.1:9", **PATIENT)
        with pytest.raises(EnvironmentFailure, match="does not answer") as raised:
            await (await gone.open()).reset(ROW)
        assert raised.value.kind == "crash"
        await gone.close()

    asyncio.run(run())


REQUEST = {"row": {"prompt": ROW.prompt}}


@pytest.mark.parametrize("key", [None, "secret"])
def test_a_page_of_another_site_and_whoever_has_no_key_are_refused(key: str | None) -> None:
    """An environment may run what it is sent."""

    async def run() -> None:
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        server = asyncio.create_task(serve(Echo, "127.0.0.1", 0, ready.set_result, key))
        url = await ready
        host = Host(url, **PATIENT)
        await check_echo(host)
        await host.close()
        bare = url.replace(":secret@", "")
        async with aiohttp.ClientSession() as http:
            for headers, with_a_key, without in (
                ({}, 401, 200),
                ({"Origin": "https://example.org"}, 401, 403),
                ({"Origin": "http://localhost:3000"}, 401, 200),
                ({"Host": "example.org"}, 401, 403),
                ({"Authorization": "Bearer secret"}, 200, 200),
                ({"x-api-key": "other"}, 401, 200),
                ({"Authorization": "Basic !"}, 401, 200),
            ):
                for path in ("/reset", "/step", "/close"):
                    async with http.post(bare + path, json=REQUEST, headers=headers) as answer:
                        allowed = answer.status not in (401, 403)
                        assert (200 if allowed else answer.status) == (with_a_key if key else without), (path, headers)
            async with http.get(bare + "/health") as answer:
                assert answer.status == 200
        server.cancel()

    asyncio.run(run())


def test_workers_ask_for_the_key_that_the_run_alone_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENVIRONMENT_API_KEY", "known to others")

    async def play(host: Host) -> None:
        await check_echo(host)
        _, _, address = host._workers[0].url.rpartition("@")
        for headers in ({}, {"Authorization": "Bearer known to others"}):
            async with (
                aiohttp.ClientSession() as http,
                http.post(f"http://{address}/reset", json=REQUEST, headers=headers) as answer,
            ):
                assert answer.status == 401

    played(ECHO, play, processes=1)


def test_other_machines_are_let_in_with_a_key_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ENVIRONMENT_API_KEY", raising=False)
    command = [sys.executable, "-m", "slimelite.environments.serve", "calculator", "--host", "0.0.0.0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        "--host 0.0.0.0 accepts connections from other machines: put a key into ENVIRONMENT_API_KEY, "
        "or listen on 127.0.0.1\n"
    )


@pytest.mark.parametrize(
    ("reset", "step", "message"),
    [
        ('{"messages": []}', "", "answered without an id"),
        ("[1]", "", r"answered \[1\], which is not a Start"),
        ("hello", "", "answered 'hello', which is not a Start"),
        (STARTED, '{"reword": 1}', "answered {'reword': 1}, which is not a Step .*'reword'"),
        (STARTED, '{"reward": 1, "done": true}', None),
    ],
)
def test_a_server_may_say_anything(reset: str, step: str, message: str | None) -> None:
    async def run() -> None:
        app = web.Application()
        for path, text in (("/reset", reset), ("/step", step), ("/close", "bye")):
            app.router.add_post(path, AsyncMock(side_effect=lambda _, text=text: web.Response(text=text)))
        runner, url = await listen(app, "127.0.0.1", 0)
        host = Host(url, **PATIENT)
        live = await host.open()
        with pytest.raises(EnvironmentFailure, match=message) if message else nullcontext() as raised:
            await live.reset(ROW)
            assert await live.step({"content": "x"}) == Step(reward=1, done=True)
        assert raised is None or raised.value.kind == "invalid"
        await live.close()
        await host.close()
        await runner.cleanup()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("said", "kind", "message"),
    [
        ("raise", "exception", r"LookupError: no such thing \(.*acted.py, line \d+, in step\)"),
        ("empty", "exception", r"RuntimeError: StopIteration\(\) \(.*acted.py, line \d+, in step\)"),
        ("hang", "timeout", r"step took longer than 2 s \(--environment-call-timeout\)"),
        ("wrong", "invalid", "step returned a dict, not a Step"),
        ("much", "invalid", "step returned a value that cannot be used: must be real number, not str"),
        ("over", "invalid", "step returned a value that cannot be used: done must be True or False, not 'false'"),
        ("whose", "invalid", r"step returned a value that cannot be used: the role must be text, not \['b'\]"),
        ("text", "invalid", "step returned a value that cannot be used: message 0 needs a role and a content, got 't'"),
    ],
)
def test_a_failure_is_one_message_and_bounded(said: str, kind: str, message: str) -> None:
    async def play(host: Host) -> None:
        live, other = await host.open(), await host.open()
        await asyncio.gather(live.reset(ROW), other.reset(ROW))
        host.call_seconds = 2.0 if kind == "timeout" else PATIENT["call_seconds"]
        bad = asyncio.create_task(live.step({"content": said}))
        await asyncio.sleep(0.05)
        host.call_seconds = PATIENT["call_seconds"]
        assert (await other.step({"content": "fine"})).messages  # while the first one hangs
        with pytest.raises(EnvironmentFailure, match=message) as raised:
            await bad
        assert raised.value.kind == kind

    played(ECHO, play)


def test_an_episode_begins_with_a_message() -> None:
    async def play(host: Host) -> None:
        with pytest.raises(
            EnvironmentFailure, match="reset returned a value that cannot be used: there is no message"
        ) as raised:
            await (await host.open()).reset(Row([]))
        assert raised.value.kind == "invalid"

    played(ECHO.replace("Echo", "Winner"), play)


@pytest.mark.parametrize("tool", [{"name": "f"}, {"type": "function", "function": {"name": None}}, "f", None])
def test_what_is_no_tool_is_said_beside_what_is_one(tool: object) -> None:
    async def play(host: Host) -> None:
        said = 'is not a tool; write a tool in the form {"type": "function", "function": {"name": ...}}'
        with pytest.raises(EnvironmentFailure, match=re.escape(f"{tool!r} {said}")) as raised:
            await (await host.open()).reset(replace(ROW, metadata={"tools": [tool]}))
        assert raised.value.kind == "invalid"

    played(ECHO, play)


def test_all_calls_of_an_episode_have_a_limit_together() -> None:
    async def play(host: Host) -> None:
        live = await host.open()
        await live.reset(ROW)
        live.spent = host.seconds - 0.1
        with pytest.raises(EnvironmentFailure, match=r"longer than 0.1 s \(--environment-timeout\)"):
            await live.step({"content": "hang"})

    played(ECHO, play)


@pytest.mark.chaos
def test_a_worker_that_dies_is_replaced() -> None:
    async def play(host: Host) -> None:
        live = await host.open()
        await live.reset(ROW)
        with pytest.raises(EnvironmentFailure) as raised:
            await live.step({"content": "die"})
        assert raised.value.kind == "crash"
        await check_echo(host)

    played(ECHO, play, processes=1)


@pytest.mark.chaos(
    "a server of environments behind an address stopped",
    "its sample is an error that names the address, after `--environment-call-timeout`",
)
def test_a_server_that_is_stopped_is_named_in_time() -> None:
    """One behind an address. A process of the run's own is replaced, even if it answers again for a moment: whoever
    looks for hangs lets it go on until it has written its stack, and then ends it."""

    async def play(host: Host) -> None:
        own = await host.open()
        await own.reset(ROW)
        server = host._workers[0]  # its address could be that of another machine's
        assert server._process is not None
        far = Host(server.url, **PATIENT)
        live = await far.open()
        await live.reset(ROW)
        far.call_seconds, host.call_seconds = 0.5, 2.0
        server._process.send_signal(signal.SIGSTOP)
        address = server.url.rpartition("@")[2]
        with pytest.raises(EnvironmentFailure, match=rf"^http://\S*{address}: step took longer than 0.5 s") as raised:
            await live.step({"content": "end"})
        assert raised.value.kind == "timeout"
        assert server.url not in str(raised.value), "it has the key"
        await far.close()
        asyncio.get_running_loop().call_later(host.call_seconds + 0.3, server._process.send_signal, signal.SIGCONT)
        with pytest.raises(EnvironmentFailure, match=r"^step took longer than 2 s") as raised:
            await own.step({"content": "end"})
        assert raised.value.lost, "so the episode is played once more"

    played(ECHO, play, processes=1)


def test_what_cannot_be_loaded_is_said() -> None:
    with pytest.raises(ValueError, match="there is no such environment"):
        load("nothing")
    with pytest.raises(ValueError, match="did you mean Echo"):
        load(ECHO + "o")

    async def play(host: Host) -> None:
        with pytest.raises(ValueError, match=r"does not start.*did you mean Echo"):
            await host.open()

    played(ECHO + "o", play, processes=1)


def test_a_syntax_error_is_said_with_its_own_line(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("class Echo:\n    pass\n  oops\n")
    with pytest.raises(ValueError, match="cannot load") as raised:
        load(f"{file}:Echo")
    assert "(broken.py, line 3)" in str(raised.value)
    assert "importlib" not in str(raised.value)


def test_functions_become_tools() -> None:
    shape = Tool(Weather().weather).schema["function"]
    assert shape["name"], shape["description"] == ("weather", "The weather in a town.")
    assert shape["parameters"] == {
        "type": "object",
        "properties": {"town": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["town"],
    }
    assert Tool(Weather().broken).schema["function"]["parameters"]["properties"] == {"where": {"type": "array"}}


def test_an_environment_of_tools_answers_calls_until_a_reply_has_none() -> None:
    async def run() -> None:
        weather = Weather()
        assert [tool["function"]["name"] for tool in weather.reset(ROW).tools] == ["weather", "broken"]
        calls = [
            called("weather", '{"town": "Bonn"}', 1),
            called("weather", '{"city": "Bonn"}', 2),
            called("broken", '{"where": ["x"]}', 3),
            called("snow", "{}", 4),
        ]
        step = await weather.step({**ASKED, "tool_calls": calls, "malformed": ["call 5 is not JSON"]})
        said = [message["content"] for message in step.messages]
        assert said[0] == '{"town": "Bonn", "days": 1}'
        assert said[1].startswith("Error: TypeError: missing a required argument: 'town'")
        assert said[2:] == [
            "Error: OSError: out of order ['x']",
            "Error: there is no tool snow, but weather, broken",
            "Error: call 5 is not JSON",
        ]
        assert [m.get("tool_call_id") for m in step.messages] == [*(f"call-{i}" for i in range(1, 5)), None]
        assert not step.done
        assert step.reward is None
        assert await weather.step({**ASKED, "content": "rain"}) == Step([], 4.0, done=True)

    asyncio.run(run())


@pytest.mark.parametrize("where", ["make", "reset", "step", "later"])
def test_an_environment_cannot_end_the_run_without_a_word(tmp_path: Path, where: str) -> None:
    """``os._exit(0)`` would end this process with success."""
    file = tmp_path / "quits.py"
    file.write_text(
        "import os\nfrom slimelite.environments.protocol import Start, Step\n"
        "class Quits:\n"
        f"    def __init__(self): {where == 'make'} and os._exit(0)\n"
        "    def reset(self, row):\n"
        f"        {where == 'reset'} and os._exit(0)\n"
        "        return Start([{'role': 'user', 'content': 'a'}])\n"
        "    async def step(self, reply):\n"
        f"        {where == 'step'} and os._exit(0)\n"
        "        return Step(done=True)\n"
    )

    async def play(host: Host) -> None:
        said = pytest.raises(EnvironmentFailure, match=r"a method called os._exit\(0\), which would end the run")
        with said if where != "later" else nullcontext():
            live = await host.open()
            await live.reset(ROW)
            await live.step({"content": "a"})
        child = os.fork()  # a child ends itself like this, and so may this process elsewhere
        if not child:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

    played(f"{file}:Quits", play)
