"""The environment ``openenv:<address>``, which runs on an OpenEnv server. Each episode has its own WebSocket session.

The server lists the possible actions. If the actions are tools, the model calls them. If they are not tools, each reply
is an action in JSON. If an action requires only one field, and this field is a text, the reply may be only this text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from slimelite.base.http_client import Client, Conversation, shown
from slimelite.environments.protocol import Message, Row, Start, Step
from slimelite.environments.registry import is_address
from slimelite.environments.tools import MOST_CHARACTERS

# action names that show that the server has tools; an action is then a tool call
TOOL_ACTIONS = ("Action", "CallToolAction", "ListToolsAction")
# number of rows of an epoch; each row has another seed
EPISODES = 1000
# metadata key of these rows; the prompt of these rows is not shown to the model
OWN = "openenv"
NO_ROOM = "CAPACITY_REACHED"
# the server's error code for an action that it cannot read; the model may try again
UNREADABLE = "VALIDATION_ERROR"


class ServerError(Exception):
    """The server answered with an error. ``code``: the server's name for the error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"OpenEnv's server: {message} ({code})")
        self.code, self.message = code, message


class OpenEnv:
    """One session with the server. The server gives a reward for each step."""

    def __init__(self, address: str) -> None:
        self._address, self._client = address, Client()
        self._server: Conversation | None = None
        self._actions: dict[str, Any] = {}  # the JSON schema of an action
        self._field: str | None = None  # the only required field of an action, if it is a text
        self._tools: list[dict[str, Any]] = []

    async def reset(self, row: Row) -> Start:
        """Begin the episode. The entry ``reset`` in a row's metadata has further arguments for the server's reset."""
        schema = await self._client.get(f"{self._address}/schema")
        actions = schema.get("action") if isinstance(schema, dict) else None
        if not isinstance(actions, dict):
            raise ValueError(f"{shown(self._address)}/schema lists no actions; is this an OpenEnv server?")
        self._actions = actions
        needed, fields = self._actions.get("required", []), self._actions.get("properties", {})
        self._field = needed[0] if len(needed) == 1 and fields[needed[0]].get("type") == "string" else None
        self._server = await self._client.connect(self._address.replace("http", "ws", 1) + "/ws")
        begun = await self._ask("reset", {"seed": row.seed, **row.metadata.get("reset", {})})
        if self._actions.get("title") in TOOL_ACTIONS:
            listed = (await self._ask("step", {"type": "list_tools"})).get("observation")
            if not isinstance(listed, dict):
                raise ServerError("UNKNOWN", f"its answer to list_tools names no tools: {str(listed)[:200]}")
            self._tools = [
                {
                    "type": "function",
                    "function": {
                        "name": tool["name"],
                        "description": tool.get("description") or "",
                        "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
                    },
                }
                for tool in listed.get("tools", [])
            ]
        texts = [_text(begun.get("observation")), "" if self._tools else self._how()]
        prompt = [] if OWN in row.metadata else row.prompt
        text = "\n\n".join(filter(None, texts)) or ("" if prompt else "Begin.")
        return Start([*prompt, *([{"role": "user", "content": text}] if text else [])], self._tools)

    def _how(self) -> str:
        """The text that explains the actions to the model."""
        if self._field is not None:
            about = self._actions["properties"][self._field].get("description", "")
            return f"Your whole reply is the {self._field}{f': {about}' if about else ''}."
        return f"Reply with one action as JSON of this schema: {json.dumps(self._actions)}"

    async def step(self, reply: Mapping[str, Any]) -> Step:
        """Send the action, or each tool call, to the server. In an episode with tools, a reply without a tool call ends
        the episode."""
        if self._tools:
            return await self._called(reply)
        action = self._action(reply.get("content") or "")
        if action is None:
            return _again(f"Error: your reply is not an action. {self._how()}")
        try:
            result = await self._ask("step", action)
        except ServerError as error:
            if error.code != UNREADABLE:
                raise
            return _again(f"Error: {error.message}"[:MOST_CHARACTERS])
        messages = [{"role": "user", "content": _text(result.get("observation")) or "Go on."}]
        return Step(messages, _reward(result), done=bool(result.get("done")))

    def _action(self, text: str) -> dict[str, Any] | None:
        """The action in a reply. Returns None if the reply is not an action."""
        inner = text.strip().removeprefix("```json").removeprefix("```").removesuffix("```")
        try:
            action = json.loads(inner)
        except (ValueError, RecursionError):
            action = None
        if isinstance(action, dict):
            return action
        return None if self._field is None else {self._field: text.strip()}

    async def _called(self, reply: Mapping[str, Any]) -> Step:
        messages: list[Message] = [
            {"role": "user", "content": f"Error: {problem}"} for problem in reply.get("malformed", ())
        ]
        rewards, done = list[float](), False
        for call in reply.get("tool_calls") or ():
            wanted = call["function"]
            result = {} if done else await self._call(wanted["name"], wanted["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": _text(result.get("observation"))})
            rewards += [] if (reward := _reward(result)) is None else [reward]
            done = done or bool(result.get("done"))
        return Step(messages, sum(rewards) if rewards else None, done=done or not messages)

    async def _call(self, name: str, arguments: str) -> dict[str, Any]:
        try:
            values = json.loads(arguments or "{}")
            return await self._ask("step", {"type": "call_tool", "tool_name": name, "arguments": values})
        except (ValueError, RecursionError) as error:
            return {"observation": f"Error: the arguments are not JSON: {error}"}
        except ServerError as error:
            if error.code != UNREADABLE:
                raise
            return {"observation": f"Error: {error.message}"}

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        assert self._server is not None
        answer = await self._server.ask({"type": kind, "data": data})
        content = answer.get("data", {}) if isinstance(answer, dict) else None
        if not isinstance(content, dict):
            raise ServerError("UNKNOWN", f"its answer to {kind} is not an object with data: {str(answer)[:200]}")
        if answer.get("type") == "error":
            code = str(content.get("code"))
            more = "; the server allows fewer sessions (max_concurrent_envs) than the run has episodes at the same time"
            raise ServerError(code, f"{content.get('message')}{more if code == NO_ROOM else ''}")
        return dict(content)

    async def close(self) -> None:
        """Close the session, which also ends the environment on the server."""
        try:
            if self._server is not None:
                await self._server.close()
        finally:
            await self._client.close()


