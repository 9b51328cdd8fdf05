"""What those who run a server see of it: an end that drains, pages of other sites, metrics, the access log, errors."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.serving.fronts import Asking, run, scripted_front

ASK = [{"role": "user", "content": "What is it?"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": ASK, "max_tokens": 99},
    "/v1/messages": {"messages": ASK, "max_tokens": 99},
    "/v1/responses": {"input": ASK},
}


def slow(engine: Any, go_on: asyncio.Event) -> None:
    """Let the engine say two tokens, and the rest when it may."""
    whole = engine.stream

    async def stream(request: Any, on_tokens: Callable[..., None]) -> Any:
        said: list[Any] = []
        result = await whole(request, lambda *new: said.append(new))
        for new in said[:2]:
            on_tokens(*new)
        await go_on.wait()
        for new in said[2:]:
            on_tokens(*new)
        return result

    async def generate(requests: list[Any]) -> list[Any]:
        return [await stream(request, lambda *_: None) for request in requests]

    engine.stream, engine.generate = stream, generate


async def begun(ask: Asking) -> list[asyncio.Future[Any]]:
    """A stream and a whole answer of each dialect, which the engine has."""
    running = [
        asyncio.ensure_future(ask(path, {**body, "stream": stream}))
        for path, body in BODIES.items()
        for stream in (True, False)
    ]
    while len(ask.front._answering) < len(running) or ask.front._counts.sampling < len(running):
        await asyncio.sleep(0.01)
    return running


def test_what_runs_may_end_before_the_server_does_and_nothing_new_begins() -> None:
    async def scenario() -> None:
        async with scripted_front("qwen2.5", *["abc def<|im_end|>"] * 9) as (ask, engine):
            go_on = asyncio.Event()
            slow(engine, go_on)
            running = await begun(ask)
            drained = asyncio.ensure_future(ask.front.drain(600))
            await asyncio.sleep(0.02)
            for path, body in BODIES.items():
                status, said = await ask(path, body)
                assert (status, "stopping" in said["error"]["message"]) == (503, True)
            assert (await ask("/health", None, "GET"))[0] == 503
            assert not drained.done()
            go_on.set()
            await asyncio.wait_for(drained, 120)
            for answer in running:
                status, said = await answer
                assert status == 200
                assert "error" not in str(said).replace("'error': None", "")

    run(scenario())


def test_what_runs_longer_ends_with_an_error_of_its_dialect() -> None:
    async def scenario() -> None:
        async with scripted_front("qwen2.5", *["abc def<|im_end|>"] * 9) as (ask, engine):
            slow(engine, asyncio.Event())
            running = await begun(ask)
            await asyncio.wait_for(ask.front.drain(0.05), 120)
            answers = await asyncio.gather(*running)
            assert [status for status, _ in answers] == [200, 503] * 3
            for _, said in answers[1::2]:
                assert "the server is stopping" in said["error"]["message"]
            (chat, theirs, ours) = (events[-1] for _, events in answers[::2])
            assert (chat[0], chat[1]["error"]["code"]) == (None, "service_unavailable")
            assert (theirs[0], theirs[1]["error"]["type"]) == ("error", "overloaded_error")
            assert (ours[0], ours[1]["type"], ours[1]["code"]) == ("error", "error", "service_unavailable")
            assert ours[1]["sequence_number"] == len(answers[4][1]) - 1

    run(scenario())


def test_pages_of_named_origins_may_ask() -> None:
    site, other = "https://chat.example.org", "https://example.org"
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}

    async def scenario(key: str | None, origins: list[str]) -> list[Any]:
        found: list[Any] = []
        async with scripted_front("qwen2.5", *["a<|im_end|>"] * 4, key=key, origins=origins) as (ask, _):
            for origin in (site, other):
                url, headers = ask.url + "/v1/chat/completions", {"Origin": origin}
                async with ask.http.options(url, headers={**headers, **asks}) as before:
                    found += [before.status, before.headers.get("Access-Control-Allow-Headers")]
                headers |= {"Authorization": f"Bearer {key}"}
                async with ask.http.post(url, json={"messages": ASK, "stream": True}, headers=headers) as answer:
                    found += [answer.status, answer.headers.get("Access-Control-Allow-Origin")]
                async with ask.http.post(url, json={}, headers=headers) as wrong:
                    assert wrong.headers.get("Access-Control-Allow-Origin") == found[-1]
        return found

    allowed = [204, "authorization,content-type", 200]
    assert run(scenario("k", [site])) == [*allowed, site, 401, None, 200, None]
    assert run(scenario(None, [site])) == [*allowed, site, 403, None, 403, None]
    assert run(scenario("k", ["*"])) == [*allowed, site, *allowed, other]
    assert run(scenario("k", [])) == [401, None, 200, None] * 2


def test_metrics_count_requests_tokens_the_queue_and_the_cache() -> None:
    async def scenario() -> None:
        async with scripted_front("qwen2.5", *["abc<|im_end|>"] * 99, key="k") as (ask, engine):
            go_on = asyncio.Event()
            slow(engine, go_on)
            info = await engine.info()
            running = [
                asyncio.ensure_future(ask("/v1/completions", {"prompt": [[1, 2, 3]] * (info.max_running_requests + 5)}))
            ]
            while ask.front._counts.sampling < info.max_running_requests + 5:
                await asyncio.sleep(0.01)
            assert await metrics(ask) == {
                "requests_running": 2, "responses_running": 64, "responses_waiting": 5, "sessions_open": 0,
                "prompt_tokens_total": 0, "cached_prompt_tokens_total": 0, "generated_tokens_total": 0,
            }  # fmt: skip
            go_on.set()
            await asyncio.gather(*running)
            await ask("/sessions", {})
            await ask("/v1/nothing/at/all", {})
            await ask("/generate", {"input_ids": [1, 2]})
            counted = await metrics(ask)
            assert counted["prompt_tokens_total"] == 69 * 3 + 2
            assert counted["generated_tokens_total"] == 70 * 4
            assert (counted["responses_waiting"], counted["sessions_open"], counted["requests_running"]) == (0, 1, 1)
            assert counted['requests_total{method="POST",path="/v1/completions",status="200"}'] == 1
            assert counted['requests_total{method="",path="",status="404"}'] == 1
            assert (await Asking(ask.http, ask.url)("/metrics", None, "GET"))[0] == 401

    run(scenario())


async def metrics(ask: Asking) -> dict[str, int]:
    """What ``/metrics`` says, but for its own requests."""
    status, text = await ask("/metrics", None, "GET")
    assert status == 200
    lines = [line for line in text.splitlines() if 'path="/metrics"' not in line]
    for comment in lines:
        assert re.fullmatch(r"# (HELP|TYPE) slimelite_\w+ .+|slimelite_\w+(\{.+\})? \d+\.0", comment)
    values = (line.removeprefix("slimelite_").rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: int(float(value)) for name, value in values}


def test_the_access_log_has_a_line_for_each_request(caplog: pytest.LogCaptureFixture) -> None:
    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "slimelite.access"]

    async def scenario(*, logs: bool) -> list[str]:
        caplog.clear()
        async with scripted_front("qwen2.5", "a<|im_end|>", key="secret", logs=logs) as (ask, _):
            await ask("/v1/chat/completions", BODIES["/v1/chat/completions"])
            await Asking(ask.http, ask.url, "wrong")("/v1/models", None, "GET")
            while logs and len(said()) < 2:  # a line is written after its answer
                await asyncio.sleep(0.01)
        return said()

    with caplog.at_level(logging.INFO, "slimelite.access"):
        lines = run(scenario(logs=True))
        assert [re.sub(r" \d+ [\d.]+$", "", line) for line in lines] == [
            '127.0.0.1 "POST /v1/chat/completions HTTP/1.1" 200',
            '127.0.0.1 "GET /v1/models HTTP/1.1" 401',
        ]
        assert run(scenario(logs=False)) == []


CONTEXT = r"This model's maximum context length is 8192 tokens\. However, your messages resulted in (\d+) tokens"


@pytest.mark.parametrize("characters", [9000, 8192 - 63, 300_000])
def test_a_prompt_that_is_too_long_is_said_in_the_words_that_clients_look_for(characters: int) -> None:
    long = [{"role": "user", "content": "x" * characters}]
    words: dict[str, tuple[dict[str, Any], str]] = {
        "/v1/chat/completions": ({"messages": long}, CONTEXT),
        "/v1/responses": ({"input": long}, CONTEXT),
        "/v1/messages": ({"messages": long, "max_tokens": 9}, r"prompt is too long: (\d+) tokens > 8191 maximum"),
    }

    async def scenario() -> None:
        async with scripted_front("qwen2.5") as (ask, engine):
            counts = []
            for path, (body, said) in words.items():
                for stream in (False, True):
                    status, answer = await ask(path, {**body, "stream": stream})
                    error = answer["error"]
                    assert (status, error["type"]) == (400, "invalid_request_error")
                    assert error.get("code", "context_length_exceeded") == "context_length_exceeded"
                    found = re.match(said, error["message"])
                    assert found, error
                    counts.append(int(found[1]))
            assert engine.requests == []
            assert min(counts) == max(counts) >= max(8192, 0.99 * characters)

    run(scenario())


def test_other_errors_have_the_types_and_codes_of_their_dialect() -> None:
    async def scenario() -> None:
        async with scripted_front("qwen2.5", key="k") as (ask, _):
            stranger = Asking(ask.http, ask.url, "wrong")
            for path, body in BODIES.items():
                status, said = await stranger(path, body)
                wanted = ("authentication_error", None) if "messages" in path else (
                    "invalid_request_error", "invalid_api_key")  # fmt: skip
                assert (status, said["error"]["type"], said["error"].get("code")) == (401, *wanted)
            async with ask.http.get(ask.url + "/v1/models", headers={"Authorization": "bearer k"}) as answer:
                assert answer.status == 200

    run(scenario())
