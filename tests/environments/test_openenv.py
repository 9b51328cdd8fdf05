"""``openenv:<address>`` against a server that speaks OpenEnv's protocol: a schema by HTTP, sessions by WebSocket."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from slimelite.data.reader import read_rows
from slimelite.environments.hosts import EnvironmentFailure
from slimelite.environments.protocol import Row
from tests.environments.test_adapters import calls, episode, said

GUESS = {
    "title": "GuessAction",
    "properties": {"metadata": {"type": "object"}, "guess": {"type": "string", "description": "a number"}},
    "required": ["guess"],
}
MOVE = {"title": "Move", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x", "y"]}
CALL = {"title": "CallToolAction", "properties": {"tool_name": {"type": "string"}}, "required": ["tool_name"]}
NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"name": "add", "description": "Add.", "input_schema": NUMBER}


def observed(observation: dict[str, Any], reward: object = None, done: bool = False) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}


def refused(code: str, message: str) -> dict[str, Any]:
    return {"type": "error", "data": {"code": code, "message": message}}


class Server:
    """Environments at /guess, /move, /tools and /full; ``open`` sessions now, and ``resets`` so far."""

    def __init__(self) -> None:
        self.open, self.resets = 0, list[dict[str, Any]]()

    async def schema(self, request: web.Request) -> web.Response:
        kinds = {
            "guess": GUESS,
            "move": MOVE,
            "tools": CALL,
            "full": GUESS,
            "list": GUESS,
            "none": GUESS,
            "hollow": CALL,
        }
        return web.json_response({"action": kinds.get(request.match_info["kind"])})

    async def session(self, request: web.Request) -> web.WebSocketResponse:
        socket, kind = web.WebSocketResponse(), request.match_info["kind"]
        await socket.prepare(request)
        self.open += 1
        state: dict[str, int] = {}
        async for message in socket:
            await socket.send_json(self.answer(kind, message.json(), state))
        self.open -= 1
        return socket

    def answer(self, kind: str, message: dict[str, Any], state: dict[str, int]) -> Any:
        data = message["data"]
        if kind == "list":
            return ["observation"]
        if kind in ("none", "hollow"):
            return observed(None)  # type: ignore[arg-type]
        if kind == "full":
            return refused("CAPACITY_REACHED", "no room")
        if message["type"] == "reset":
            self.resets.append(data)
            state["number"] = data["seed"] % 9
            return observed({"text": "Guess my number."} if kind == "guess" else {})
        if kind == "move":
            if set(data) != {"x", "y"}:
                return refused("VALIDATION_ERROR", "x and y, please")
            return refused("EXECUTION_ERROR", "broken") if data["x"] < 0 else observed({"at": data, "last": 1}, 0.25)
        if kind == "guess":
            right = data["guess"] == str(state["number"])
            return observed({"text": "right" if right else "no"}, right, done=right)
        if data == {"type": "list_tools"}:
            return observed({"tools": [ADD]})
        if data["tool_name"] != "add":
            return observed({"tool_name": "x", "error": {"message": "no such tool"}})
        state["sum"] = state.get("sum", 0) + data["arguments"]["a"]
        result = {"content": [{"type": "text", "text": str(state["sum"])}], "data": state["sum"]}
        return observed({"tool_name": "add", "result": result, "error": None}, 0.5)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Server]]:
    loop, ready, served = asyncio.new_event_loop(), threading.Event(), Server()
    addresses: list[str] = []

    async def begin() -> web.AppRunner:
        application = web.Application()
        application.router.add_get("/{kind}/schema", served.schema)
        application.router.add_get("/{kind}/ws", served.session)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        addresses.append(f"openenv:http://127.0.0.1:{runner.addresses[0][1]}")
        return runner

    runner = loop.run_until_complete(begin())
    thread = threading.Thread(target=lambda: (loop.call_soon(ready.set), loop.run_forever()))
    thread.start()
    ready.wait()
    yield addresses[0], served
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_a_reply_is_the_one_text_of_an_action(server: tuple[str, Server]) -> None:
    address, served = server
    row = Row([{"role": "system", "content": "Be brief."}], None, {"reset": {"hard": True}}, 14)
    start, steps = episode(f"{address}/guess", row, [said("4"), said('{"guess": "5"}')])
    assert served.resets[-1] == {"seed": 14, "hard": True}
    assert [message["content"] for message in start.messages] == [
        "Be brief.",
        "Guess my number.\n\nYour whole reply is the guess: a number.",
    ]
    assert [(step.messages[0]["content"], step.reward, step.done) for step in steps] == [
        ("no", 0.0, False),
        ("right", 1.0, True),
    ]
    end = time.monotonic() + 120
    while served.open:  # the session ends with the episode; the server may hear of it a moment later
        assert time.monotonic() < end
        time.sleep(0.01)


def test_other_actions_are_json(server: tuple[str, Server]) -> None:
    replies = [said("left"), said('```json\n{"x": 1}\n```'), said('{"x": 1, "y": 2}')]
    start, steps = episode(f"{server[0]}/move", Row([]), replies)
    assert start.messages[0]["content"].startswith('Reply with one action as JSON of this schema: {"title": "Move"')
    assert [step.metrics.get("unreadable_actions") for step in steps] == [1.0, 1.0, None]
    assert steps[1].messages[0]["content"] == "Error: x and y, please"
    assert (steps[2].messages[0]["content"], steps[2].reward) == ('{"at": {"x": 1, "y": 2}, "last": 1}', 0.25)
    with pytest.raises(EnvironmentFailure, match=r"broken \(EXECUTION_ERROR\)"):
        episode(f"{server[0]}/move", Row([]), [said('{"x": -1, "y": 2}')])


def test_tools_are_called_in_a_session(server: tuple[str, Server]) -> None:
    replies = [calls("add", '{"a": 2}'), calls("add", '{"a": 3}'), calls("add", '{"a"'), calls("sub", "{}"), said("5")]
    start, steps = episode(f"{server[0]}/tools", Row([{"role": "user", "content": "2+3?"}]), replies)
    assert [message["content"] for message in start.messages] == ["2+3?"]
    about = {"name": "add", "description": "Add.", "parameters": NUMBER}
    assert list(start.tools) == [{"type": "function", "function": about}]
    assert [step.messages[0]["content"][:30] for step in steps[:4]] == [
        "2",
        "5",
        "Error: the arguments are not J",
        "Error: no such tool",
    ]
    assert [step.reward for step in steps] == [0.5, 0.5, None, None, None]
    assert [step.done for step in steps] == [False] * 4 + [True]


def test_what_is_wrong_is_said(server: tuple[str, Server]) -> None:
    with pytest.raises(EnvironmentFailure, match="no room; the server allows fewer sessions"):
        episode(f"{server[0]}/full", Row([]), [])
    with pytest.raises(EnvironmentFailure, match="lists no actions; is this an OpenEnv server"):
        episode(f"{server[0]}/other", Row([]), [])
    with pytest.raises(EnvironmentFailure, match="9/schema does not answer"):
        episode("openenv:http://127.0.0.1:9", Row([]), [])
    with pytest.raises(ValueError, match="write the server's address"):
        episode("openenv:echo_env", Row([]), [])


def test_answers_of_another_form_are_refused_or_empty(server: tuple[str, Server]) -> None:
    with pytest.raises(EnvironmentFailure, match=r"its answer to reset is not an object with data: \['observation'\]"):
        episode(f"{server[0]}/list", Row([]), [])
    with pytest.raises(EnvironmentFailure, match="its answer to list_tools names no tools"):
        episode(f"{server[0]}/hollow", Row([]), [])
    start, steps = episode(f"{server[0]}/none", Row([]), [said("4")])
    assert start.messages[0]["content"].startswith("Your whole reply is the guess")
    assert steps[0].messages[0]["content"] == "Go on."


def test_rows_of_its_own_are_not_shown(server: tuple[str, Server]) -> None:
    rows = [row for _, row in read_rows(f"environment:{server[0]}/guess", ["input"], None)]
    assert len(rows) > 100
    row = Row([{"role": "user", "content": rows[0]["input"]}], None, rows[0]["metadata"])
    start, _ = episode(f"{server[0]}/guess", row, [])
    assert [message["content"][:16] for message in start.messages] == ["Guess my number."]
