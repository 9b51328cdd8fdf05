"""Serves an environment over HTTP, for ``--environment http://host:port`` and as the worker processes of a run.

    python -m slimelite.environments.serve calculator --port 9000

``POST /reset {"row": {…}}`` begins an episode and answers with its ``id`` and the fields of `protocol.Start`;
``POST /step {"id", "reply"}`` answers with those of `protocol.Step`; ``POST /close {"id"}`` ends it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import threading
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import asdict

from aiohttp import web

from slimelite.environments.hosts import load
from slimelite.environments.protocol import Environment, Row
from slimelite.plugins import raised_at, run_file
from slimelite.threads import call

# an episode that nobody has stepped for this long is forgotten: its client is gone [s]
FORGOTTEN_SECONDS = 6 * 3600.0


class Server:
    """The episodes under way, by id."""

    def __init__(self, make: Callable[[], Environment]) -> None:
        self._make = make
        self._episodes: dict[str, tuple[Environment, float]] = {}

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application(client_max_size=1 << 28, middlewares=[_errors_as_json])
        app.add_routes(
            [
                web.post("/reset", self._reset),
                web.post("/step", self._step),
                web.post("/close", self._close),
                web.get("/health", self._health),
            ]
        )
        return app

    async def _reset(self, request: web.Request) -> web.Response:
        now = time.monotonic()
        for name, (_, used) in list(self._episodes.items()):
            if now - used > FORGOTTEN_SECONDS:
                del self._episodes[name]
        environment = await call(self._make)
        start = await call(environment.reset, Row(**(await request.json())["row"]))
        name = uuid.uuid4().hex
        self._episodes[name] = environment, now
        return web.json_response({"id": name, **asdict(start)})

    async def _step(self, request: web.Request) -> web.Response:
        body = await request.json()
        environment = self._taken(body["id"])
        self._episodes[body["id"]] = environment, time.monotonic()
        return web.json_response(asdict(await call(environment.step, body["reply"])))

    async def _close(self, request: web.Request) -> web.Response:
        environment = self._taken((await request.json())["id"])
        if end := getattr(environment, "close", None):
            await call(end)
        return web.Response()

    def _taken(self, name: str) -> Environment:
        """The environment of an episode, which is no longer under way."""
        if name not in self._episodes:
            raise LookupError(f"there is no episode {name!r}; was the server started anew?")
        return self._episodes.pop(name)[0]

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()


@web.middleware
async def _errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """What an environment raises is the answer's error, with the line that raised it."""
    try:
        return await handler(request)
    except web.HTTPException:
        raise
    except Exception as error:
        message = f"{type(error).__name__}: {error}{raised_at(error)}"
        return web.json_response({"error": {"message": message}}, status=500)


async def serve(make: Callable[[], Environment], host: str, port: int, ready: Callable[[str], object]) -> None:
    """Serve until cancelled; ``ready`` gets the address. Port 0: any free one."""
    runner = web.AppRunner(Server(make).app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    ready(f"http://{host}:{runner.addresses[0][1]}")
    await asyncio.Event().wait()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("environment", help="as --environment of train.py takes it")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--import-file", action="append", default=[])
    parser.add_argument("--worker", action="store_true", help="end when stdin does")
    options = parser.parse_args()
    told = sys.stdout
    if options.worker:
        # nobody reads what environments print after the address, and a full pipe would stop them: it goes to stderr
        told = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    try:
        for file in options.import_file:
            run_file(file, "--import-file")
        make = load(options.environment)
    except ValueError as error:
        sys.exit(print(error, file=told, flush=True) or 2)
    asyncio.run(serve(make, options.host, options.port, lambda url: print(url, file=told, flush=True)))


if __name__ == "__main__":
    main()
