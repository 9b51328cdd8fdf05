"""Who may do what at the front, what it refuses, and clients that go away or come too many."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import aiohttp
import pytest
from aiohttp import web

from slimelite.base import http_server
from slimelite.serving import front as front_module
from slimelite.serving import openai
from tests.serving.chat import TOOL, build
from tests.serving.fronts import Asking, engine_front, run, scripted_front

ASK = [{"role": "user", "content": "What is it?"}]
CHAT = {"messages": ASK, "max_tokens": 4}
LONG = {"messages": ASK, "max_tokens": 1800, "ignore_eos": True}
ROUTES = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": "a", "max_tokens": 2}),
    ("/v1/messages", CHAT),
    ("/v1/messages/count_tokens", {"messages": ASK}),
    ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 2}}),
    ("/v1/models", None),
    ("/v1/models/tiny", None),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("access") / "model")


def test_a_sessions_key_opens_that_session_alone(folder: Path) -> None:
    async def scenario() -> None:
        async with engine_front(folder, key="admin") as (ask, _):
            _, mine = await ask("/sessions", {"id": "mine"})
            _, other = await ask("/sessions")
            assert len({mine["key"], other["key"], "admin"}) == 3
            agent, nobody, guess = (Asking(ask.http, ask.url, key) for key in (mine["key"], None, mine["key"] + "x"))
            for path, body in ROUTES:
                method = "GET" if body is None else "POST"
                for prefix, who, allowed in (
                    ("", ask, True),
                    ("/sessions/mine", ask, True),
                    ("/sessions/mine", agent, True),
                    ("", agent, False),
                    (other["path"], agent, False),
                    ("/sessions/none", agent, False),
                    ("/sessions/mine", nobody, False),
                    ("/sessions/mine", guess, False),
                    ("", nobody, False),
                ):
                    status, said = await who(prefix + path, body, method)
                    assert status == (200 if allowed else 401), (prefix, path, said)
            for method, path, body in (
                ("POST", "/abort_request", {"abort_all": True}),
                ("POST", "/sessions", None),
                ("GET", other["path"], None),
                ("DELETE", other["path"], None),
                ("DELETE", mine["path"], None),
                ("GET", "/sessions/../abort_request", None),
                ("POST", "/sessions/mine/abort_request", {"abort_all": True}),
                ("POST", "/sessions/mine/sessions", {}),
            ):
                status, _ = await agent(path, body, method)
                assert status in (401, 404), (method, path)
            assert (await agent("/sessions/mine", None, "GET"))[0] == 200
            assert (await ask("/sessions/none/v1/chat/completions", CHAT))[0] == 404
            assert (await ask("/sessions", {"id": "mine"}))[0] == 400, "the id is taken"
            assert (await ask("/abort_request", {"abort_all": True}))[0] == 200
            assert (await nobody("/health", None, "GET"))[0] == 200
            assert (await ask(mine["path"], None, "DELETE"))[0] == 200
            assert (await agent("/sessions/mine/v1/chat/completions", CHAT))[0] == 401
            # Anthropic's clients send the key under another name
            async with ask.http.post(ask.url + "/v1/messages", json=CHAT, headers={"x-api-key": "admin"}) as answer:
                assert answer.status == 200

    run(scenario())


def test_without_a_key_of_the_server_a_session_still_has_its_own(folder: Path) -> None:
    async def scenario() -> None:
        async with engine_front(folder) as (ask, _):
            _, mine = await ask("/sessions")
            assert (await ask("/v1/chat/completions", CHAT))[0] == 200
            assert (await ask(mine["path"] + "/v1/chat/completions", CHAT))[0] == 401
            agent = Asking(ask.http, ask.url, mine["key"])
            assert (await agent(mine["path"] + "/v1/chat/completions", CHAT))[0] == 200

    run(scenario())


def test_pages_of_other_sites_cannot_use_a_server_without_a_key() -> None:
    async def scenario() -> None:
        for key, status in ((None, 403), ("k", 200)):
            async with scripted_front("qwen2.5", *["abc<|im_end|>"] * 4, key=key) as (ask, _):
                small = {"Authorization": f"bearer {key}"}
                for headers in ({"Origin": "https://example.org"}, {"Origin": "null"}, {"Host": "example.org"}, small):
                    headers = {"Authorization": f"Bearer {key}", **headers}
                    async with ask.http.post(ask.url + "/v1/completions", json={"prompt": "a"}, headers=headers) as got:
                        assert got.status == (status if len(headers) > 1 else 200), headers

    run(scenario())


def test_the_page_is_shown_in_no_frame_of_another_page() -> None:
    async def scenario() -> None:
        async with (
            scripted_front("qwen2.5", page="<p>chat</p>") as (ask, _),
            ask.http.get(ask.url, headers={"Origin": "https://example.org"}) as answer,
        ):
            assert (answer.status, await answer.text()) == (200, "<p>chat</p>")
            assert answer.headers["X-Frame-Options"] == "DENY"
            assert answer.headers["Content-Security-Policy"] == "frame-ancestors 'none'"

    run(scenario())


def test_connections_that_send_no_request_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are answered meanwhile."""
    monkeypatch.setattr(http_server, "HEAD_S", 0.5)
    monkeypatch.setattr(http_server, "BODY_S", 0.5)

    async def scenario() -> None:
        async with scripted_front("qwen2.5", *["abc<|im_end|>"] * 2) as (ask, _):
            port = int(ask.url.rpartition(":")[2])
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(50)]
            for _, writer in silent[25:]:
                writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
            reader, slow = await asyncio.open_connection("127.0.0.1", port)
            slow.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
            assert (await ask("/v1/completions", {"prompt": "a"}))[0] == 200
            assert b" 408 " in await reader.readline()
            assert [await reader.read() for reader, _ in silent] == [b""] * 50
            assert (await ask("/v1/completions", {"prompt": "a"}))[0] == 200
            for _, writer in (*silent, (reader, slow)):
                writer.close()

    run(scenario())


