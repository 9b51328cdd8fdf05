"""Tools that are Python functions. This file makes the JSON schemas of tools, calls tools, and has an environment with
only tools."""

from __future__ import annotations

import inspect
import json
import time
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slimelite.base.threads import call
from slimelite.environments.protocol import Message, Row, Start, Step

# maximum length of a tool's result, so one result cannot fill the model's context [characters]
MOST_CHARACTERS = 20_000
KINDS: dict[object, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
}


@dataclass(frozen=True)
class Tool:
    """A plain or async function that the model may call. The function's name, docstring and annotations describe the
    tool to the model."""

    function: Callable[..., Any]

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.function.__name__

    @property
    def schema(self) -> dict[str, object]:
        """The definition of the tool for a model: its name, text and parameters, as OpenAI's API takes them."""
        hints = typing.get_type_hints(self.function)
        parameters = inspect.signature(self.function).parameters.values()
        properties = {p.name: {"type": _kind(hints.get(p.name, str))} for p in parameters}
        required = [p.name for p in parameters if p.default is p.empty]
        shape = {"type": "object", "properties": properties, "required": required}
        about = {"name": self.name, "description": inspect.getdoc(self.function) or "", "parameters": shape}
        return {"type": "function", "function": about}

    async def answer(self, arguments: str) -> str:
        """Call the function, and return the result as text. If the function raises an error, the text is the error, and
        the model may try again."""
        try:
            kwargs = json.loads(arguments or "{}")
            inspect.signature(self.function).bind(**kwargs)
            result = await call(self.function, **kwargs)
        except Exception as error:
            return f"Error: {type(error).__name__}: {error}"[:MOST_CHARACTERS]
        return (result if isinstance(result, str) else json.dumps(result, default=str))[:MOST_CHARACTERS]


def _kind(hint: object) -> str:
    """The JSON type of an annotation. The type is "string" if the annotation is unknown."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(member for member in typing.get_args(hint) if member is not type(None))
    return KINDS.get(typing.get_origin(hint) or hint, "string")


class ToolEnvironment:
    """An environment with tools. Calls are answered until a reply has no call. After the last reply, `score` gives the
    reward.

    ::

        class Weather(ToolEnvironment):
            def weather(self, town: str) -> str:
                '''The weather in a town now.'''
                return "rain"

            def tools(self):
                return [self.weather]

    Attributes:
        row: the row of the episode.
        calls: (name, arguments, result) of each call so far.
    """

    row: Row
    calls: list[tuple[str, str, str]]

    def tools(self) -> Sequence[Callable[..., Any]]:
        """The functions that the model may call."""
        return ()

    def score(self, content: str) -> float | Mapping[str, float] | None:  # noqa: ARG002  a subclass reads it
        """The reward of an episode that ends with ``content``. If the result is None, the run's reward function scores
        the episode."""
        return None

    def metrics(self) -> Mapping[str, float]:
        """Numbers to log at the end of an episode."""
        return {}

    def reset(self, row: Row) -> Start:
        """Return the row's messages and the tools."""
        self.row, self.calls = row, []
        self._tools = {tool.name: tool for tool in map(Tool, self.tools())}
        return Start(row.prompt, [tool.schema for tool in self._tools.values()])

    async def step(self, reply: Mapping[str, Any]) -> Step:
        """Answer every call of the reply. A reply without a call ends the episode."""
        messages: list[Message] = []
        seconds: list[float] = []
        for tool_call in reply.get("tool_calls") or ():
            name, arguments = tool_call["function"]["name"], tool_call["function"]["arguments"]
            tool = self._tools.get(name)
            known = ", ".join(self._tools)
            begin = time.monotonic()
            result = f"Error: there is no tool {name}, but {known}" if tool is None else await tool.answer(arguments)
            seconds.append(time.monotonic() - begin)
            self.calls.append((name, arguments, result))
            messages.append({"role": "tool", "tool_call_id": tool_call.get("id"), "name": name, "content": result})
        messages += [{"role": "user", "content": f"Error: {what}"} for what in reply.get("malformed") or ()]
        if messages and reply.get("finish_reason") != "length":
            return Step(messages, call_seconds=seconds)
        score, metrics = self.score(reply.get("content") or ""), self.metrics()
        return Step(messages, score, done=True, metrics=metrics, call_seconds=seconds)
