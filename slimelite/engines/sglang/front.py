"""A front for a server that has the policy as an adapter. The front adds the adapter's name to requests of plugins that
do not name an adapter. Without this name, such requests would sample from the frozen weights.
"""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import suppress

import aiohttp
from aiohttp import web

from slimelite.base.http_client import CONNECT_S, KEEP_ALIVE_S
from slimelite.base.http_server import RequestError, Server, read_bytes
from slimelite.base.threads import LoopThread

logger = logging.getLogger(__name__)

# the adapter's name at the server, the same in every version
ADAPTER = "policy"
# SGLang's endpoints that take `lora_path`
SAMPLING = ("/generate", "/v1/completions", "/v1/chat/completions")
# other endpoints that a plugin needs; those that change the server, such as weight updates, are not here
OTHERS = (
    *("/abort_request", "/health", "/health_generate", "/get_model_info", "/model_info", "/openapi.json"),
    *("/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize", "/v1/models"),
)
LARGEST_BODY = 1 << 30


class AdapterFront(Server):
    """Passes requests on to the server at ``target``. The front adds ``lora_path`` to sampling requests that do not
    have it. Answers are passed back in pieces, so that a stream arrives as a stream. Only this machine can reach the
    front. The front has its own thread and event loop.
    """

    def __init__(self, target: str) -> None:
        super().__init__(LARGEST_BODY, "127.0.0.1", 0)
        self._target = target
        self._thread: LoopThread | None = None

    async def start(self) -> str:
        """Start listening on a free port and return the base URL."""
        self._thread = LoopThread("adapter front")
        return await self._thread.result(self._listen())

    async def stop(self) -> None:
        """Release the address, and close the connections to the server. Before `start` this does nothing."""
        if self._thread is not None:
            await self._thread.result(super().stop())
            await self._thread.result(self._session.close())
            await asyncio.to_thread(self._thread.close)
            self._thread = None

    async def _listen(self) -> str:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        )
        # when a client disconnects, its handler is cancelled, and the connection to the server closes too
        return await super().start()

    def _routes(self) -> list[web.RouteDef]:
        return [web.route("*", path, self._pass_on) for path in (*SAMPLING, *OTHERS)]

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        body = await read_bytes(request)
        if request.path in SAMPLING:
            with suppress(ValueError):  # a malformed body is passed on, and the server answers with the error
                sent = json.loads(body)
                if isinstance(sent, dict) and sent.get("lora_path") is None:
                    body = json.dumps({**sent, "lora_path": ADAPTER}).encode()
        response: web.StreamResponse | None = None
        try:
            async with self._session.request(
                request.method,
                self._target + request.path_qs,
                headers={"Content-Type": request.headers["Content-Type"]} if "Content-Type" in request.headers else {},
                data=body or None,
            ) as answer:
                kind = {"Content-Type": answer.headers.get("Content-Type", answer.content_type)}
                response = web.StreamResponse(status=answer.status, headers=kind)
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
                return response
        except (aiohttp.ClientError, TimeoutError) as error:
            problem = f"{self._target}{request.path} does not answer: {str(error) or type(error).__name__}"
            if response is None:
                raise RequestError(problem, 502) from error
            if request.transport is not None:  # None: the client has disconnected
                # the status is sent already; closing the connection shows the client that the answer is incomplete
                logger.warning("%s", problem)
                request.transport.abort()
            return response
