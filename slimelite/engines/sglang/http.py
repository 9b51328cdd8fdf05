"""JSON over HTTP to one server, for whichever event loop asks."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine
from typing import Any

import aiohttp

CONNECT_S = 10.0
# below the 5 s after which uvicorn closes a connection: a request never meets one that is just being closed
KEEP_ALIVE_S = 3.0


class Http:
    """A pool of connections to ``url`` on a thread with an event loop of its own; no request has a time limit."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"http {url}", daemon=True)
        self._thread.start()

    async def get(self, path: str) -> Any:
        """The answer, parsed; raises as `post` does."""
        return await self._there(self._ask("GET", path, None))

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer, parsed if it is JSON.

        Raises:
            ConnectionError: nobody answers at that address.
            ValueError: the server says that the request is wrong.
            RuntimeError: the server fails otherwise.
        """
        return await self._there(self._ask("POST", path, body))

    async def close(self) -> None:
        """Close the connections, for good."""
        if self._session is not None:
            await self._there(self._session.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        self._loop.close()

    async def _there(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            )
        try:
            async with self._session.request(method, self.url + path, json=body) as answer:
                return _read(await answer.text(), answer.status, self.url + path)
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionError(f"{self.url}{path} does not answer: {error or type(error).__name__}") from error


def _read(text: str, status: int, what: str) -> Any:
    if status == 200:
        return json.loads(text) if text[:1] in ("{", "[") else text
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = text[:500]
    raise (ValueError if status in (400, 422) else RuntimeError)(f"{what} answered {status}: {message}")
