"""The front that adds the adapter to requests, spoken to in raw HTTP, before a server that shows what arrives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from slimelite.engines.sglang.front import ADAPTER, AdapterFront

Ask = Callable[[str], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class Upstream:
    """Answers with the request itself, streams events as `more` is set, or breaks off."""

    def __init__(self) -> None:
        self.more, self.left = asyncio.Event(), asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.path == "/health":
            return web.Response(status=429, text="no")
        if request.path not in ("/generate", "/v1/completions"):
            return web.json_response(
                {"path": request.raw_path, "headers": [*request.headers.items()], "body": body.decode()}
            )
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: " + body + b"\n\n")
        try:
            await self.more.wait()
        finally:
            self.left.set()
        if request.path == "/generate":
            await response.write(b"data: [DONE]\n\n")
        else:
            assert request.transport is not None
            request.transport.abort()
        return response


def through_a_front(scenario: Callable[[Upstream, Ask], Awaitable[None]], *, listens: bool = True) -> None:
    """Run ``scenario`` with a front before an upstream that listens, or not."""

    async def work() -> None:
        upstream, app = Upstream(), web.Application()
        app.router.add_route("*", "/{path:.*}", upstream.answer)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        if not listens:
            await runner.cleanup()
        front = AdapterFront(f"http://127.0.0.1:{port}")
        url = await front.start()
        assert url.startswith("http://127.0.0.1:"), "other machines cannot reach it, so it has no key"

        async def ask(request: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            head, _, body = request.partition("\n\n")
            lines = [*head.splitlines(), "Connection: close", f"Content-Length: {len(body)}"]
            writer.write(("\r\n".join(lines) + "\r\n\r\n" + body).encode())
            return reader, writer

        try:
            await scenario(upstream, ask)
        finally:
            await front.stop()
            await runner.cleanup()

    asyncio.run(asyncio.wait_for(work(), 600))


async def read(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> tuple[str, bytes]:
    """Head and body of an answer, whose connection ends with it."""
    reader, writer = connection
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return head.decode(), body


def test_what_goes_through() -> None:
    async def scenario(_: Upstream, ask: Ask) -> None:
        given = "Host: 127.0.0.1\nContent-Type: text/plain\nX-Other: 1"
        head, body = await read(await ask(f"POST /tokenize?a=%20 HTTP/1.0\n{given}\n\nas it is"))
        found: dict[str, Any] = json.loads(body)
        assert "Content-Type: application/json" in head
        assert (found["path"], found["body"]) == ("/tokenize?a=%20", "as it is")
        assert dict(found["headers"])["Content-Type"] == "text/plain"
        head, body = await read(await ask("GET /health HTTP/1.0\nHost: 127.0.0.1\n\n"))
        assert head.split()[1] == "429"
        assert body == b"no"

    through_a_front(scenario)


@pytest.mark.parametrize(
    "path",
    [
        "/update_weights_from_disk",
        "/release_memory_occupation",
        "/pause_generation",
        "/v1/../pause_generation",
        "/v1/messages",
    ],
)
def test_only_requests_that_a_plugin_needs_go_through(path: str) -> None:
    async def scenario(_: Upstream, ask: Ask) -> None:
        head, _body = await read(await ask(f"POST {path} HTTP/1.0\nHost: 127.0.0.1\n\n{{}}"))
        assert head.split()[1] == "404"

    through_a_front(scenario)


def test_a_page_of_another_site_gets_nothing() -> None:
    async def scenario(_: Upstream, ask: Ask) -> None:
        for names in ("Host: there", "Host: 127.0.0.1\nOrigin: http://there"):
            head, body = await read(await ask(f"POST /tokenize HTTP/1.0\n{names}\n\n{{}}"))
            assert head.split()[1] == "403"
            assert b"pages of other sites" in body

    through_a_front(scenario)


def test_requests_that_sample_get_the_adapter_and_answers_stream() -> None:
    async def scenario(upstream: Upstream, ask: Ask) -> None:
        sent = {"text": "a", "stream": True}
        reader, writer = await ask(f"POST /generate HTTP/1.1\nHost: 127.0.0.1\n\n{json.dumps(sent)}")
        # the first event is here while the server still works on the second
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        assert "Content-Type: text/event-stream" in head
        first = (await reader.readuntil(b"\n\n")).partition(b"data: ")[2]
        assert json.loads(first) == {**sent, "lora_path": ADAPTER}
        upstream.more.set()
        assert b"data: [DONE]" in await reader.read()
        writer.close()
        for body in ('{"lora_path": "mine"}', "no JSON", "[1]"):
            _, answer = await read(await ask(f"POST /generate HTTP/1.1\nHost: 127.0.0.1\n\n{body}"))
            assert f"data: {body}\n\n".encode() in answer

    through_a_front(scenario)


def test_a_client_that_leaves_ends_its_request_at_the_server() -> None:
    async def scenario(upstream: Upstream, ask: Ask) -> None:
        reader, writer = await ask("POST /generate HTTP/1.1\nHost: 127.0.0.1\n\n{}")
        await reader.readuntil(b"\n\n")
        assert not upstream.left.is_set()
        writer.transport.abort()
        await upstream.left.wait()
        assert not upstream.more.is_set()

    through_a_front(scenario)


def test_a_server_that_breaks_off_or_does_not_answer() -> None:
    async def breaks_off(upstream: Upstream, ask: Ask) -> None:
        upstream.more.set()
        reader, writer = await ask("POST /v1/completions HTTP/1.1\nHost: 127.0.0.1\n\n{}")
        try:
            answer = await reader.read()
        except ConnectionResetError:
            return
        writer.close()
        assert not answer.endswith(b"0\r\n\r\n"), "chunks end with an empty one, if the answer is whole"

    async def silent(_: Upstream, ask: Ask) -> None:
        head, body = await read(await ask("GET /health HTTP/1.1\nHost: 127.0.0.1\n\n"))
        assert head.startswith("HTTP/1.1 502 ")
        assert "/health does not answer: " in json.loads(body)["error"]["message"]

    through_a_front(breaks_off)
    through_a_front(silent, listens=False)
