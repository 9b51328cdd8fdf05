"""A front for a server whose policy is an adapter: requests of plugins that name none get it, else they would sample
from the frozen weights.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

from aiohttp import web

from slimelite.http_client import Client, Refused
from slimelite.threads import LoopThread

# the adapter's name at the server, in every version
ADAPTER = "policy"
# SGLang's endpoints that take `lora_path`
SAMPLING = ("/generate", "/v1/completions", "/v1/chat/completions")
LARGEST_BODY = 1 << 30


class AdapterFront:
    """Passes requests on to the server at ``target``, and adds ``lora_path`` to those that sample without it."""

    def __init__(self, target: str, host: str) -> None:
        self._target, self._host = target, host
        self._thread: LoopThread | None = None

    async def start(self) -> str:
        """Start listening on a free port and return the base URL."""
        self._thread = LoopThread("adapter front")
        return await self._thread.result(self._listen())

    async def stop(self) -> None:
        """Stop listening, if `start` was called."""
        if self._thread is not None:
            await self._thread.result(self._runner.cleanup())
            await self._thread.result(self._http.close())
            await asyncio.to_thread(self._thread.close)
            self._thread = None

    async def _listen(self) -> str:
        self._http = Client(texts=True)
        app = web.Application(client_max_size=LARGEST_BODY)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        # when a client disconnects, its handler is cancelled, and the connection to the server closes too
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, 0).start()
        return f"http://{self._host}:{self._runner.addresses[0][1]}"

    async def _pass_on(self, request: web.Request) -> web.Response:
        body = await request.read()
        if request.path in SAMPLING:
            with suppress(ValueError):  # the server says what is wrong with it
                found = json.loads(body)
                if isinstance(found, dict) and found.get("lora_path") is None:
                    body = json.dumps({**found, "lora_path": ADAPTER}).encode()
        try:
            answer = await self._http.ask(request.method, self._target + request.raw_path, body or None)
        except Refused as error:
            return web.json_response({"error": {"message": str(error)}}, status=error.status)
        if isinstance(answer, str | None):  # a streamed answer comes whole
            return web.Response(text=answer or "")
        return web.json_response(answer)