def test_a_request_may_take_longer_than_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_S", 1.0)

    class Slow(http_server.Server):
        def _routes(self) -> list[web.RouteDef]:
            return [web.get("/slow", self._slow)]

        async def _slow(self, _: web.Request) -> web.StreamResponse:
            await asyncio.sleep(1.5)
            return web.json_response("done")

    async def scenario() -> None:
        server = Slow(1 << 20, "127.0.0.1", 0)
        url = await server.start()

        async def asked() -> list[Any]:
            async with aiohttp.ClientSession() as session:
                answers = []
                for _ in range(2):
                    async with session.get(f"{url}/slow") as answer:
                        answers.append(await answer.json())
                return answers

        assert await asked() == ["done", "done"]
        await server.stop()

    run(scenario())


def test_after_a_request_the_next_head_has_a_deadline_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_S", 0.3)

    async def scenario() -> None:
        async with scripted_front("qwen2.5") as (ask, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(ask.url.rpartition(":")[2]))
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /health HT")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            await reader.read()
            writer.close()

    run(scenario())


@pytest.mark.parametrize("key", [None, "secret"])
def test_headers_that_are_none_are_refused(key: str | None) -> None:
    async def scenario() -> None:
        async with scripted_front("qwen2.5", key=key) as (ask, _):
            for line, without in (
                (b"Authorization: Bearer \xff\xfe", b" 405 "),
                (b"Origin: http://[::1", b" 403 "),
                (b"Authorization: Basic !!", b" 405 "),
            ):
                reader, writer = await asyncio.open_connection("127.0.0.1", int(ask.url.rpartition(":")[2]))
                head = b"GET /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + line
                writer.write(head + b"\r\n\r\n")
                assert (b" 401 " if key else without) in await reader.readline(), line
                writer.close()

    run(scenario())


def test_log_probs_of_prompts_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "MOST_LOG_PROBS", 60)

    async def scenario() -> None:
        async with engine_front(folder) as (ask, _):
            body = {"prompt": [[5] * 10] * 2, "max_tokens": 0, "echo": True, "logprobs": 2}
            assert (await ask("/v1/completions", body))[0] == 200
            for more in ({"logprobs": 3}, {"n": 2}, {"prompt": [[5] * 10] * 3}, {"max_tokens": 1}):
                status, said = await ask("/v1/completions", body | more)
                assert status == 400
                assert "log-probs are too many: the limit is 60" in said["error"]["message"]

    run(scenario())


