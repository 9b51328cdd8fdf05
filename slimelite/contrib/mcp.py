"""The environment ``mcp:<command or url>``. The model may call the tools of an MCP server. The model's last reply is
the answer.

A command starts a new server for each episode, so episodes do not share the server's state. With an address, all
episodes use the same server, each over its own connection. This is cheaper, and suits servers without state.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slimelite.environments.protocol import Row, Start
from slimelite.environments.registry import is_address
from slimelite.environments.tools import MOST_CHARACTERS, Tool, ToolEnvironment
from slimelite.sandbox.registry import NO_WISHES, Launch, SandboxSettings, is_container, open_sandbox


@dataclass(frozen=True)
class ServerTool(Tool):
    """A tool of the server. ``about``: the tool's name, description and schema in OpenAI's form."""

    about: dict[str, object]

    @property
    def name(self) -> str:
        """The name of the tool on the server."""
        return str(self.about["name"])

    @property
    def schema(self) -> dict[str, object]:
        """The JSON schema in OpenAI's form."""
        return {"type": "function", "function": self.about}

    async def answer(self, arguments: str) -> str:
        """Call the tool, and return the text of its result, or the refusal if the server refuses the call. If the
        server is gone, the episode ends."""
        try:
            values = json.loads(arguments or "{}")
        except ValueError as error:
            return f"Error: the arguments are not JSON: {error}"
        if not isinstance(values, dict):
            return "Error: the arguments are not an object"
        result = await self.function(self.name, values)
        text = "\n".join(map(_shown, result.content))
        return f"{'Error: ' if result.is_error else ''}{text}"[:MOST_CHARACTERS]


def _shown(part: Any) -> str:
    """A part of a result as text. A resource becomes its address and its content. Other parts without text become the
    name of their kind."""
    if hasattr(part, "text"):
        return str(part.text)
    resource = getattr(part, "resource", part)  # an embedded resource, or a link to a resource
    if not (uri := getattr(resource, "uri", None)):
        return f"({part.type})"
    texts = (getattr(resource, name, None) for name in ("title", "description", "text"))
    return "\n".join([f"[{getattr(resource, 'name', None) or part.type}]({uri})", *filter(None, texts)])


class McpEnvironment(ToolEnvironment):
    """An episode with the tools of one server. The run's reward function scores the episode."""

    def __init__(self, server: object) -> None:
        self._server = server

    async def reset(self, row: Row) -> Start:  # type: ignore[override]  # the driver accepts async methods too
        """Connect to the server, and return the row's messages and the server's tools."""
        self.row, self.calls = row, []
        self._over = asyncio.Event()
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        # a connection must be closed by the task that opened it, but each call of an environment is a separate task
        self._connection = asyncio.create_task(self._connect(ready))
        client = await ready
        listed, page = await client.list_tools(), 1
        tools = list(listed.tools)
        while listed.next_cursor and page < 100:
            listed, page = await client.list_tools(cursor=listed.next_cursor), page + 1
            tools += listed.tools
        self._tools = {
            tool.name: ServerTool(
                client.call_tool,
                {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema},
            )
            for tool in tools
        }
        return Start(row.prompt, [tool.schema for tool in self._tools.values()])

    async def close(self) -> None:
        """Close the connection. If the server was started for this episode, end the server too."""
        if hasattr(self, "_connection"):
            self._over.set()
            await asyncio.wait([self._connection])

    async def _connect(self, ready: asyncio.Future[object]) -> None:
        from mcp import Client

        try:
            async with Client(self._server) as client:
                ready.set_result(client)
                await self._over.wait()
        except Exception as error:
            if ready.done():
                return  # the connection broke later, and calls will raise the error
            inner: BaseException = error
            while isinstance(inner, BaseExceptionGroup):
                inner = inner.exceptions[0]
            ready.set_exception(ConnectionError(f"the MCP server does not answer: {inner!r}"))


def make(spec: str, sandbox: SandboxSettings = NO_WISHES) -> Callable[[], McpEnvironment]:
    """The factory of episodes. ``spec`` is the address of a server, or a command that starts a server.

    Raises:
        ValueError: the program of the command does not exist.
    """
    from mcp import StdioServerParameters

    if is_address(spec):
        return lambda: McpEnvironment(spec)
    words = shlex.split(spec)
    # an image may contain the program
    if not words or (shutil.which(words[0]) is None and not is_container(sandbox.name)):
        raise ValueError(f"--environment mcp:{spec}: there is no program {words[0] if words else ''!r}")
    box = open_sandbox(sandbox)
    # keep all variables, because at its end the run finds its processes by one of them
    launch = Launch(words, dict(os.environ)) if box is None else box.launch(words, {}, None)
    server = StdioServerParameters(command=launch.words[0], args=launch.words[1:], env=launch.environment)
    return lambda: McpEnvironment(server)
