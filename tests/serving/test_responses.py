"""OpenAI's Responses over raw HTTP: items and events, what is kept, namespaces, and sessions."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from slimelite.serving import responses, stored
from tests.serving.fronts import Asking, run, scripted_front

PATH = "/v1/responses"
PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}}}
SEARCH = {"type": "function", "name": "search", "description": "Search.", "parameters": PARAMETERS, "strict": True}
SHOWN = {"type": "function", "function": {"name": "search", "description": "Search.", "parameters": PARAMETERS}}
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "a bc"}}\n</tool_call>'
THOUGHT = "<think>\nLet me see.\n</think>\n\n"
ASK = [{"role": "user", "content": "What is it?"}]
TEXT = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
REPLIES = [
    ("It is 42.<|im_end|>", "completed", ["message"]),
    (f"{THOUGHT}It is 42.<|im_end|>", "completed", ["reasoning", "message"]),
    (
        f"{THOUGHT}I look.\n{CALL}{CALL}<|im_end|>",
        "completed",
        ["reasoning", "message", "function_call", "function_call"],
    ),
    (f"{CALL}<|im_end|>", "completed", ["function_call"]),
    ("cut off in the mid", "incomplete", ["message"]),
    ("<think>\nendless", "incomplete", ["reasoning", "message"]),
    ("<|im_end|>", "completed", ["message"]),
]


def without_ids(value: Any) -> Any:
    """An answer without what differs from one to the next."""
    if isinstance(value, dict):
        return {name: without_ids(one) for name, one in value.items() if name not in ("id", "call_id", "created_at")}
    return [without_ids(one) for one in value] if isinstance(value, list) else value


def replayed(events: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    """The items that the events of a stream add up to, after a check of their order and numbers."""
    items: list[dict[str, Any]] = []
    is_open = False
    for number, (name, data) in enumerate(events):
        assert (data["type"], data["sequence_number"]) == (name, number)
        kind = name.removeprefix("response.")
        if kind == "output_item.added":
            assert not is_open
            items.append(data["item"])
            is_open = True
        elif "output_index" in data:
            item = items[-1]
            assert (is_open, data["output_index"], data.get("item_id", item["id"])) == (
                True,
                len(items) - 1,
                item["id"],
            )
            if kind == "content_part.added":
                item["content"].append(data["part"])
            elif kind in ("output_text.delta", "reasoning_text.delta"):
                item["content"][0]["text"] += data["delta"]
            elif kind in ("function_call_arguments.delta", "custom_tool_call_input.delta"):
                item["arguments" if "arguments" in kind else "input"] += data["delta"]
            elif kind in ("output_text.done", "reasoning_text.done"):
                assert data["text"] == item["content"][0]["text"]
            elif kind == "content_part.done":
                assert data["part"] == item["content"][0]
            elif kind == "output_item.done":
                assert {**item, "status": "", "encrypted_content": ""} == {
                    **data["item"], "status": "", "encrypted_content": ""}  # fmt: skip
                items[-1], is_open = data["item"], False
    assert not is_open
    return items


@pytest.mark.parametrize(("reply", "status", "kinds"), REPLIES)
def test_a_stream_adds_up_to_the_whole_answer(reply: str, status: str, kinds: list[str]) -> None:
    body = {"input": "What is it?", "tools": [SEARCH], "include": ["reasoning.encrypted_content"], "store": False}

    async def scenario() -> None:
        async with scripted_front("qwen3", *[reply] * 3) as (ask, engine):
            code, whole = await ask(PATH, body)
            assert code == 200, whole
            assert (whole["status"], [item["type"] for item in whole["output"]]) == (status, kinds)
            cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
            assert (whole["object"], whole["error"], whole["incomplete_details"]) == ("response", None, cut)
            usage = whole["usage"]
            assert (
                usage["output_tokens"]
                == len(engine.requests[0].input_ids) * 0 + usage["total_tokens"] - usage["input_tokens"]
            )
            assert (usage["output_tokens_details"]["reasoning_tokens"] > 0) == ("reasoning" in kinds)
            _, events = await ask(PATH, {**body, "stream": True})
            names = [name for name, _ in events]
            assert names[:2] + names[-1:] == ["response.created", "response.in_progress", f"response.{status}"]
            items = replayed(events)
            for item, expected in zip(items, whole["output"], strict=True):
                if item["type"] == "message":  # white space before a call is not known to be one's until the call comes
                    item["content"][0]["text"] = item["content"][0]["text"].strip()
                    expected["content"][0]["text"] = expected["content"][0]["text"].strip()
            assert without_ids(items) == without_ids(whole["output"])
            final = events[-1][1]["response"]
            assert without_ids(final | {"output": 0}) == without_ids(whole | {"output": 0})
            # the messages of a chat are the same prompt
            await ask("/v1/chat/completions", {"messages": ASK, "tools": [SHOWN]})
            assert len({request.input_ids for request in engine.requests}) == 1

    run(scenario())


def test_a_conversation_goes_on_by_its_id_by_its_items_and_by_references_to_them() -> None:
    """All three give the model the same prompt, thinking included, which the template shows while tools answer."""
    said = f"{THOUGHT}I look.\n{CALL}{CALL}<|im_end|>"

    async def scenario() -> None:
        async with scripted_front("qwen3", said, *["It is 42.<|im_end|>"] * 9) as (ask, engine):
            settings = {"tools": [SEARCH], "instructions": "Be short.", "include": ["reasoning.encrypted_content"]}
            _, first = await ask(PATH, {**settings, "input": ASK})
            thought, message, *calls = first["output"]
            results = [
                {
                    "type": "function_call_output",
                    "call_id": call["call_id"],
                    "output": [{"type": "input_text", "text": "4"}],
                }
                for call in calls
            ]
            bare = {name: thought[name] for name in ("id", "type", "summary", "encrypted_content")}
            plain = {"id": "x", "type": "reasoning", "summary": [], "content": thought["content"]}
            references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
            histories: list[dict[str, Any]] = [
                {"input": results, "previous_response_id": first["id"]},
                *({"input": [*ASK, one, message, *calls, *results]} for one in (thought, bare, plain)),
                {"input": [*ASK, *references[:3], {"id": references[3]["id"]}, *results]},
            ]
            for history in histories:
                status, second = await ask(PATH, {**settings, **history})
                assert status == 200, second
            prompts = {engine.format.decode(request.input_ids) for request in engine.requests[1:]}
            (prompt,) = prompts
            assert f"<|im_start|>assistant\n{THOUGHT}I look.\n{CALL}\n{CALL}" in prompt
            assert prompt.count("Be short.") == 1
            _, third = await ask(PATH, {"input": "And?", "previous_response_id": second["id"]})
            last = engine.format.decode(engine.requests[-1].input_ids)
            assert ("Be short." in last, last.count("What is it?"), "And?" in last) == (False, 1, True)
            # what is not kept cannot be gone on from
            _, alone = await ask(PATH, {"input": "a", "store": False})
            assert (await ask(f"{PATH}/{third['id']}", None, "GET"))[1] == third
            assert (await ask(f"{PATH}/{third['id']}", None, "DELETE"))[1]["deleted"]
            named = [{"type": "item_reference", "id": second["id"]}]
            assert (await ask(PATH, {"input": named}))[0] == 400
            for lost in (alone["id"], third["id"], "resp_none"):
                status, error = await ask(PATH, {"input": "a", "previous_response_id": lost})
                assert (status, error["error"]["code"]) == (400, "previous_response_not_found")
                assert (await ask(f"{PATH}/{lost}", None, "GET"))[0] == 404

    run(scenario())


def test_a_turn_of_a_session_goes_on_on_the_tokens_of_the_last() -> None:
    said = f"{THOUGHT}I look.\n{CALL}<|im_end|>"

    async def scenario() -> None:
        async with scripted_front("qwen3", said, *["abc abc<|im_end|>"] * 9) as (ask, _):
            _, opened = await ask("/sessions", {"max_output_tokens": 60})
            agent = Asking(ask.http, ask.url + opened["path"], opened["key"])
            _, first = await agent(PATH, {"input": ASK, "tools": [SEARCH]})
            call = first["output"][-1]
            result = {"type": "function_call_output", "call_id": call["call_id"], "output": "42"}
            _, second = await agent(PATH, {"input": [result], "tools": [SEARCH], "previous_response_id": first["id"]})
            # the client leaves the thinking out, and sends all; then another dialect goes on
            history = [*ASK, *first["output"][1:], result, *second["output"], {"role": "user", "content": "And?"}]
            assert (await agent(PATH, {"input": history, "tools": [SEARCH], "stream": True}))[0] == 200
            assert (await agent(PATH, {"input": ASK}))[0] == 200
            turns = (await agent("", None, "GET"))[1]["turns"]
            assert [turn["parent"] for turn in turns][:2] == [None, 0]
            assert turns[3]["parent"] is None
            so_far = turns[0]["prompt_ids"] + turns[0]["output_ids"]
            assert turns[1]["prompt_ids"][: len(so_far)] == so_far
            # what a session keeps is its own
            for other in (ask, Asking(ask.http, ask.url, None)):
                assert (await other(PATH, {"input": "a", "previous_response_id": first["id"]}))[0] == 400
            assert (await agent(f"{PATH}/{first['id']}", None, "DELETE"))[0] == 200

    run(scenario())


def test_namespaces_and_tools_that_take_a_text_are_functions_and_hosted_ones_are_left_out() -> None:
    agents = {"type": "namespace", "name": "agents", "description": "Others.", "tools": [SEARCH]}
    patch = {"type": "custom", "name": "patch", "description": "Edit.", "format": {
        "type": "grammar", "syntax": "lark", "definition": "start: /.+/"}}  # fmt: skip
    body = {"input": ASK, "tools": [SEARCH, agents, patch, {"type": "web_search", "external_web_access": False}]}
    said = "".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in (("agents__search", '{"query": "a"}'), ("patch", '{"input": "x y"}'), ("other", "{}"))
    )

    async def scenario() -> None:
        async with scripted_front("qwen2.5", *[f"{said}<|im_end|>"] * 4) as (ask, engine):
            _, whole = await ask(PATH, body)
            one, two, three = whole["output"]
            assert (one["type"], one["namespace"], one["name"]) == ("function_call", "agents", "search")
            assert (two["type"], two["name"], two["input"]) == ("custom_tool_call", "patch", "x y")
            assert (three["type"], three["name"], "namespace" in three) == ("function_call", "other", False)
            assert [tool["type"] for tool in whole["tools"]] == ["function", "namespace", "custom"]
            prompt = engine.format.decode(engine.requests[0].input_ids)
            assert all(f'"name": "{name}"' in prompt for name in ("search", "agents__search", "patch"))
            assert "start: /.+/" in prompt
            assert "web_search" not in prompt
            _, events = await ask(PATH, {**body, "stream": True})
            assert without_ids(replayed(events)) == without_ids(whole["output"])
            result = {"type": "custom_tool_call_output", "call_id": two["call_id"], "output": "done"}
            assert (await ask(PATH, {**body, "input": [*ASK, *whole["output"], result]}))[0] == 200
            prompt = engine.format.decode(engine.requests[-1].input_ids)
            assert said.replace("</tool_call><", "</tool_call>\n<") in prompt
            named = {"type": "function", "name": "search", "namespace": "agents"}
            assert (await ask(PATH, {**body, "tool_choice": named}))[0] == 200
            given = engine.format.decode(engine.requests[-1].input_ids)
            assert given.endswith('{"name": "agents__search", "arguments": {')

    run(scenario())


def test_messages_of_the_system_at_the_beginning_are_one_and_thinking_can_be_switched_off() -> None:
    leads = [{"role": role, "content": text} for role, text in (("developer", "b"), ("system", "c"))]

    async def scenario() -> None:
        async with scripted_front("qwen3", *["a<|im_end|>"] * 4) as (ask, engine):
            body = {"instructions": "a", "input": [*leads, *ASK], "reasoning": {"effort": "none", "summary": "auto"}}
            assert (await ask(PATH, body))[0] == 200
            prompt = engine.format.decode(engine.requests[0].input_ids)
            assert prompt.startswith("<|im_start|>system\na\n\nb\n\nc<|im_end|>\n<|im_start|>user\nWhat is it?")
            assert prompt.endswith("<think>\n\n</think>\n\n")
        async with scripted_front("gptoss", "<|channel|>final<|message|>a<|return|>") as (ask, engine):
            assert (await ask(PATH, {"input": "a", "reasoning": {"effort": "high"}}))[0] == 200
            assert "Reasoning: high" in engine.format.decode(engine.requests[0].input_ids)

    run(scenario())


def test_what_was_used_longest_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with scripted_front("qwen2.5", *["a<|im_end|>"] * 9) as (ask, _):
            answers = [(await ask(PATH, {"input": "x" * 500}))[1]]
            monkeypatch.setattr(
                stored, "MOST_CHARACTERS", int(2.5 * (len(json.dumps(answers[0])) + 500 + responses.ITEM_COSTS))
            )
            for before in (answers[0]["id"], "", ""):
                more = {"previous_response_id": before} if before else {}
                answers.append((await ask(PATH, {"input": "x" * 500, **more}))[1])
            kept = [(await ask(f"{PATH}/{answer['id']}", None, "GET"))[0] for answer in answers]
            assert kept == [404, 404, 200, 200]
            named = [{"type": "item_reference", "id": answer["output"][0]["id"]} for answer in answers]
            found = [(await ask(PATH, {"input": [one, *ASK], "store": False}))[0] for one in named]
            assert found == [400, 400, 200, 200]

    run(scenario())


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input: "),
    ({"input": None}, "input: Field required"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]}, "input[0].content[0]"),
    ({"input": [*ASK, {"type": "web_search_call", "id": "a"}]}, "input[1]: Input tag 'web_search_call'"),
    (
        {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}]},
        "input[0] tool_calls[0] (f)",
    ),
    ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}]}, "input[0].encrypted_content"),
    ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "slimelite:?"}]}, "encrypted_content"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "msg_1"),
    ({"tools": [{"type": "local_shell"}]}, "tools[0]: Input tag 'local_shell'"),
    ({"tools": [SEARCH, SEARCH]}, "two tools are shown to the model as 'search'"),
    ({"tools": [SEARCH], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    (
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {}}}},
        "the scripted engine cannot enforce schemas",
    ),
    ({"include": ["message.output_text.logprobs"]}, "include[0]"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "a"}}, "prompt"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_tokens": 5}, "max_tokens: unknown parameter"),
]


def test_what_cannot_be_served_is_an_error_that_names_it() -> None:
    async def scenario() -> None:
        async with scripted_front("qwen2.5") as (ask, engine):
            for change, named in REFUSED:
                status, said = await ask(PATH, {"input": ASK, **change})
                assert (status, named in said["error"]["message"]) == (400, True), said
                assert said["error"]["type"] == "invalid_request_error"
            assert engine.requests == []

    run(scenario())


def test_an_error_in_the_middle_of_a_stream_is_an_event_of_its_type() -> None:
    async def scenario() -> None:
        async with scripted_front("qwen2.5", "abc def<|im_end|>") as (ask, engine):
            whole = engine.stream

            async def breaks(request: Any, on_tokens: Any) -> Any:
                await whole(request, on_tokens)
                await asyncio.sleep(0.05)
                raise ConnectionError("the engine is gone")

            engine.stream = breaks
            status, events = await ask(PATH, {"input": "a", "stream": True})
            name, data = events[-1]
            assert (status, name, data["type"], data["message"]) == (200, "error", "error", "the engine is gone")
            assert data["sequence_number"] == len(events) - 1
            assert data["code"] == "service_unavailable"

    run(scenario())