def test_a_session_keeps_the_tokens_of_all_dialects(folder: Path) -> None:
    """A turn of each; the later ones go on on the tokens of those before, and the record has them all."""

    async def scenario() -> None:
        async with engine_front(folder) as (ask, _):
            _, opened = await ask("/sessions", {"temperature": 0.5, "max_tokens": 6})
            agent = Asking(ask.http, ask.url + opened["path"], opened["key"])
            status, first = await agent("/v1/chat/completions", {"messages": ASK, "return_token_ids": True})
            assert status == 200, first
            reply = first["choices"][0]["message"]
            history = [*ASK, {"role": "assistant", "content": reply["content"]}, {"role": "user", "content": "And?"}]
            assert (await agent("/v1/messages", {"messages": history, "max_tokens": 6}))[0] == 200
            _, record = await agent("", None, "GET")
            turns = record["turns"]
            assert [turn["parent"] for turn in turns] == [None, 0]
            assert turns[0]["output_ids"] == first["choices"][0]["token_ids"]
            assert len(turns[0]["output_ids"]) <= 6
            so_far = turns[0]["prompt_ids"] + turns[0]["output_ids"]
            assert turns[1]["prompt_ids"][: len(so_far)] == so_far
            so_far = turns[1]["prompt_ids"] + turns[1]["output_ids"]
            body = {"input_ids": [*so_far, 5], "sampling_params": {"max_new_tokens": 3}, "return_logprob": True}
            _, raw = await agent("/generate", body)
            _, text = await agent("/v1/completions", {"prompt": [*so_far, 5, *raw["output_ids"]], "max_tokens": 3})
            turns = (await agent("", None, "GET"))[1]["turns"]
            assert [turn["parent"] for turn in turns] == [None, 0, 1, 2]
            assert turns[2]["output_ids"] == raw["output_ids"]
            assert turns[2]["log_probs"] == [entry[0] for entry in raw["meta_info"]["output_token_logprobs"]]
            assert text["usage"]["completion_tokens"] == len(turns[3]["output_ids"])
            _, closed = await ask(opened["path"], None, "DELETE")
            assert closed["deleted"]

    run(scenario())


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *(("/v1/chat/completions", {**CHAT, name: value}, name) for name, value in {
        "frequency": 1, "frequency_penalty": 5, "functions": [], "logit_bias": {"x": 1}, "temperature": "hot",
        "max_tokens": "x", "n": 0, "stop": 5, "seed": 0.5, "stream": "yes", "tools": [{"type": "web"}],
        "tool_choice": "required", "top_logprobs": 3, "response_format": {"type": "xml"}, "messages": [],
        "parallel_tool_calls": 0, "stop_token_ids": ["a"], "min_tokens": "x", "top_k": "x",
    }.items()),
    ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ("/v1/chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
    ("/v1/chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
     "one of the request's tools (search)"),
    *(("/v1/chat/completions", {**CHAT, "stream": stream, "response_format": {
        "type": "json_schema", "json_schema": {"schema": {"type": "objec"}}}},
       "json_schema: not a valid grammar: Invalid type")
      for stream in (False, True)),
    ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}, "guided_regex": "a"},
     "regex and response_format: a response can follow only one grammar"),
    ("/v1/chat/completions", {**CHAT, "guided_choice": [""]}, "guided_choice"),
    ("/v1/chat/completions", {**CHAT, "repetition_penalty": 0}, "repetition_penalty"),
    ("/v1/chat/completions", {**CHAT, "logit_bias": {"100000": 1}}, "logit_bias"),
    ("/v1/chat/completions", {"messages": [{"role": "robot", "content": "a"}]}, "messages[0]"),
    ("/v1/chat/completions", {"messages": [*ASK, {"role": "user", "content": [{"type": "text", "text": "a" * 99}, {
        "type": "image_url", "image_url": {"url": "data:"}}]}]}, "messages[1].content[1] is of type 'image_url'"),
    ("/v1/chat/completions", {"messages": [*ASK, {"role": "user"}]}, "messages[1] (user) is empty"),
    ("/v1/chat/completions", {"messages": [*ASK, {"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": "{"}}]}]}, "messages[1] tool_calls[0] (f): arguments are not JSON"),
    ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages[0]"),
    ("/v1/chat/completions", {"messages": [*ASK, {"role": "tool", "tool_call_id": ["x"], "content": "a"}]},
     "messages[1] tool_call_id must be text"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 3000}]}, "context"),
    ("/v1/chat/completions", {**CHAT, "temperature": -1}, "temperature"),
    ("/v1/chat/completions", {**CHAT, "stream": True, "top_p": 7}, "top_p"),
    ("/v1/completions", {"prompt": [[1], "a", 5]}, "prompt"),
    ("/v1/completions", {"prompt": []}, "prompt"),
    ("/v1/completions", {"prompt": [10**9]}, "tokens"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
    ("/v1/messages", {"messages": ASK}, "max_tokens"),
    ("/v1/messages", {**CHAT, "thinking": {"type": ["enabled"]}}, "thinking"),
    ("/v1/messages", {**CHAT, "tool_choice": {"type": "any"}}, "tool_choice"),
    ("/v1/messages", {**CHAT, "system": "a", "messages": [*ASK, {"role": "user", "content": [{"type": "image"}]}]},
     "messages[1].content[0]: Input tag 'image' found using 'type'"),
    ("/v1/messages", {**CHAT, "messages": [{"role": "user", "content": 5}]}, "messages[0].content: "),
    ("/v1/messages", {**CHAT, "system": 5}, "system: "),
    ("/v1/messages", {**CHAT, "messages": [*ASK, {"role": "assistant", "content": "It is"}]}, "messages[1]"),
    ("/v1/messages", {**CHAT, "stop": ["a"]}, "stop"),
    ("/v1/messages", {**CHAT, "output_config": {"format": {"type": "json_schema"}}}, "output_config.format: "),
    ("/v1/messages", {**CHAT, "output_config": {"task_budget": 5}}, "output_config.task_budget"),
    ("/v1/messages", {**CHAT, "output_config": "high"}, "output_config: "),
    ("/v1/messages", {**CHAT, "context_management": {"edits": [{"type": "compact_20260112"}]}}, "compact_20260112"),
    ("/v1/messages", {**CHAT, "context_management": {"edits": [{"type": "clear_everything"}]}}, "clear_everything"),
    ("/v1/messages", {**CHAT, "context_management": {"edits": ["clear_thinking_20251015"]}}, "edits[0]: "),
    *(("/v1/messages", {**CHAT, "context_management": {"edits": [{"type": "clear_tool_uses_20250919", name: value}]}},
       words) for name, value, words in (("keep", 5, "edits[0].keep: "),
       ("trigger", {"type": "tool_uses"}, "edits[0].trigger.value: "))),
    ("/v1/messages", {**CHAT, "mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ("/v1/messages", {**CHAT, "output_config": {"effort": "lots"}}, "effort: Input should be 'low', 'medium'"),
    *(("/v1/messages", {**CHAT, name: 5}, name) for name in ("cache_control", "metadata", "betas", "speed")),
    *(("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {name: "x"}}, "template") for name in
      ("chat_template", "conversation", "messages", "tools", "self")),
    ("/v1/completions", {"prompt": [[65]] * 33, "n": 128}, "4096"),
    *(("/sessions", {"id": name}, "id: ") for name in ("", "a/b", "..", "a b", 5)),
]  # fmt: skip


def test_what_cannot_be_served_is_a_400_that_names_it(folder: Path) -> None:
    async def scenario() -> None:
        async with engine_front(folder) as (ask, engine):
            beside = asyncio.ensure_future(ask("/v1/chat/completions", LONG))
            for path, body, named in REFUSED:
                status, said = await ask(path, body)
                assert status == 400, (path, body, said)
                assert named in str(said["error"]), (body, said)
                assert (said.get("type") == "error") == path.startswith("/v1/messages")
            for data in (b"", b"[", b"[1]", b"\xff", b'{"messages": ' + b"[" * 50_000):
                async with ask.http.post(ask.url + "/v1/chat/completions", data=data) as answer:
                    assert answer.status == 400, data[:20]
            assert (await ask("/v1/chat/completions", {"messages": ASK, "user": "x" * (3 << 20)}))[0] == 413
            assert (await ask("/v1/nothing", {}))[0] == 404
            half = {"messages": [{"role": "user", "content": "\ud800"}], "max_tokens": 2}
            assert (await ask("/v1/chat/completions", half))[0] == 200
            variables = {"chat_template_kwargs": {"text": 1, "at": 1}}
            assert (await ask("/v1/chat/completions", {**half, **variables}))[0] == 200
            assert (await ask("/v1/chat/completions", None, "GET"))[0] == 405
            assert (await beside)[0] == 200
            assert not engine._scheduler.has_work

    run(scenario())


def test_fields_of_anthropics_that_change_no_token_are_taken(folder: Path) -> None:
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    tool = {"name": "search", "input_schema": TOOL["function"]["parameters"]}
    use, result = (
        {"type": "tool_use", "id": "a", "name": "search", "input": {}},
        {"type": "tool_result", "tool_use_id": "a"},
    )

    def asked(**more: Any) -> dict[str, Any]:
        """A conversation whose blocks all have these fields."""
        text = {"type": "text", "text": "abc", **more}
        return {
            "system": [text],
            "tools": [{**tool, **more}],
            "messages": [
                {"role": "user", "content": [text]},
                {"role": "assistant", "content": [text, {**use, **more}]},
                {"role": "user", "content": [{**result, "content": [text], **more}]},
            ],
        }

    fields = {
        **cached,
        "betas": ["context-management-2025-06-27"],
        "metadata": {"user_id": "a"},
        "service_tier": "auto",
        "speed": "fast",
        "inference_geo": "eu",
        "output_config": {"effort": "high", "format": None},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "thinking": {"type": "adaptive", "display": "summarized"},
        "mcp_servers": [],
    }

    async def scenario() -> None:
        async with engine_front(folder) as (ask, engine):
            engine.generate = AsyncMock(wraps=engine.generate)  # type: ignore[method-assign]
            for body in (asked(), {**asked(**cached), **fields}):
                status, whole = await ask("/v1/messages?beta=true", {**body, "max_tokens": 4})
                assert status == 200, whole
                assert (await ask("/v1/messages/count_tokens?beta=true", body))[0] == 200
            prompts = [call.args[0][0].input_ids for call in engine.generate.call_args_list]
            assert len(prompts) == 2
            assert prompts[0] == prompts[1]
            # the tool runner of the SDK asks for a thread, reads these details, and sends the whole history instead
            status, answer = await ask("/v1/messages", {**asked(), "max_tokens": 4, "thread": {"type": "create"}})
            details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
            assert (status, answer["error"]["details"]) == (400, details)

    run(scenario())


@pytest.mark.parametrize(
    ("uses", "edit", "taken"),
    [
        (3, {}, True),
        (4, {}, True),  # far from 100,000 tokens
        (4, {"trigger": {"type": "input_tokens", "value": 10}}, False),
        (4, {"trigger": {"type": "tool_uses", "value": 4}}, True),
        (5, {"trigger": {"type": "tool_uses", "value": 4}}, False),
        (5, {"trigger": {"type": "tool_uses", "value": 4}, "keep": {"type": "tool_uses", "value": 5}}, True),
        (5, {"trigger": {"type": "tool_uses", "value": 4}, "exclude_tools": ["search"]}, True),
    ],
)
def test_results_of_tools_that_are_to_be_cleared_are_not_kept_without_a_word(
    folder: Path, uses: int, edit: dict[str, Any], taken: bool
) -> None:
    messages: list[dict[str, Any]] = [*ASK]
    for use in range(uses):
        call = {"type": "tool_use", "id": str(use), "name": "search", "input": {}}
        result = {"type": "tool_result", "tool_use_id": str(use), "content": "a"}
        messages += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    clear = {"edits": [{"type": "clear_tool_uses_20250919", **edit}]}

    async def scenario() -> None:
        async with engine_front(folder) as (ask, _):
            for path in ("/v1/messages", "/v1/messages/count_tokens"):
                more = {"max_tokens": 2} if path == "/v1/messages" else {}
                status, said = await ask(path, {"messages": messages, "context_management": clear, **more})
                assert status == (200 if taken else 400), said
                assert taken or f"would clear the results of {uses - 3} tool uses" in said["error"]["message"]

    run(scenario())


def test_a_packed_body(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = json.dumps(CHAT).encode()
    bodies = [
        ("gzip", gzip.compress(whole), 200),
        ("identity", whole, 200),
        ("gzip", gzip.compress(whole)[:-9], 400),
        ("gzip", b"\x1f\x8b no", 400),
        ("br", b"\x0b\x02\x80", 400),
        ("zstd", b"\x28\xb5\x2f\xfd", 400),
        ("gzip", gzip.compress(b" " * (3 << 20)), 413),
    ]

    async def scenario() -> None:
        async with engine_front(folder) as (ask, _):
            for encoding, data, status in bodies:
                packed = {"Content-Encoding": encoding}
                async with ask.http.post(ask.url + "/v1/messages", data=data, headers=packed) as answer:
                    said = await answer.json()
                    assert answer.status == status, (encoding, said)
                    why = "the body is not gzip" if encoding == "gzip" else f"its Content-Encoding is {encoding}"
                    assert status != 400 or why in said["error"]["message"]

    run(scenario())
    assert not caplog.records


@pytest.mark.parametrize(("path", "stream"), [(path, s) for path, _ in ROUTES[:3] for s in (False, True)])
def test_a_client_that_disconnects_ends_its_request(folder: Path, path: str, stream: bool) -> None:
    body = {**LONG, "stream": stream, "n": 2}
    body = {"prompt": "abc", **{k: v for k, v in body.items() if k != "messages"}} if path == ROUTES[1][0] else body
    if path == ROUTES[2][0]:
        body = {"messages": ASK, "max_tokens": 1800, "stream": stream}

    async def scenario() -> None:
        async with engine_front(folder) as (ask, engine):
            while True:  # a random model may end its reply before anybody hangs up
                asking = asyncio.ensure_future(ask.http.post(ask.url + path, json=body))
                while not engine._scheduler.rows.sequences and not asking.done():
                    await asyncio.sleep(0.005)
                ended = asking.done() and not stream
                if stream:
                    answer = await asking
                    await answer.content.readany()
                    ended = not engine._scheduler.has_work
                    answer.close()
                asking.cancel()
                if not ended:
                    break
            while engine._scheduler.has_work:
                await asyncio.sleep(0.005)
            assert (await ask("/v1/chat/completions", CHAT))[0] == 200

    run(scenario())


def test_each_turn_of_a_session_has_a_seed_of_its_own(folder: Path) -> None:
    async def scenario() -> None:
        async with engine_front(folder) as (ask, _):
            drawn = []
            for _ in range(2):
                _, opened = await ask("/sessions", {"seed": 5, "max_tokens": 12})
                agent = Asking(ask.http, ask.url + opened["path"], opened["key"])
                for _ in range(2):
                    assert (await agent("/v1/chat/completions", {"messages": ASK}))[0] == 200
                drawn.append([turn["output_ids"] for turn in (await agent("", None, "GET"))[1]["turns"]])
            assert drawn[0] == drawn[1]
            assert drawn[0][0] != drawn[0][1]

    run(scenario())


def test_too_many_requests_are_told_to_come_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_module, "MOST_REQUESTS", 2)
    monkeypatch.setattr(front_module, "MOST_SESSIONS", 1)

    async def scenario() -> None:
        async with engine_front(folder) as (ask, engine):
            running = [asyncio.ensure_future(ask("/v1/chat/completions", LONG)) for _ in range(2)]
            while len(engine._scheduler.request_ids()) < 2:
                await asyncio.sleep(0.005)
            async with ask.http.post(ask.url + "/v1/chat/completions", json=CHAT) as answer:
                assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
                assert (await answer.json())["error"]["type"] == "rate_limit_error"
            assert [status for status, _ in await asyncio.gather(*running)] == [200, 200]
            assert (await ask("/v1/chat/completions", CHAT))[0] == 200
            assert [(await ask("/sessions"))[0] for _ in range(2)] == [200, 429]
            monkeypatch.setattr(front_module, "IDLE_S", 0.0)  # nobody uses the first any more
            assert (await ask("/sessions"))[0] == 200

    run(scenario())


def test_an_error_in_the_middle_of_a_stream_is_an_event() -> None:
    async def scenario() -> None:
        async with scripted_front("qwen2.5", "abc def ghi<|im_end|>", "abc def ghi<|im_end|>") as (ask, engine):
            whole = engine.stream

            async def breaks(request: Any, on_tokens: Any) -> Any:
                await whole(request, on_tokens)
                await asyncio.sleep(0.05)
                raise ConnectionError("the engine is gone")

            engine.stream = breaks
            for path, name in (("/v1/chat/completions", None), ("/v1/messages", "error")):
                status, events = await ask(path, {**CHAT, "stream": True})
                assert (status, events[-1][0]) == (200, name)
                assert events[-1][1]["error"]["message"] == "the engine is gone"

    run(scenario())
