"""The HTTP client of everything here that asks a server: JSON there and back, tried again where that can help.

Proxies of the environment are left aside: what is asked are servers that the user, or the run, names.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import aiohttp

logger = logging.getLogger(__name__)

CONNECT_S = 10.0
# below the 5 s after which uvicorn closes a connection: a request never meets one that is just being closed
KEEP_ALIVE_S = 3.0
# refusals, besides 500 and above, after which the same request may be served
TRANSIENT = (408, 425, 429)
# of a server's words in a message
CHARACTERS = 500
# waits are spread by chance, without touching the random numbers that a run is repeated with
_chance = random.Random()


class HttpError(Exception):
    """A server did not do what it was asked; the message names the address and has the server's words."""


class NoAnswer(HttpError, ConnectionError):
    """Nobody answered, or the connection was lost."""


class Refused(HttpError, RuntimeError):
    """The server answered with an error, or with what is not JSON."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    @property
    def is_transient(self) -> bool:
        """Whether another attempt may end better."""
        return self.status in TRANSIENT or not 400 <= self.status < 500


@dataclass(frozen=True)
class Retry:
    """How often a request is sent: again after a lost connection, so that it must be one that may come twice.

    ``first_s``: wait before the second attempt, then twice as long each time, at most ``most_s``; up to half as long
    again by chance. ``refused``: also after an answer that says that the server is busy or broken.
    """

    attempts: int = 1
    first_s: float = 0.5
    most_s: float = 30.0
    refused: bool = False

    def again(self, error: HttpError, attempt: int) -> bool:
        """Whether ``error``, of attempt number ``attempt`` (from 1 on), is not the last word."""
        may = isinstance(error, NoAnswer) or (self.refused and isinstance(error, Refused) and error.is_transient)
        return may and attempt < self.attempts

    def wait_s(self, attempt: int) -> float:
        """Seconds after attempt number ``attempt``."""
        return min(self.first_s * 2.0 ** (attempt - 1), self.most_s) * _chance.uniform(1.0, 1.5)


class Client:
    """Requests on the event loop that asks first, over connections that are kept for the next one.

    ``timeout_s``: of one attempt; None: generation takes as long as it takes. ``connections``: at once; 0: any number.
    ``texts``: an answer that is not JSON is given as it is, instead of being an error.
    """

    def __init__(
        self, retry: Retry | None = None, timeout_s: float | None = None, connections: int = 0, *, texts: bool = False
    ) -> None:
        self._retry = retry or Retry()
        self._timeout_s, self._connections, self._texts = timeout_s, connections, texts
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
        self._session = None

    async def get(self, url: str) -> Any:
        """The answer to a GET; see `ask`."""
        return await self.ask("GET", url)

    async def post(self, url: str, body: Any, headers: Mapping[str, str] | None = None) -> Any:
        """The answer to a POST of ``body``; see `ask`."""
        return await self.ask("POST", url, body, headers)

    async def ask(self, method: str, url: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Any:
        """The answer, parsed; None where it is empty.

        Args:
            body: what is sent as JSON; bytes are JSON already.

        Raises:
            NoAnswer: nobody answers at that address.
            Refused: the server answers with an error.
        """
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **(headers or {})}
        attempt = 1
        while True:
            try:
                return await self._attempt(method, url, data, headers, attempt)
            except HttpError as error:
                if not self._retry.again(error, attempt):
                    raise
                wait = self._retry.wait_s(attempt)
                logger.info("%s; attempt %d of %d, again in %.1f s", error, attempt, self._retry.attempts, wait)
            await asyncio.sleep(wait)
            attempt += 1

    async def _attempt(
        self, method: str, url: str, data: bytes | None, headers: Mapping[str, str], attempt: int
    ) -> Any:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._connections, keepalive_timeout=KEEP_ALIVE_S),
                timeout=aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=CONNECT_S),
            )
        # as a file: a large body is sent piece by piece
        body = None if data is None else io.BytesIO(data)
        try:
            async with self._session.request(method, url, data=body, headers=headers) as answer:
                text, status = await answer.text(), answer.status
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            tries = f" in {attempt} attempts" if attempt > 1 else ""
            raise NoAnswer(f"{shown(url)} does not answer{tries}: {str(error) or type(error).__name__}") from error
        return _read(text, status, shown(url), self._texts)


def ask(method: str, url: str, body: Any = None, retry: Retry | None = None, timeout_s: float | None = None) -> Any:
    """One request of a caller without an event loop, who waits for the answer, JSON or text; see `Client.ask`."""

    async def once() -> Any:
        async with Client(retry, timeout_s, texts=True) as client:
            return await client.ask(method, url, body)

    return asyncio.run(once())


def shown(url: str) -> str:
    """``url`` as a message may have it: without the user, the password and the query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _read(text: str, status: int, url: str, texts: bool) -> Any:
    try:
        parsed = json.loads(text) if text else None
    except ValueError:
        if status < 400 and not texts:
            raise Refused(f"{url} answered, not with JSON: {text[:CHARACTERS]}", status) from None
        parsed = text
    if status < 400:
        return parsed
    error = parsed.get("error") if isinstance(parsed, dict) else None
    words = error.get("message") if isinstance(error, dict) else None
    raise Refused(f"{url} answered {status}: {words or text[:CHARACTERS]}", status)
