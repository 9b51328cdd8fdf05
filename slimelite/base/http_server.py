"""The base of our HTTP servers: access control, JSON and server-sent events, errors as JSON.

A client sends the key as a bearer token, in the header ``x-api-key``, or as the password of the address:
``http://:KEY@host:port``. A server without a key answers only requests from this machine. It also refuses requests
from pages of other sites, even if the browser runs on this machine.
"""

from __future__ import annotations

import asyncio
import binascii
import gzip
import hmac
import io
import ipaddress
import json
import logging
import zlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import aclosing, suppress
from typing import Any
from urllib.parse import urlsplit

from aiohttp import BasicAuth, web

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# the answer to a request: an object, or server-sent events
Answer = dict[str, object] | AsyncGenerator[bytes]
# time limits [s]: a stop waits this long for running requests; a client waits this long before it retries
LAST_S, RETRY_S = 1.0, 1
# time limits [s]: for the headers of a request after the connection, and for its body
HEAD_S, BODY_S = 75.0, 120.0
# a line of the access log: client, request line, status, bytes of the answer, seconds
LINE = '%a "%r" %s %b %Tf'
# a gzip-compressed body begins with these bytes, and JSON never does
GZIP = b"\x1f\x8b"


class RequestError(ValueError):
    """A request that cannot be served. ``status``: the HTTP status. ``param``: the name of the wrong parameter.
    ``code``: OpenAI's code.

    ``details``: more fields, which Anthropic's clients read in errors that these clients handle themselves.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        details: dict[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.details = status, param, code, details


class Server(ABC):
    """A server in the event loop of its caller. A subclass defines `_routes`.

    ``most_bytes``: longer bodies are refused without being read. ``key``: every request needs this key, except requests
    to the handlers of `_public`. None: requests need no key, but only this machine may send them. ``origins``: sites
    whose pages may send requests; "*" for all. The caller must set ``origins`` before `start`. ``logs``: write each
    request to the log ``slimelite.access``.
    """

    def __init__(self, most_bytes: int, host: str, port: int, key: str | None = None) -> None:
        self.key = key
        self.origins: frozenset[str] = frozenset()
        self.logs = False
        self._most_bytes, self._host, self._port = most_bytes, host, port
        self._runner: web.AppRunner | None = None
        self._answering: set[asyncio.Task[Any]] = set()
        self._drains = self._ends = False  # refuse new requests; end running requests with an error

    async def start(self) -> str:
        """Listen, and return the base URL.

        Raises:
            OSError: the host is not an address of this machine, or the port is taken.
        """
        log = logging.getLogger("slimelite.access") if self.logs else None
        self._runner, url = await listen(self.application(), self._host, self._port, unpacks=False, log=log)
        return url

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, and wait for running requests up to ``seconds``. Requests that still run after this time
        end with error 503."""
        self._drains = True
        if self._answering:
            await asyncio.wait(self._answering, timeout=seconds)
        self._ends = True
        for task in (running := set(self._answering)):
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=LAST_S)

    async def stop(self) -> None:
        """Stop listening. Running requests are cancelled."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def application(self) -> web.Application:
        """The aiohttp application that answers the requests, for use in another server."""
        app = web.Application(client_max_size=self._most_bytes, middlewares=[self._guarded])
        app.add_routes(self._routes())
        app.on_response_prepare.append(self._share)
        return app

    async def _share(self, http: web.Request, response: web.StreamResponse) -> None:
        """Allow a page of ``origins`` to read an answer (CORS)."""
        if self.origins:
            response.headers["Vary"] = "Origin"
            if self._is_shared(http):
                response.headers["Access-Control-Allow-Origin"] = http.headers["Origin"]
                response.headers["Access-Control-Expose-Headers"] = "Retry-After"

    def _is_shared(self, http: web.Request) -> bool:
        return bool({"*", http.headers.get("Origin")} & self.origins) and "Origin" in http.headers

    @abstractmethod
    def _routes(self) -> list[web.RouteDef]:
        """The endpoints and their handlers."""

    def _public(self) -> list[Handler]:
        """The handlers that answer without a key."""
        return [self._health]

    def _opens(self, http: web.Request, key: str) -> bool:  # noqa: ARG002
        """Whether ``key`` permits the request ``http``. A subclass may accept other keys."""
        return self.key is None or hmac.compare_digest(key.encode(errors="replace"), self.key.encode())

    async def _handled(self, http: web.Request, handler: Handler) -> web.StreamResponse:
        """The answer of a request's handler.

        Raises:
            RequestError: the key is wrong, or the server has no key and the page of another site sent the request.
        """
        if http.match_info.handler not in self._public():
            # without a key, the server serves only this machine, but a browser here may show a page of another site
            if self.key is None and not _is_asked_from_here(http, self.origins):
                raise RequestError("the server has no API key, so pages of other sites cannot use it: set a key", 403)
            if not self._opens(http, request_key(http)):
                raise RequestError("this request needs the server's API key", 401, code="invalid_api_key")
        return await handler(http)

    async def _health(self, _: web.Request) -> web.StreamResponse:
        return web.Response()

    def _described(self, http: web.Request, error: Exception, status: int) -> dict[str, Any]:  # noqa: ARG002
        """The JSON that describes an error."""
        return {"error": {"message": str(error)}}

    def _last(self, http: web.Request, described: dict[str, Any], written: int) -> bytes:  # noqa: ARG002
        """The event that ends a stream with an error. ``written``: the number of events that were sent before this
        event."""
        return sse(described, described.get("type"))

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method == "OPTIONS" and self._is_shared(request):  # a browser's preflight request
            names = request.headers.get("Access-Control-Request-Headers", "*")
            may = {"Access-Control-Allow-Methods": "GET, POST, DELETE", "Access-Control-Allow-Headers": names}
            return web.Response(status=204, headers={**may, "Access-Control-Max-Age": "600"})
        if (task := asyncio.current_task()) is not None and not self._drains:
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        try:
            if self._drains:
                raise self._stopping()
            return await self._handled(request, handler)
        except (Exception, asyncio.CancelledError) as error:
            problem = self._problem(error)
            status = _status(problem)
            headers = {"Retry-After": str(RETRY_S)} if status in (429, 503) else None
            return web.json_response(self._described(request, problem, status), status=status, headers=headers)

    def _problem(self, error: BaseException) -> Exception:
        """The error that a client sees. A request that `drain` cancelled gets the error 503."""
        if isinstance(error, asyncio.CancelledError):
            if not self._ends:
                raise error
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
            return self._stopping()
        assert isinstance(error, Exception)
        return error

    def _stopping(self) -> RequestError:
        return RequestError("the server is stopping: send the request again when the server is back", 503)

    async def _respond(self, http: web.Request, answer: Answer) -> web.StreamResponse:
        """Send an answer. Events are sent as they come. An error before the first event sets the status. A later error
        is sent as an event."""
        if isinstance(answer, dict):
            return web.json_response(answer)
        async with aclosing(answer):
            first = await anext(answer)
            headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
            response = web.StreamResponse(headers=headers)
            await response.prepare(http)
            await response.write(first)
            written = 1
            try:
                async for event in answer:
                    await response.write(event)
                    written += 1
            except (ConnectionResetError, ConnectionAbortedError):
                return response  # the client has disconnected
            except (Exception, asyncio.CancelledError) as error:
                problem = self._problem(error)
                await response.write(self._last(http, self._described(http, problem, _status(problem)), written))
            return response


def is_loopback(host: str) -> bool:
    """Whether ``host``, a name or an address, is a loopback address of this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_asked_from_here(http: web.Request, origins: Collection[str]) -> bool:
    """Whether the request is addressed to this machine. If a page sent it, the page must also belong to this machine or
    to ``origins``."""
    try:
        pages = [origin for origin in http.headers.getall("Origin", []) if origin not in origins]
        names = [http.url.host, *(urlsplit(origin).hostname for origin in pages)]
    except ValueError:  # not an address
        return False
    return all(is_loopback(name or "") for name in names)