def _again(text: str) -> Step:
    return Step([{"role": "user", "content": text}], metrics={"unreadable_actions": 1.0})


def _reward(result: Mapping[str, Any]) -> float | None:
    reward = result.get("reward")
    return None if reward is None else float(reward)


def _text(observation: Any) -> str:
    """Convert an observation to text for the model. If the observation has only a text, the result is this text. For
    any other observation, the result is JSON."""
    if isinstance(observation, dict) and "tool_name" in observation:  # the result of a tool call
        error, result = observation.get("error"), observation.get("result")
        if error:
            return f"Error: {error.get('message') if isinstance(error, dict) else error}"[:MOST_CHARACTERS]
        if isinstance(result, dict) and isinstance(result.get("content"), list):
            parts = [part.get("text", f"({part.get('type')})") for part in result["content"] if isinstance(part, dict)]
            result = "\n".join(parts)
        observation = result
    if observation is None:
        return ""
    if isinstance(observation, dict):
        filled = [value for value in observation.values() if value not in (None, "", [], {})]
        if not filled:
            return ""
        observation = filled[0] if len(filled) == 1 and isinstance(filled[0], str) else observation
    text = observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)
    return text[:MOST_CHARACTERS]


def make(spec: str) -> Callable[[], OpenEnv]:
    """The factory of sessions with the server at the address ``spec``.

    Raises:
        ValueError: ``spec`` is not an address.
    """
    if not is_address(spec):
        example = "write the server's address, as in openenv:http://localhost:8000"
        raise ValueError(f"--environment openenv:{spec}: {example}")
    return lambda: OpenEnv(spec.rstrip("/"))


def rows(spec: str) -> Iterator[dict[str, Any]]:
    """Yield the same row many times, each time with another seed. The model sees only the messages of the server."""
    return ({"input": spec, "metadata": {OWN: True}} for _ in range(EPISODES))
