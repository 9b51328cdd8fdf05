"""The HTTP client for all requests to servers. The client sends and reads JSON, and retries failed requests.

The client ignores the proxies of the environment variables, because the servers belong to the run or were named by the
user.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import random
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import aiohttp

logger = logging.getLogger(__name__)

CONNECT_S = 10.0
# uvicorn closes an idle connection after 5 s; with a shorter time, no request uses a connection that is being closed
KEEP_ALIVE_S = 3.0
# statuses below 500 after which the same request may succeed
TRANSIENT = (408, 425, 429)
# size limit of one WebSocket message
MESSAGE_BYTES = 100 << 20
# length limit for a server's text in an error message
CHARACTERS = 500
# random numbers for waits; the global generator is not used, so runs stay reproducible
_chance = random.Random()


class HttpError(Exception):
    """A request failed. The message has the address and the server's text."""


class NoAnswer(HttpError, ConnectionError):
    """No server answered, or the connection was lost."""


class Refused(HttpError, RuntimeError):
    """The server answered with an error, or with text that is not JSON."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    @property
    def is_transient(self) -> bool:
        """Whether another attempt may succeed."""
        return self.status in TRANSIENT or not 400 <= self.status < 500


@dataclass(frozen=True)
class Retry:
    """When and how often a request is sent again. After a lost connection, the server may receive a request twice.

    ``first_s``: the wait before the second attempt. Each wait is twice as long as the wait before, up to ``most_s``. A
    random share of 0 to 50 % of the wait is added. ``refused``: also retry after a transient error, for example from a
    busy server.
    """

    attempts: int = 1
    first_s: float = 0.5
    most_s: float = 30.0
    refused: bool = False

    def again(self, error: HttpError, attempt: int) -> bool:
        """Whether to retry after ``error`` in attempt number ``attempt``, counted from 1."""
        may = isinstance(error, NoAnswer) or (self.refused and isinstance(error, Refused) and error.is_transient)
        return may and attempt < self.attempts

    def wait_s(self, attempt: int) -> float:
        """Seconds to wait after attempt number ``attempt``."""
        return min(self.first_s * 2.0 ** (attempt - 1), self.most_s) * _chance.uniform(1.0, 1.5)


class Conversation:
    """JSON messages over a WebSocket. Each message gets one answer."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, name: str) -> None:
        self._socket, self._name = socket, name

    async def ask(self, message: object) -> Any:
        """Send ``message`` and return the parsed answer.

        Raises:
            NoAnswer: the connection is lost.
            Refused: the answer is not JSON.
        """
        import aiohttp

        try:
            await self._socket.send_json(message)
            answer = await self._socket.receive()
        except (aiohttp.ClientError, OSError) as error:
            raise NoAnswer(f"{self._name} does not answer: {str(error) or type(error).__name__}") from error
        if answer.type != aiohttp.WSMsgType.TEXT:
            raise NoAnswer(f"{self._name} ended the connection")
        return _read(answer.data, 200, self._name, texts=False)

    async def close(self) -> None:
        """End the connection."""
        await self._socket.close()


class Client:
    """Sends requests over connections that stay open. All requests use the event loop of the first request.

    ``timeout_s``: the time limit of one attempt. For generation, this must be None, which means no limit.
    ``connections``: the maximum number of connections at once. 0 means no limit. ``texts``: return an answer that is
    not JSON as text, instead of raising an error.
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

    async def post(self, url: str, body: object, headers: Mapping[str, str] | None = None) -> Any:
        """The answer to a POST of ``body``; see `ask`."""
        return await self.ask("POST", url, body, headers)

    async def ask(self, method: str, url: str, body: object = None, headers: Mapping[str, str] | None = None) -> Any:
        """Send a request and return the parsed answer; None if the answer is empty.

        Args:
            body: sent as JSON; bytes are sent unchanged, because they are JSON already.

        Raises:
            NoAnswer: no server answers at that address.
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
                logger.info("%s; attempt %d of %d, next attempt in %.1f s", error, attempt, self._retry.attempts, wait)
            await asyncio.sleep(wait)
            attempt += 1

    async def events(self, url: str, body: Any, headers: Mapping[str, str] | None = None) -> AsyncGenerator[Any]:
        """POST ``body``, and yield the parsed server-sent events of the answer up to "[DONE]".

        Raises:
            NoAnswer: no server answers, or the connection is lost before the end.
            Refused: the server answers with an error, or with something other than events.
        """
        import aiohttp

        headers, ended = {"Content-Type": "application/json", **(headers or {})}, False
        data = io.BytesIO(json.dumps(body).encode())
        try:
            async with self._opened().post(url, data=data, headers=headers) as answer:
                if answer.content_type != "text/event-stream":
                    _read(await answer.text(), answer.status, shown(url), texts=False)
                    raise Refused(f"{shown(url)} answered without a stream of events", answer.status)
                rest = b""
                async for piece in answer.content.iter_any():
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in lines:
                        ended = ended or line.strip() == b"data: [DONE]"
                        if line.startswith(b"data: ") and not ended:
                            yield json.loads(line[len(b"data: ") :])
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise NoAnswer(f"{shown(url)} does not answer: {str(error) or type(error).__name__}") from error
        if not ended:
            raise NoAnswer(f"{shown(url)} ended its answer too early")

    async def connect(self, url: str) -> Conversation:
        """Open a WebSocket to ``url``.

        Raises:
            NoAnswer: no server answers at the address, or the answer is not a WebSocket.
        """
        import aiohttp

        try:
            socket = await self._opened().ws_connect(url, max_msg_size=MESSAGE_BYTES)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise NoAnswer(f"{shown(url)} does not answer: {str(error) or type(error).__name__}") from error
        return Conversation(socket, shown(url))

    def _opened(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._connections, keepalive_timeout=KEEP_ALIVE_S),
                timeout=aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=CONNECT_S),
            )
        return self._session

    async def _attempt(
        self, method: str, url: str, data: bytes | None, headers: Mapping[str, str], attempt: int
    ) -> object:
        import aiohttp

        # a file object, so that a large body is sent in pieces
        body = None if data is None else io.BytesIO(data)
        try:
            async with self._opened().request(method, url, data=body, headers=headers) as answer:
                text, status = await answer.text(), answer.status
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            tries = f" in {attempt} attempts" if attempt > 1 else ""
            raise NoAnswer(f"{shown(url)} does not answer{tries}: {str(error) or type(error).__name__}") from error
        return _read(text, status, shown(url), self._texts)


def ask(method: str, url: str, body: object = None, retry: Retry | None = None, timeout_s: float | None = None) -> Any:
    """Send one request from code without an event loop, and return the answer. An answer that is not JSON is returned
    as text (see ``texts`` of `Client`)."""

    async def once() -> object:
        async with Client(retry, timeout_s, texts=True) as client:
            return await client.ask(method, url, body)

    return asyncio.run(once())


def shown(url: str) -> str:
    """``url`` in a form for messages: without user, password and query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _read(text: str, status: int, url: str, texts: bool) -> object:
    try:
        parsed = json.loads(text) if text else None
    except ValueError:
        if status < 400 and not texts:
            raise Refused(f"{url} answered with text that is not JSON: {text[:CHARACTERS]}", status) from None
        parsed = text
    if status < 400:
        return parsed
    error = parsed.get("error") if isinstance(parsed, dict) else None
    words = error.get("message") if isinstance(error, dict) else None
    raise Refused(f"{url} answered {status}: {words or text[:CHARACTERS]}", status)