def with_key(url: str, key: str | None) -> str:
    """The address with the key as its password. HTTP clients send the password with every request."""
    return url if key is None else url.replace("://", f"://:{key}@", 1)


def request_key(http: web.Request) -> str:
    """The key in a request; "" if the request has none."""
    header = http.headers.get("Authorization", "")
    scheme, _, token = header.partition(" ")  # in lower or upper case (RFC 9110)
    if scheme.lower() == "basic" and "x-api-key" not in http.headers:
        with suppress(ValueError, binascii.Error):
            return BasicAuth.decode(header).password
    return http.headers.get("x-api-key") or (token.strip() if scheme.lower() == "bearer" else header)


async def listen(
    app: web.Application, host: str, port: int, *, unpacks: bool = True, log: logging.Logger | None = None
) -> tuple[web.AppRunner, str]:
    """Serve ``app`` from the running event loop. Returns the object that stops the server, and the base URL. Port 0
    means a free port.

    ``unpacks``: aiohttp decompresses a body before a handler sees it. If aiohttp cannot decompress the body, the
    request does not reach the handler and gets a plain-text answer. ``log``: this logger gets a line for each request.

    Raises:
        OSError: the host is not an address of this machine, or the port is taken.
    """
    # when a client disconnects, the handler of its request is cancelled
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=log,
        access_log_format=LINE,
        shutdown_timeout=LAST_S,
        keepalive_timeout=HEAD_S,
        auto_decompress=unpacks,
    )
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    host, port = runner.addresses[0][:2]
    return runner, f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def sse(data: object, event: str | None = None) -> bytes:
    """A server-sent event."""
    body = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return (f"event: {event}\n" if event else "").encode() + f"data: {body}\n\n".encode(errors="replace")


