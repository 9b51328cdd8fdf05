"""The HTTP server of what we serve: JSON and server-sent events out, errors as JSON."""

from __future__ import annotations

import gzip
import io
import json
import logging
import zlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from aiohttp import web

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# what a request is answered with: an object, or server-sent events
Answer = dict[str, object] | AsyncGenerator[bytes]
# a stop waits so long for requests that run, and a client that is told to come again waits so long [s]
LAST_S, RETRY_S = 1.0, 1
# how a body that gzip packed begins, and no JSON
GZIP = b"\x1f\x8b"


class RequestError(ValueError):
    """A request that cannot be served: an HTTP ``status``, the ``param`` at fault, and OpenAI's ``code``."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


class Server(ABC):
    """A server in the event loop of whoever starts it; a subclass has `_routes`.

    ``most_bytes``: longer bodies are refused unread.
    """

    def __init__(self, most_bytes: int, host: str, port: int) -> None:
        self._most_bytes, self._host, self._port = most_bytes, host, port
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        """Listen, and return the base URL.

        Raises:
            OSError: the host is not an address of this machine, or the port is taken.
        """
        self._runner, url = await listen(self.application(), self._host, self._port, unpacks=False)
        return url

    async def stop(self) -> None:
        """Stop listening; requests that run are cancelled."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def application(self) -> web.Application:
        """What answers the requests, for a server of one's own."""
        app = web.Application(client_max_size=self._most_bytes, middlewares=[self._guarded])
        app.add_routes(self._routes())
        return app

    @abstractmethod
    def _routes(self) -> list[web.RouteDef]:
        """The endpoints and what answers them."""

    async def _handled(self, http: web.Request, handler: Handler) -> web.StreamResponse:
        """The answer of a request's handler; a subclass may refuse the request."""
        return await handler(http)

    def _described(self, http: web.Request, error: Exception, status: int) -> dict[str, Any]:  # noqa: ARG002
        """The JSON about an error."""
        return {"error": {"message": str(error)}}

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await self._handled(request, handler)
        except Exception as error:
            status = _status(error)
            headers = {"Retry-After": str(RETRY_S)} if status == 429 else None
            return web.json_response(self._described(request, error, status), status=status, headers=headers)

    async def _respond(self, http: web.Request, answer: Answer) -> web.StreamResponse:
        """Send an answer, events as they come. An error before the first one gets a status; a later one is an event."""
        if isinstance(answer, dict):
            return web.json_response(answer)
        async with aclosing(answer):
            first = await anext(answer)
            headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
            response = web.StreamResponse(headers=headers)
            await response.prepare(http)
            await response.write(first)
            try:
                async for event in answer:
                    await response.write(event)
            except (ConnectionResetError, ConnectionAbortedError):
                return response  # the client has gone
            except Exception as error:
                said = self._described(http, error, _status(error))
                await response.write(sse(said, said.get("type")))
            return response


async def listen(app: web.Application, host: str, port: int, *, unpacks: bool = True) -> tuple[web.AppRunner, str]:
    """Serve ``app`` from the running event loop; returns what stops it, and the base URL. Port 0 takes a free one.

    ``unpacks``: aiohttp unpacks bodies before a handler sees them; one that it cannot unpack never gets there, and is
    answered in plain text.

    Raises:
        OSError: the host is not an address of this machine, or the port is taken.
    """
    # when a client disconnects, its handler is cancelled, which aborts the request
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=LAST_S, auto_decompress=unpacks
    )
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    host, port = runner.addresses[0][:2]
    return runner, f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def sse(data: object, event: str | None = None) -> bytes:
    """A server-sent event."""
    body = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return (f"event: {event}\n" if event else "").encode() + f"data: {body}\n\n".encode(errors="replace")


async def read_json(http: web.Request) -> dict[str, Any]:
    """The body, a JSON object.

    Raises:
        RequestError: it is none, or longer than the limit.
    """
    try:
        data, most = await http.read(), http.client_max_size
        if data.startswith(GZIP):
            data = gzip.GzipFile(fileobj=io.BytesIO(data)).read(most + 1)
        if len(data) > most:
            raise web.HTTPRequestEntityTooLarge(most, len(data))
        body = json.loads(data)
    except web.HTTPRequestEntityTooLarge as error:
        message = f"the body is larger than the engine's context can need: {error.text}"
        raise RequestError(message, error.status) from error
    except web.RequestPayloadError as error:
        raise RequestError(f"the body does not arrive whole: {error}") from error
    except (ValueError, RecursionError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        encoding = http.headers.get("Content-Encoding")
        packed = f"; its Content-Encoding is {encoding:.20}, and gzip alone is read" if encoding else ""
        raise RequestError(f"the body is not JSON: {error}{packed}") from error
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, not {body!r:.60}")
    return body


def _status(error: Exception) -> int:
    """The HTTP status of an error; a mistake of ours is logged."""
    if isinstance(error, RequestError | web.HTTPException):
        return error.status
    for kind, status in ((LookupError, 404), (ValueError, 400), (ConnectionError, 503)):
        if isinstance(error, kind):
            return status
    logger.error("a request failed", exc_info=error)
    return 500
