"""The HTTP front over raw HTTP: OpenAI's and Anthropic's dialects, keys, errors, clients that go away."""

from __future__ import annotations

import asyncio
import copy
import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from slimelite.engines.protocol import EngineInfo, GenerateRequest, GenerateResult, SamplingParams
from slimelite.serving.format import ChatFormat
from slimelite.serving.replies import TextStream
from slimelite.serving.sessions import Sessions, Turn
from tests.engines.tiny_models import greedy, log_probs
from tests.serving.chat import TOOL, build, tokenizer
from tests.serving.fronts import Asking, engine_front, run, scripted_front

ASK = [{"role": "user", "content": "What is it?"}]
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "a bc"}}\n</tool_call>'
GEMMA = '<|tool_call>call:search{query:<|"|>a bc<|"|>}<tool_call|>'
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
HARMONY = f"{THOUGHT}<|channel|>commentary<|message|>"
TO_SEARCH = '<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"query": "a bc"}'
ATEM = '<atem:function_calls>\n<atem:invoke name="search">\n</atem:invoke>\n</atem:function_calls>'
CALLED = {"name": "search", "arguments": {"query": "a bc"}}
IDS = [10, 20, 30, 40, 50]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("front") / "model")


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder)


def without_ids(calls: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Calls, or blocks, as they are in every answer; each answer has ids of its own."""
    return calls and [{**call, "id": ""} for call in calls]


def merged(chunks: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """The message that the deltas of a stream add up to, and the finish reason."""
    message: dict[str, Any] = {"content": ""}
    reason = None
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert reason is None, "a chunk follows the end"
            delta, reason = choice["delta"], choice["finish_reason"]
            for name in ("content", "reasoning_content"):
                if delta.get(name):
                    message[name] = message.get(name, "") + delta[name]
            for call in delta.get("tool_calls", []):
                assert call.pop("index") == len(message.setdefault("tool_calls", []))
                message["tool_calls"].append(call)
    assert reason is not None
    return message, reason


REPLIES = [
    ("qwen2.5", "It is 42.<|im_end|>", {}, "stop"),
    ("qwen2.5", " \n It is\n\n 42.  \n<|im_end|>", {}, "stop"),
    ("qwen2.5", "½ 你好 😀 é<|im_end|>", {}, "stop"),
    ("qwen2.5", "cut off in the mid", {}, "length"),
    ("qwen2.5", f"I look.\n{CALL}<|im_end|>", {}, "tool_calls"),
    ("qwen2.5", f"{CALL}\n{CALL}<|im_end|>", {}, "tool_calls"),
    ("qwen2.5", "I <tool_ <tool_call>{no}</tool_call> it<|im_end|>", {}, "stop"),
    ("qwen2.5", "one two three<|im_end|>", {"stop": ["x", " thr"]}, "stop"),
    ("qwen3", "<think>\nLet me see.\n\n</think>\n\nIt is 42.<|im_end|>", {}, "stop"),
    ("qwen3", "<think>\nendless", {}, "length"),
    ("qwen3", "<think>\none two thr", {"stop": ["x", " thr"]}, "stop"),
    ("qwen3", f"<think>\nLet me see\n</think>\n\nAh.{CALL}<|im_end|>", {}, "tool_calls"),
    ("qwen3", "<thin is no thought<|im_end|>", {}, "stop"),
    ("qwen3.5", "Let me see.\n</think>\n\nIt is 42.<|im_end|>", {}, "stop"),
    ("qwen3.5", "Endless", {}, "length"),
    ("llama3", '{"name": "search", "parameters": {"query": "a"}}<|eot_id|>', {}, "tool_calls"),
    ("llama3", '{"a": 1} is JSON<|eot_id|>', {}, "stop"),
    ("mistral", '[TOOL_CALLS][{"name": "search", "arguments": {"query": "a"}}]</s>', {}, "tool_calls"),
    # templates of real models
    ("gemma4_v5", f"<|channel>thought\nHm.\n<channel|>I look.{GEMMA}{GEMMA}<|tool_response>", {}, "tool_calls"),
    ("gemma4_v5", "<|channel>thought\nHm.\n<channel|>It is 42.<turn|>", {}, "stop"),
    ("gptoss", f"{HARMONY}I look.<|end|><|start|>assistant{TO_SEARCH}<|call|>", {}, "tool_calls"),
    ("gptoss", f"{THOUGHT}<|channel|>final<|message|>It is <42>.<|return|>", {}, "stop"),
    ("gptoss", f"{THOUGHT}<|channel|>final<|message|>one two thr<|return|>", {"stop": ["x", " thr"]}, "stop"),
    ("gptoss", "<|channel|>analysis<|message|>endless", {}, "length"),
    ("gptoss", f"{THOUGHT}<|channel|>comm", {}, "length"),
    ("gptoss", "to be or not<|return|>", {}, "stop"),
    ("gptoss", f"{THOUGHT}{TO_SEARCH[:-9]}<|call|>", {}, "stop"),
    ("lfm2_2_5_v2", "<think>Hm.</think>I look.<|tool_call_start|>[search(query='a')]<|tool_call_end|><|im_end|>", {},
     "tool_calls"),
    ("muse_glimmer", f" to=self<|message|>Hm.<|eom|><|start|>assistant to=search<|message|>{ATEM}<|eot|>", {},
     "tool_calls"),
    ("muse_glimmer", " to=user<|message|>It is 42.<|eot|>", {}, "stop"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "reply", "extra", "reason"), REPLIES, ids=str)
def test_a_stream_adds_up_to_the_whole_answer(family: str, reply: str, extra: dict[str, Any], reason: str) -> None:
    body = {"messages": ASK, "tools": [TOOL], **extra}

    async def scenario() -> None:
        async with scripted_front(family, *[reply] * 4) as (ask, _):
            status, whole = await ask("/v1/chat/completions", body)
            assert status == 200, whole
            expected = whole["choices"][0]["message"]
            message, ended = merged(await ask.stream("/v1/chat/completions", body))
            assert (ended, whole["choices"][0]["finish_reason"]) == (reason, reason)
            if reason == "tool_calls":  # white space before a call is not known to be one's until the call comes
                message["content"] = message["content"].strip()
            assert message["content"] == (expected["content"] or "")
            assert message.get("reasoning_content") == expected.get("reasoning_content")
            assert without_ids(message.get("tool_calls")) == without_ids(expected.get("tool_calls"))
            assert not any(stop in message["content"] for stop in extra.get("stop", []))
            await check_anthropic(ask, extra, expected, reason)

    run(scenario())


def test_ids_of_calls_are_those_of_one_reply() -> None:
    """An agent that gets an id again takes its call for answered. A resumed run's sessions repeat them."""
    body = {"messages": ASK, "tools": [TOOL], "n": 2}

    async def ids(ask: Asking) -> list[str]:
        _, whole = await ask("/v1/chat/completions", body)
        return [call["id"] for choice in whole["choices"] for call in choice["message"]["tool_calls"]]

    async def scenario() -> None:
        async with scripted_front("mistral", *[f"[TOOL_CALLS]{json.dumps([CALLED] * 2)}</s>"] * 10) as (ask, _):
            found = await ids(ask) + await ids(ask)
            for name in ("a", "b", "a"):
                _, opened = await ask("/sessions", {"id": name})
                found += await ids(Asking(ask.http, ask.url + opened["path"], opened["key"]))
                await ask(opened["path"], None, "DELETE")
            assert all(re.fullmatch("[a-z0-9]{9}", one) for one in found)
            assert len({*found[:-4]}) == len(found[:-4]) == 16
            assert found[-4:] == found[8:12]

    run(scenario())


@pytest.mark.parametrize(("family", "said"), [("llama3", '{"name": "Bob", "age": 3}'), ("qwen2.5", CALL)])
def test_without_tools_nothing_is_a_call(family: str, said: str) -> None:
    """A model that is asked for JSON may well write an object with a name."""
    body = {"messages": ASK, "max_tokens": 99}

    async def scenario() -> None:
        async with scripted_front(family, *[said + tokenizer(family).eos_token] * 5) as (ask, _):
            for more in ({}, {"tools": [TOOL], "tool_choice": "none"}):
                _, whole = await ask("/v1/chat/completions", {**body, **more})
                choice = whole["choices"][0]
                assert (choice["message"]["content"], choice["finish_reason"]) == (said, "stop")
                assert "tool_calls" not in choice["message"]
            chunks = await ask.stream("/v1/chat/completions", body)
            assert merged(chunks) == ({"content": said}, "stop")
            assert len(chunks) > 3, "it came in one piece"
            _, theirs = await ask("/v1/messages", body)
            assert (theirs["content"], theirs["stop_reason"]) == ([{"type": "text", "text": said}], "end_turn")
            _, raw = await ask("/v1/completions", {"prompt": "a", "max_tokens": 99})
            assert raw["choices"][0]["finish_reason"] == "stop"

    run(scenario())


def test_tools_are_refused_where_no_call_could_be_read() -> None:
    tool = {"name": "search", "input_schema": {"type": "object"}}
    asked = {
        "/v1/chat/completions": {"messages": ASK, "tools": [TOOL]},
        "/v1/messages": {"messages": ASK, "tools": [tool], "max_tokens": 9},
        "/v1/messages/count_tokens": {"messages": ASK, "tools": [tool]},
    }

    async def scenario() -> None:
        async with scripted_front("deepseekv3", "It is 42.") as (ask, engine):
            for path, body in asked.items():
                status, said = await ask(path, body)
                assert (status, "shows the model no tools" in said["error"]["message"]) == (400, True)
            assert engine.requests == []
            assert (await ask("/v1/chat/completions", {"messages": ASK}))[0] == 200

    run(scenario())


def test_thinking_that_nothing_opened_is_streamed_once() -> None:
    """Its end comes when it has been shown as content, and neither that nor what follows is repeated."""
    text = "Let me see.\n</think>\n\nIt is 42."

    async def scenario() -> None:
        async with scripted_front("qwen3", *[f"{text}<|im_end|>"] * 3) as (ask, _):
            _, whole = await ask("/v1/chat/completions", {"messages": ASK})
            said = whole["choices"][0]["message"]
            assert (said["reasoning_content"], said["content"]) == ("Let me see.", "It is 42.")
            message, _ = merged(await ask.stream("/v1/chat/completions", {"messages": ASK}))
            assert message == {"content": text}
            _, events = await ask("/v1/messages", {"messages": ASK, "max_tokens": 100, "stream": True})
            deltas = [data["delta"] for name, data in events if name == "content_block_delta"]
            assert "".join(delta["text"] for delta in deltas) == text
        async with scripted_front("qwen3", f"Hm.\n</think>\n\nI look.{CALL}<|im_end|>") as (ask, _):
            message, reason = merged(await ask.stream("/v1/chat/completions", {"messages": ASK, "tools": [TOOL]}))
            assert (message["content"], reason) == ("Hm.\n</think>\n\nI look.", "tool_calls")
        empty = "\n</think>\n\nIt is <tool_call> 42."
        async with scripted_front("qwen3", f"{empty}<|im_end|>") as (ask, _):
            message, _ = merged(await ask.stream("/v1/chat/completions", {"messages": ASK}))
            assert message == {"content": empty}

    run(scenario())


def test_a_second_start_of_the_thinking_in_several_tokens_is_not_shown() -> None:
    chat_format = ChatFormat(tokenizer("qwen3.5"))
    text = TextStream(chat_format, Turn(0, None, tuple(ASK), "<think>\n", [1]), ())
    ids = [token for part in ("<thi", "nk>Hm", "</think>", "Yes") for token in chat_format.encode(part)]
    assert ["".join(said) for said in zip(*(text.add([token]) for token in ids), strict=True)] == ["Hm", "Yes"]


async def check_anthropic(ask: Any, extra: dict[str, Any], expected: dict[str, Any], reason: str) -> None:
    function = TOOL["function"]
    tool = {"name": function["name"], "input_schema": function["parameters"]}
    body = {"max_tokens": 100, "messages": ASK, "tools": [tool], "stop_sequences": extra.get("stop", [])}
    status, whole = await ask("/v1/messages", body)
    assert status == 200, whole
    by_kind = {kind: [b for b in whole["content"] if b["type"] == kind] for kind in ("thinking", "text", "tool_use")}
    assert "".join(block["text"] for block in by_kind["text"]) == (expected["content"] or "")
    assert [block["thinking"] for block in by_kind["thinking"]] == [
        text for text in [expected.get("reasoning_content")] if text
    ]
    calls = [call["function"] for call in expected.get("tool_calls", [])]
    assert [(b["name"], b["input"]) for b in by_kind["tool_use"]] == [
        (call["name"], json.loads(call["arguments"])) for call in calls
    ]
    stopped = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}[reason]
    stopped = "stop_sequence" if extra else stopped
    assert (whole["stop_reason"], whole["stop_sequence"]) == (stopped, " thr" if extra else None)
    _, events = await ask("/v1/messages", {**body, "stream": True})
    blocks: list[dict[str, Any]] = []
    for name, data in events:
        assert name == data["type"]
        if name == "content_block_start":
            assert data["index"] == len(blocks)
            blocks.append(
                data["content_block"] | {"input": ""} if "input" in data["content_block"] else data["content_block"]
            )
        elif name == "content_block_delta":
            assert data["index"] == len(blocks) - 1
            (key,) = data["delta"].keys() - {"type"}
            blocks[-1]["input" if key == "partial_json" else key] += data["delta"][key]
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["input"])
        elif block["type"] == "text" and calls:
            block["text"] = block["text"].strip()
    assert without_ids(blocks) == without_ids(whole["content"])
    assert events[0][1]["message"]["usage"]["input_tokens"] > 10
    assert events[-2][1]["delta"] == {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
    assert events[-1][0] == "message_stop"


def test_a_call_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By all of OpenAI's and Anthropic's choices; what is given of it is hidden in a stream like the rest of it."""
    arguments = '"query": "a bc"}}\n</tool_call><|im_end|>'
    tool = {"name": "search", "input_schema": TOOL["function"]["parameters"]}
    named = {"type": "function", "function": {"name": "search"}}

    async def scenario() -> None:
        async with scripted_front("qwen2.5", *[arguments] * 9) as (ask, engine):
            for choice, theirs in (("required", {"type": "any"}), (named, {"type": "tool", "name": "search"})):
                body = {"messages": ASK, "tools": [TOOL], "tool_choice": choice, "logprobs": True}
                status, whole = await ask("/v1/chat/completions", body)
                assert status == 200, whole
                said = whole["choices"][0]
                (call,) = said["message"]["tool_calls"]
                assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
                    "search",
                    {"query": "a bc"},
                )
                assert (said["message"]["content"], said["finish_reason"]) == (None, "tool_calls")
                assert len(said["logprobs"]["content"]) == whole["usage"]["completion_tokens"]
                chunks = await ask.stream("/v1/chat/completions", body)
                message, reason = merged(chunks)
                assert (message["content"], reason) == ("", "tool_calls")
                assert without_ids(message["tool_calls"]) == without_ids([call])
                entries = [c["choices"][0].get("logprobs") or {"content": []} for c in chunks]
                assert sum(len(each["content"]) for each in entries) == whole["usage"]["completion_tokens"]
                body = {"messages": ASK, "tools": [tool], "tool_choice": theirs, "max_tokens": 99}
                _, whole = await ask("/v1/messages", body)
                (block,) = whole["content"]
                assert (block["name"], block["input"], whole["stop_reason"]) == (
                    "search",
                    {"query": "a bc"},
                    "tool_use",
                )
                _, events = await ask("/v1/messages", {**body, "stream": True})
                starts = [data["content_block"]["name"] for name, data in events if name == "content_block_start"]
                assert starts == ["search"]
            held = EngineInfo("scripted", 3, 8192, 64, seeds=False, schemas=True)
            monkeypatch.setattr(engine, "info", AsyncMock(return_value=held))
            form = {"response_format": {"type": "json_object"}}
            body = {"messages": ASK, "tools": [TOOL], "tool_choice": "required", **form}
            assert (await ask("/v1/chat/completions", body))[0] == 200
            assert engine.requests[-1].params.json_schema is None
            prompts = {engine.format.decode(request.input_ids)[-60:] for request in engine.requests}
            assert [prompt.endswith('<tool_call>\n{"name": "search", "arguments": {') for prompt in prompts] == [True]

    run(scenario())


def test_a_reply_may_have_one_call_at_most() -> None:
    tool = {"name": "search", "input_schema": TOOL["function"]["parameters"]}
    one = {"messages": ASK, "tools": [TOOL], "parallel_tool_calls": False}
    theirs = {"type": "auto", "disable_parallel_tool_use": True}
    alone = {"messages": ASK, "tools": [tool], "tool_choice": theirs, "max_tokens": 500}

    async def scenario() -> None:
        async with scripted_front("qwen2.5", *[f"abc {CALL}\n{CALL}<|im_end|>"] * 5) as (ask, _):
            (choice,) = (await ask("/v1/chat/completions", one))[1]["choices"]
            assert (choice["message"]["content"], choice["finish_reason"]) == ("abc", "tool_calls")
            assert len(choice["message"]["tool_calls"]) == 1
            said, reason = merged(await ask.stream("/v1/chat/completions", one))
            assert (said["content"], len(said["tool_calls"]), reason) == ("abc", 1, "tool_calls")
            _, whole = await ask("/v1/messages", alone)
            assert [block["type"] for block in whole["content"]] == ["text", "tool_use"]
            assert (whole["stop_reason"], whole["stop_sequence"]) == ("tool_use", None)
            _, events = await ask("/v1/messages", {**alone, "stream": True})
            starts = [data["content_block"]["type"] for name, data in events if name == "content_block_start"]
            assert starts == ["text", "tool_use"]
            text = {**alone, "tool_choice": {**theirs, "disable_parallel_tool_use": "false"}}
            assert (await ask("/v1/messages", text))[0] == 400
            _, free = await ask("/v1/chat/completions", {**one, "parallel_tool_calls": True})
            assert len(free["choices"][0]["message"]["tool_calls"]) == 2

    run(scenario())


def test_log_probs_and_alternatives_are_those_of_the_sampled_distribution(folder: Path, model: PreTrainedModel) -> None:
    body = {"messages": ASK, "max_tokens": 9, "logprobs": True, "seed": 3, "return_token_ids": True}

    async def scenario() -> None:
        async with engine_front(folder) as (ask, _):
            for temperature in (0.7, 1.0, 0.0):
                asked = {**body, "temperature": temperature}
                if temperature == 1.0:  # what is given of a call belongs to the prompt
                    asked |= {"tools": [TOOL], "tool_choice": "required"}
                _, whole = await ask("/v1/chat/completions", {**asked, "top_logprobs": 4})
                choice = whole["choices"][0]
                prompt, ids = choice["prompt_token_ids"], choice["token_ids"]
                assert whole["usage"]["completion_tokens"] == len(ids) == len(choice["logprobs"]["content"])
                expected = log_probs(model, prompt, ids, temperature or 1.0)
                found = [entry["logprob"] for entry in choice["logprobs"]["content"]]
                assert (torch.tensor(found) - expected).abs().max() < 1e-4
                for place, entry in enumerate(choice["logprobs"]["content"]):
                    values = [one["logprob"] for one in entry["top_logprobs"]]
                    best = greedy(model, [*prompt, *ids[:place]], 1)
                    assert entry["top_logprobs"][0]["token"] == tokenizer().decode(best)
                    assert values == sorted(values, reverse=True)
                    assert len(values) == 4
                # a stream says the same, token by token; with alternatives it waits for them
                for top in (0, 4):
                    chunks = await ask.stream("/v1/chat/completions", {**asked, "top_logprobs": top})
                    parts = [c["choices"][0].get("logprobs") for c in chunks]
                    entries = [e for part in parts if part for e in part["content"]]
                    assert [e["logprob"] for e in entries] == pytest.approx(found, abs=1e-5)
                    assert [e["token"] for e in entries] == [e["token"] for e in choice["logprobs"]["content"]]
                    assert len(parts) > (9 if top == 0 else 0)

    run(scenario())


def test_completions_echo_what_lm_eval_reads(folder: Path, model: PreTrainedModel) -> None:
    """Raw log-probs of the prompt at any temperature, the best alternative of each token, and one token more."""
    # the request of lm-eval's local-completions for log-likelihoods
    body = {"model": "tiny", "prompt": [IDS, [7, 8, 9]], "temperature": 0, "max_tokens": 1, "logprobs": 1}
    body |= {"seed": 1234, "echo": True}

    async def scenario() -> None:
        async with engine_front(folder) as (ask, _):
            for changes in ({}, {"temperature": 0.5}, {"max_tokens": 0}, {"prompt": IDS}):
                status, whole = await ask("/v1/completions", {**body, **changes})
                assert status == 200, whole
                prompts = [IDS] if "prompt" in changes else body["prompt"]
                assert len(whole["choices"]) == len(prompts)
                for index, (choice, prompt) in enumerate(zip(whole["choices"], prompts, strict=True)):
                    logprobs, more = choice["logprobs"], 0 if "max_tokens" in changes else 1
                    assert choice["index"] == index
                    assert [len(logprobs[name]) for name in logprobs] == [len(prompt) + more] * 4
                    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
                    raw = log_probs(model, prompt[:1], prompt[1:], 1.0).tolist()
                    assert logprobs["token_logprobs"][1 : len(prompt)] == pytest.approx(raw, abs=1e-4)
                    for place in range(1, len(prompt)):
                        (best,) = greedy(model, prompt[:place], 1)
                        top = logprobs["top_logprobs"][place]
                        assert top[tokenizer().decode([best])] == max(top.values())
                        # what lm-eval takes for a greedy answer
                        assert (logprobs["token_logprobs"][place] == max(top.values())) == (best == prompt[place])
                    assert choice["text"].startswith(tokenizer().decode(prompt))
                    if more and "temperature" not in changes:
                        assert logprobs["tokens"][-1] == tokenizer().decode(greedy(model, prompt, 1))

    run(scenario())


def test_completions_of_texts_ids_and_several_with_streams(folder: Path, model: PreTrainedModel) -> None:
    text = tokenizer().decode(IDS)
    body = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}

    async def scenario() -> None:
        async with engine_front(folder) as (ask, _):
            expected = tokenizer().decode(greedy(model, IDS, 12))
            newer = {"temperature": 0, "ignore_eos": True, "max_completion_tokens": 12}  # it wins over the older name
            for named in (newer, {**newer, "max_tokens": 3}):
                _, whole = await ask("/v1/completions", {**named, "prompt": text})
                assert whole["choices"][0]["text"] == expected
            for prompt in (text, [text], IDS, [IDS]):
                _, whole = await ask("/v1/completions", {**body, "prompt": prompt})
                assert whole["choices"][0]["text"] == expected
                assert whole["usage"] == {
                    "prompt_tokens": 5,
                    "completion_tokens": 12,
                    "total_tokens": 17,
                    "prompt_tokens_details": whole["usage"]["prompt_tokens_details"],
                }
            chunks = await ask.stream("/v1/completions", {**body, "prompt": [IDS, text], "logprobs": 0, "echo": False})
            for index in (0, 1):
                parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
                assert "".join(part["text"] for part in parts) == expected
                assert len(parts) > 10, "it came in one piece"
                columns = [part["logprobs"] for part in parts if part["logprobs"]]
                tokens = [token for each in columns for token in each["tokens"]]
                offsets = [offset for each in columns for offset in each["text_offset"]]
                assert len(tokens) == 12
                assert offsets == [len("".join(tokens[:place])) for place in range(12)], "they are places in all of it"

    run(scenario())


def test_texts_that_are_no_chat_begin_as_the_tokenizer_says(folder: Path) -> None:
    async def scenario() -> None:
        async with engine_front(folder, begin="<s>") as (ask, _):
            for prompt, tokens in (("abc?", 3), ("<s>abc?", 3), (IDS, len(IDS))):
                _, whole = await ask("/v1/completions", {"prompt": prompt, "max_tokens": 1})
                assert whole["usage"]["prompt_tokens"] == tokens
            _, whole = await ask("/generate", {"text": "abc?", "sampling_params": {"max_new_tokens": 1}})
            assert whole["meta_info"]["prompt_tokens"] == 3
            _, begun = await ask("/v1/chat/completions", {"messages": ASK, "max_tokens": 1})
        async with engine_front(folder) as (ask, _):
            _, plain = await ask("/v1/chat/completions", {"messages": ASK, "max_tokens": 1})
        assert begun["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"], "a chat template writes its own"

    run(scenario())


def test_generate_streams_all_tokens_so_far_as_sglang_does(folder: Path) -> None:
    params = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": IDS, "sampling_params": params, "return_logprob": True, "rid": "mine"}

    async def scenario() -> None:
        async with engine_front(folder) as (ask, _):
            _, whole = await ask("/generate", body)
            _, session = await ask("/sessions", {})
            agent = Asking(ask.http, ask.url + session["path"], session["key"])
            for asker in (ask, agent):
                *parts, last = await asker.stream("/generate", body)
                assert len(parts) > 10, "it came in one piece"
                for part in parts:
                    meta, count = part["meta_info"], len(part["output_ids"])
                    assert (meta["id"], meta["finish_reason"], meta["completion_tokens"]) == ("mine", None, count)
                    assert part["output_ids"] == whole["output_ids"][:count]
                    assert whole["text"].startswith(part["text"])
                    assert [token for _, token, _ in meta["output_token_logprobs"]] == part["output_ids"]
                found, expected = (
                    [log_prob for log_prob, *_ in each["meta_info"].pop("output_token_logprobs")]
                    for each in (last, copy.deepcopy(whole))
                )
                assert found == pytest.approx(expected, abs=1e-5)
                last["meta_info"]["cached_tokens"] = whole["meta_info"]["cached_tokens"]
                last["meta_info"]["output_token_logprobs"] = whole["meta_info"]["output_token_logprobs"]
                assert last == whole
            status, said = await ask("/generate", {**body, "stream": True, "input_ids": [10**6]})
            assert (status, "token" in said["error"]["message"]) == (400, True), said

    run(scenario())


@pytest.mark.parametrize(
    ("family", "thinking", "prompt_ends"),
    [
        ("qwen3", {"type": "enabled", "budget_tokens": 1024}, "<|im_start|>assistant\n"),
        ("qwen3", {"type": "disabled"}, "<think>\n\n</think>\n\n"),
        ("qwen3.5", {"type": "enabled"}, "<think>\n"),
        ("qwen3.5", {"type": "adaptive"}, "<think>\n"),
        ("qwen3.5", {"type": "disabled"}, "</think>\n\n"),
        ("llama3", {"type": "disabled"}, "assistant\n\n"),
        ("llama3", {"type": "enabled", "budget_tokens": 1024}, "assistant\n\n"),
        ("qwen3", {"type": "often"}, None),
    ],
)
def test_anthropics_thinking_sets_the_templates_switch(
    family: str, thinking: dict[str, Any], prompt_ends: str | None
) -> None:
    body = {"messages": ASK, "thinking": thinking}

    async def scenario() -> None:
        async with scripted_front(family, "It is 42.<|im_end|>") as (ask, engine):
            status, said = await ask("/v1/messages", {**body, "max_tokens": 100})
            counted, count = await ask("/v1/messages/count_tokens", body)
            if prompt_ends is None:
                assert (status, counted, "thinking" in said["error"]["message"]) == (400, 400, True)
                return
            assert (status, counted) == (200, 200), said
            ids = engine.requests[0].input_ids
            assert engine.format.decode(ids).endswith(prompt_ends)
            assert len(ids) == count["input_tokens"]

    run(scenario())


def test_several_choices_and_seeds(folder: Path) -> None:
    body = {"messages": ASK, "max_tokens": 8, "n": 3, "seed": 5, "return_token_ids": True, "ignore_eos": True}

    async def scenario() -> None:
        async with engine_front(folder) as (ask, engine):
            _, whole = await ask("/v1/chat/completions", body)
            ids = [choice["token_ids"] for choice in whole["choices"]]
            assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
            prompt = tuple(whole["choices"][0]["prompt_token_ids"])
            requests = [
                GenerateRequest(f"own{i}", prompt, SamplingParams(8, seed=5 + i, ignore_eos=True)) for i in range(3)
            ]
            assert ids == [list(result.output_ids) for result in await engine.generate(requests)]
            assert whole["usage"]["prompt_tokens"] == len(prompt)
            assert whole["usage"]["completion_tokens"] == 24
            chunks = await ask.stream("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
            assert chunks[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
            assert [c["choices"][0]["index"] for c in chunks if "token_ids" in (c["choices"] or [{}])[0]] != []

    run(scenario())


def test_a_reply_to_a_schema_begins_anew_after_a_pause_and_others_go_on() -> None:
    """An engine holds a text to a schema from its first token on."""

    async def scenario(schema: str | None, streams: bool) -> list[int]:
        chat_format, paused = ChatFormat(tokenizer()), asyncio.Event()

        async def sampler(request: GenerateRequest, _: Any) -> GenerateResult:
            if request.request_id.endswith("/0"):
                session.pause()
                paused.set()
                return GenerateResult(request.request_id, [1, 2], [-1.0] * 2, [0] * 2, "abort")
            return GenerateResult(request.request_id, [*request.input_ids[-1:], 9], [-1.0] * 2, [1] * 2, "stop")

        session = Sessions(chat_format, sampler, 100).open("one")
        heard, params = (lambda *_: None) if streams else None, SamplingParams(5, json_schema=schema)
        asked = asyncio.ensure_future(session.sample(session.raw_turn([7]), params, heard))
        await paused.wait()
        await asyncio.sleep(0.01)
        session.resume()
        return list((await asked).output_ids)

    assert run(scenario(None, streams=True)) == [1, 2, 2, 9]
    assert run(scenario("{}", streams=False)) == [7, 9]
    with pytest.raises(ConnectionError, match="send the request again"):
        run(scenario("{}", streams=True))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": ASK}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": ASK, "max_tokens": 9}),
    ],
)
def test_an_answer_names_the_model_that_was_asked_for(path: str, body: dict[str, Any]) -> None:
    """Clients look a name up, and warn of another one."""

    async def scenario() -> None:
        async with scripted_front("qwen2.5", *["Hi.<|im_end|>"] * 2) as (ask, *_):
            status, whole = await ask(path, {**body, "model": "gpt-4o"})
            assert (status, whole["model"]) == (200, "gpt-4o")
            _, unnamed = await ask(path, body)
            assert unnamed["model"] == "tiny"

    run(scenario())