async def read_bytes(http: web.Request) -> bytes:
    """The request's body. A body that is compressed with gzip is decompressed.

    Raises:
        RequestError: the body is too long, cannot be decompressed, or does not arrive in time.
    """
    try:
        data, most = await asyncio.wait_for(http.read(), BODY_S), http.client_max_size
        if data.startswith(GZIP):
            data = gzip.GzipFile(fileobj=io.BytesIO(data)).read(most + 1)
        if len(data) > most:
            raise web.HTTPRequestEntityTooLarge(most, len(data))
        return data
    except web.HTTPRequestEntityTooLarge as error:
        message = f"the body is larger than the context of the engine can require: {error.text}"
        raise RequestError(message, error.status) from error
    except TimeoutError as error:
        raise RequestError(f"the body did not arrive within {BODY_S:g} s", 408) from error
    except web.RequestPayloadError as error:
        raise RequestError(f"the body does not arrive completely: {error}") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise RequestError(f"the body is not gzip: {error}") from error


async def read_json(http: web.Request) -> dict[str, Any]:
    """The request's body, which must be a JSON object. Raises RequestError if it is not, and the errors of
    `read_bytes`."""
    data = await read_bytes(http)
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        encoding = http.headers.get("Content-Encoding")
        packed = f"; its Content-Encoding is {encoding:.20}, but only gzip is supported" if encoding else ""
        raise RequestError(f"the body is not JSON: {error}{packed}") from error
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object, not {body!r:.60}")
    return body


def _status(error: Exception) -> int:
    """The HTTP status for an error. An error of slimelite's own code is logged."""
    if isinstance(error, RequestError | web.HTTPException):
        return error.status
    for kind, status in ((LookupError, 404), (ValueError, 400), (ConnectionError, 503)):
        if isinstance(error, kind):
            return status
    logger.error("a request failed", exc_info=error)
    return 500
