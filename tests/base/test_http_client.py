"""The HTTP client, against a server that answers as a test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

import pytest

from slimelite.base.http_client import Client, NoAnswer, Refused, Retry, ask, shown

# quick, but as the policies of the callers
THRICE = Retry(attempts=3, first_s=0.01, most_s=0.02)
PATIENT = Retry(attempts=3, first_s=0.01, most_s=0.02, refused=True)


class Scripted(ThreadingHTTPServer):
    """Gives ``answers``, (status, text), one after the other, the last one for ever; None hangs up."""

    def __init__(self, *answers: tuple[int, str] | None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.answers = list(answers)
        self.asked: list[tuple[str, bytes, dict[str, str]]] = []


class Handler(BaseHTTPRequestHandler):
    server: Scripted

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append((self.path, body, {name.lower(): value for name, value in self.headers.items()}))
        answers = self.server.answers
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if answer is None:
            self.close_connection = True
            return
        self.send_response(answer[0])
        self.end_headers()
        self.wfile.write(answer[1].encode())

    do_GET = do_POST

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@contextmanager
def scripted(*answers: tuple[int, str] | None) -> Iterator[Scripted]:
    server = Scripted(*answers)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_json_there_and_back_and_bytes_as_they_are() -> None:
    with scripted((200, '{"a": [1]}'), (200, ""), (200, "fine\n")) as server:
        assert ask("POST", f"{server.url}/x?y=1", {"b": None}) == {"a": [1]}
        assert ask("POST", server.url, b'{"raw":1}') is None
        assert ask("GET", server.url) == "fine\n"
    (path, body, headers), (_, raw, _), _ = server.asked
    assert (path, json.loads(body), headers["content-type"]) == ("/x?y=1", {"b": None}, "application/json")
    assert raw == b'{"raw":1}'


def test_a_lost_connection_is_tried_again_an_answer_only_where_that_can_help() -> None:
    with scripted(None, None, (200, "1")) as server:
        assert ask("POST", server.url, {}, THRICE) == 1
    for retry, status, times in ((THRICE, 500, 1), (PATIENT, 404, 1), (PATIENT, 500, 3), (PATIENT, 429, 3)):
        with scripted((status, "no")) as server:
            with pytest.raises(Refused, match=f"answered {status}: no"):
                ask("POST", server.url, {}, retry)
            assert len(server.asked) == times
    with scripted(None) as server:
        with pytest.raises(NoAnswer, match=r"does not answer in 3 attempts"):
            ask("POST", server.url, {}, THRICE)
        assert len(server.asked) == 3


def test_where_json_is_wanted_a_text_is_a_refusal_that_may_pass() -> None:
    async def scenario(url: str) -> Any:
        async with Client(PATIENT) as client:
            return await client.post(url, {})

    with scripted((200, "<html>"), (200, "0.5")) as server:
        assert asyncio.run(scenario(server.url)) == 0.5
    with scripted((200, "<html>")) as server, pytest.raises(Refused, match="not JSON: <html>"):
        asyncio.run(scenario(server.url))


def test_messages_have_the_servers_words_and_no_secret() -> None:
    with scripted((400, '{"error": {"message": "too long"}}')) as server:
        address = server.url.replace("://", "://me:secret@") + "/rm?key=secret"
        with pytest.raises(Refused) as caught:
            ask("POST", address, {})
    assert str(caught.value) == f"{server.url}/rm answered 400: too long"
    assert caught.value.status == 400
    assert server.asked[0][2]["authorization"].startswith("Basic ")
    with pytest.raises(NoAnswer) as gone:
        ask("POST", "http://me:secret@127.0.0.1:9/rm?key=secret", {})
    assert "secret" not in str(gone.value)
    assert shown("http://[::1]:5/a?b#c") == "http://[::1]:5/a"


def test_proxies_of_the_environment_are_left_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with scripted((200, "1")) as server:
        assert ask("GET", server.url) == 1


def test_a_server_that_is_too_slow_has_not_answered() -> None:
    with scripted((200, "1")) as server:
        over = Event()
        server.finish_request = lambda *_: over.wait()  # type: ignore[assignment,method-assign]
        with pytest.raises(NoAnswer, match="TimeoutError"):
            ask("GET", server.url, timeout_s=0.1)
        over.set()
