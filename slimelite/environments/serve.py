"""Serves an environment over HTTP. A run uses this server with ``--environment http://host:port``.

A run's own worker processes run this program too.

    python -m slimelite.environments.serve calculator --port 9000
    ENVIRONMENT_API_KEY=… python -m slimelite.environments.serve python --host 0.0.0.0 --port 9000

A run on another machine needs the key, as in ``--environment http://:KEY@host:port``. The reason is that an environment
may run code that it receives.

``POST /reset {"row": {…}}`` begins an episode, and answers with its ``id`` and the fields of `protocol.Start`. ``POST
/step {"id", "reply"}`` answers with the fields of `protocol.Step`. ``POST /close {"id"}`` ends the episode.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from aiohttp import web

from slimelite.base.guard import raised_at
from slimelite.base.http_body import Shape, read_body
from slimelite.base.http_server import Handler, RequestError, Server, is_loopback, with_key
from slimelite.base.processes import show_stacks
from slimelite.base.threads import call
from slimelite.base.version import add_version
from slimelite.environments.hosts import load
from slimelite.environments.protocol import Environment, Row
from slimelite.sandbox.registry import SandboxSettings
from slimelite.slime.plugins import run_file

# an episode without a step for this time is deleted, because its client is gone [s]
FORGOTTEN_SECONDS = 6 * 3600.0
MOST_BYTES = 1 << 28
KEY_VARIABLE = "ENVIRONMENT_API_KEY"


class ResetBody(Shape):
    row: dict[str, Any]


class CloseBody(Shape):
    id: str


class StepBody(CloseBody):
    reply: dict[str, Any]


class EnvironmentServer(Server):
    """The server. The server stores the episodes in progress by their ids."""

    def __init__(self, make: Callable[[], Environment], host: str, port: int, key: str | None) -> None:
        super().__init__(MOST_BYTES, host, port, key)
        self._make = make
        self._episodes: dict[str, tuple[Environment, float]] = {}

    def _routes(self) -> list[web.RouteDef]:
        return [
            web.post("/reset", self._reset),
            web.post("/step", self._step),
            web.post("/close", self._close),
            web.get("/health", self._health),
        ]

    async def _handled(self, http: web.Request, handler: Handler) -> web.StreamResponse:
        """Handle a request. If the environment raises an error, the answer contains the error and the line that raised
        it."""
        try:
            return await super()._handled(http, handler)
        except (web.HTTPException, RequestError):
            raise
        except Exception as error:
            raise RequestError(f"{type(error).__name__}: {error}{raised_at(error)}", 500) from error

    async def _reset(self, request: web.Request) -> web.Response:
        now = time.monotonic()
        for name, (_, used) in list(self._episodes.items()):
            if now - used > FORGOTTEN_SECONDS:
                del self._episodes[name]
        environment = await call(self._make)
        start = await call(environment.reset, Row(**(await read_body(request, ResetBody)).row))
        name = uuid.uuid4().hex
        self._episodes[name] = environment, now
        return web.json_response({"id": name, **asdict(start)})

    async def _step(self, request: web.Request) -> web.Response:
        body = await read_body(request, StepBody)
        environment = self._taken(body.id)
        self._episodes[body.id] = environment, time.monotonic()
        return web.json_response(asdict(await call(environment.step, body.reply)))

    async def _close(self, request: web.Request) -> web.Response:
        environment = self._taken((await read_body(request, CloseBody)).id)
        if end := getattr(environment, "close", None):
            await call(end)
        return web.Response()

    def _taken(self, name: str) -> Environment:
        """Return the environment of an episode, and remove the episode from the episodes in progress."""
        if name not in self._episodes:
            raise LookupError(f"there is no episode {name!r}; was the server restarted?")
        return self._episodes.pop(name)[0]


async def serve(
    make: Callable[[], Environment], host: str, port: int, ready: Callable[[str], object], key: str | None = None
) -> None:
    """Serve until this task is cancelled. ``ready`` is called with the address, which includes the key. Port 0 means
    any free port.

    Raises:
        OSError: the host is not an address of this machine, or the port is in use.
    """
    server = EnvironmentServer(make, host, port, key)
    ready(with_key(await server.start(), key))
    try:
        await asyncio.Event().wait()
    finally:
        await server.stop()


def main() -> None:
    """The program of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_version(parser)
    parser.add_argument("environment", help="an environment, written as for --environment of train.py")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help=f"listen on this address; an address other than the default needs a key in {KEY_VARIABLE}",
    )
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--import-file", action="append", default=[])
    parser.add_argument("--sandbox", type=json.loads, default={}, help="fields of SandboxSettings, as JSON")
    parser.add_argument("--worker", action="store_true", help="end when stdin is closed")
    options = parser.parse_args()
    out, key = sys.stdout, os.environ.get(KEY_VARIABLE) or None
    if key is None and not is_loopback(options.host):
        sys.exit(
            f"--host {options.host} accepts connections from other machines: put a key into {KEY_VARIABLE}, or "
            "listen on 127.0.0.1"
        )
    if options.worker:
        key = secrets.token_urlsafe(24)
        # text that environments print goes to stderr, because nobody reads stdout after the address, and a full pipe
        # would block
        out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
        show_stacks()
    try:
        for file in options.import_file:
            run_file(file, "--import-file")
        make = load(options.environment, SandboxSettings(**options.sandbox))
    except ValueError as error:
        sys.exit(print(error, file=out, flush=True) or 2)
    try:
        with suppress(KeyboardInterrupt):
            asyncio.run(serve(make, options.host, options.port, lambda url: print(url, file=out, flush=True), key))
    except OSError as error:
        sys.exit(f"--host {options.host} --port {options.port}: {error.strerror}")


if __name__ == "__main__":
    main()
