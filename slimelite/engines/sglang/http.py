"""JSON over HTTP to one server, from whichever event loop asks."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp

CONNECT_S = 10.0
# below the 5 s after which uvicorn closes a connection: a request never meets one that is just being closed
KEEP_ALIVE_S = 3.0


class Http:
    """A pool of connections to ``url`` for each event loop that uses it; no request has a time limit of its own."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}

    async def get(self, path: str) -> Any:
        """The answer, parsed; raises as `post` does."""
        return await self._ask("GET", path, None)

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer, parsed if it is JSON.

        Raises:
            ConnectionError: nobody answers at that address.
            ValueError: the server says that the request is wrong.
            RuntimeError: the server fails otherwise.
        """
        return await self._ask("POST", path, body)

    async def close(self) -> None:
        """Close the connections of the running loop; those of a loop that has ended went with it."""
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        try:
            async with self._session().request(method, self.url + path, json=body) as answer:
                return _read(await answer.text(), answer.status, self.url + path)
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionError(f"{self.url}{path} does not answer: {error or type(error).__name__}") from error

    def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if loop not in self._sessions:
            self._sessions[loop] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            )
        return self._sessions[loop]


def _read(text: str, status: int, what: str) -> Any:
    if status == 200:
        return json.loads(text) if text[:1] in ("{", "[") else text
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = text[:500]
    raise (ValueError if status in (400, 422) else RuntimeError)(f"{what} answered {status}: {message}")
