"""Grammars as clients spell them, through the front of the embedded engine, and what becomes of their tokens."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slimelite.engines.params import SamplingParams
from slimelite.rollout.pool import AgentState
from slimelite.rollout.sessions import PooledSessions
from slimelite.samples.sample import CONSTRAINED_TOKENS, Sample
from slimelite.serving.format import ChatFormat
from tests.engines.test_grammars import MALFORMED, OPTIONAL
from tests.serving.chat import TOOL, build, tokenizer
from tests.serving.fronts import engine_front, run

ASK = [{"role": "user", "content": "abc"}]
SCHEMA = {
    "type": "object",
    "properties": {"right": {"type": "boolean"}},
    "required": ["right"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": SCHEMA}}
VERDICT = r'\s*\{\s*"right"\s*:\s*(true|false)\s*\}\s*'
LARK = 'start: "a" "b"+'
TAG = {"structures": [{"begin": "<x>", "schema": SCHEMA, "end": "</x>"}], "triggers": ["<x>"]}
# body -> what the text fits
CHATS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": FORMAT}, VERDICT),
    ({"response_format": {"type": "json_object"}}, r"\s*\{.*\}"),
    ({"guided_json": SCHEMA}, VERDICT),
    ({"guided_json": json.dumps(SCHEMA)}, VERDICT),
    ({"guided_regex": "[xy]{3}"}, "[xy]{3}"),
    ({"regex": "[xy]{3}"}, "[xy]{3}"),
    ({"guided_choice": ["one.", "t(w)o"]}, r"one\.|t\(w\)o"),
    ({"guided_grammar": LARK}, "ab+"),
    ({"ebnf": 'root ::= "a" "b"'}, "ab"),
    ({"structured_outputs": {"json": SCHEMA}}, VERDICT),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    ({"structured_outputs": {"json_object": True}}, r"\s*\{.*\}"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("structured") / "model")


def test_every_spelling_holds_the_reply_to_its_grammar(folder: Path) -> None:
    async def scenario() -> None:
        async with engine_front(folder) as (ask, _):
            for body, fits in CHATS:
                body = {"messages": ASK, "seed": 3, "max_tokens": 300, **body}
                _, answer = await ask("/v1/chat/completions", body)
                (choice,) = answer["choices"]
                if choice["finish_reason"] == "stop":
                    assert re.fullmatch(fits, choice["message"]["content"], re.DOTALL), (body, choice)
                else:  # a random model may fill an object without end
                    assert "object" in str(body), (body, choice)
            chunks = await ask.stream("/v1/chat/completions", {"messages": ASK, "seed": 3, "response_format": FORMAT})
            said = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
            assert re.fullmatch(VERDICT, said)
            _, answer = await ask("/v1/completions", {"prompt": "a", "max_tokens": 50, "guided_regex": "[0-9]{4}"})
            assert re.fullmatch("[0-9]{4}", answer["choices"][0]["text"].removesuffix("<|im_end|>"))
            theirs = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
            _, answer = await ask("/v1/messages", {"messages": ASK, "max_tokens": 300, **theirs})
            assert re.fullmatch(VERDICT, answer["content"][0]["text"])
            flat = {
                "text": {"format": {"type": "json_schema", "name": "verdict", "schema": SCHEMA}},
                "max_output_tokens": 300,
            }
            _, answer = await ask("/v1/responses", {"input": "abc", **flat})
            assert re.fullmatch(VERDICT, answer["output"][0]["content"][0]["text"])
            status, answer = await ask("/v1/responses", {"input": "a", "text": {"format": {"type": "json_schema"}}})
            assert (status, answer["error"]["message"][:12]) == (400, "text.format:")
            for params, fits in (
                ({"json_schema": json.dumps(SCHEMA)}, VERDICT),
                ({"ebnf": LARK}, "ab+"),
                ({"regex": "xy?"}, "xy?"),
            ):
                _, answer = await ask("/generate", {"text": "a", "sampling_params": {**params, "max_new_tokens": 200}})
                assert re.fullmatch(fits, answer["text"].removesuffix("<|im_end|>"))
                assert set(answer["meta_info"]["output_token_constrained"]) == {1}
            _, answer = await ask(
                "/generate", {"text": "a", "sampling_params": {"structural_tag": json.dumps(TAG), "max_new_tokens": 9}}
            )
            assert set(answer["meta_info"]["output_token_constrained"]) == {0}

    run(scenario())


def test_a_malformed_or_oversized_schema_is_a_400(folder: Path) -> None:
    async def scenario() -> None:
        async with engine_front(folder) as (ask, _):
            for name, grammar in {**MALFORMED, "optional": OPTIONAL}.items():
                params = {**grammar, "max_new_tokens": 50, "sampling_seed": 1}
                status, answer = await ask("/generate", {"text": "a", "sampling_params": params})
                assert status == 400, (name, answer)
            assert answer["error"]["message"].startswith("the grammar is too large: Current row has")

    run(scenario())


def test_calls_of_strict_tools_fit_their_schemas(folder: Path) -> None:
    """The model is random: forced calls, and a reply that is either a call or JSON, show that its calls are held."""
    parameters = {**SCHEMA, "properties": {"right": {"type": "boolean"}}}
    strict = {"type": "function", "function": {"name": "judge", "strict": True, "parameters": parameters}}

    async def scenario() -> None:
        async with engine_front(folder) as (ask, _):
            body = {"messages": ASK, "tools": [strict, TOOL], "max_tokens": 700, "seed": 1}
            named = {"type": "function", "function": {"name": "judge"}}
            _, answer = await ask("/v1/chat/completions", {**body, "tool_choice": named, "parallel_tool_calls": False})
            (call,) = answer["choices"][0]["message"]["tool_calls"]
            assert call["function"]["name"] == "judge"
            assert re.fullmatch(VERDICT, call["function"]["arguments"])
            flat = {"type": "function", "name": "judge", "strict": True, "parameters": parameters}
            choice = {"tool_choice": {"type": "function", "name": "judge"}, "parallel_tool_calls": False}
            _, answer = await ask("/v1/responses", {"input": "a", "tools": [flat], **choice})
            assert re.fullmatch(VERDICT, answer["output"][0]["arguments"])
            claude = {"name": "judge", "strict": True, "input_schema": parameters}
            forced = {"type": "tool", "name": "judge", "disable_parallel_tool_use": True}
            _, answer = await ask(
                "/v1/messages", {"messages": ASK, "max_tokens": 700, "tools": [claude], "tool_choice": forced}
            )
            assert answer["content"][0]["input"].keys() == {"right"}
            one_call = {**body, "parallel_tool_calls": False}
            for seed in range(3):
                _, answer = await ask(
                    "/v1/chat/completions", {**one_call, "seed": seed, "tools": [strict], "response_format": FORMAT}
                )
                message = answer["choices"][0]["message"]
                calls = message.get("tool_calls") or []
                assert all(re.fullmatch(VERDICT, call["function"]["arguments"]) for call in calls)
                assert calls or re.fullmatch(VERDICT, message["content"])

    run(scenario())


@pytest.mark.parametrize(
    ("family", "call"), [("qwen2.5", '<tool_call>\n{"name": "judge", "arguments": '), ("glm", None), ("llama3", None)]
)
def test_calls_are_known_as_a_grammar_where_their_arguments_are_json(family: str, call: str | None) -> None:
    chat_format = ChatFormat(tokenizer(family))
    strict: dict[str, Any] = {"type": "function", "function": {"name": "judge", "strict": True, "parameters": SCHEMA}}
    held = chat_format.guided(SamplingParams(5), "", [strict], [])
    if call is None:
        assert held.calls is None
    else:
        assert held.calls is not None
        tag = json.loads(held.calls)
        assert tag == {
            "structures": [{"begin": call, "schema": SCHEMA, "end": "}\n</tool_call>"}],
            "triggers": ["<tool_call>"],
        }
    assert chat_format.guided(SamplingParams(5), "", [TOOL], []) == SamplingParams(5)
    shown = [{**strict, "function": {name: strict["function"][name] for name in ("name", "parameters")}}]
    assert chat_format.prompt(ASK, [strict]) == chat_format.prompt(ASK, shown)


def test_constrained_tokens_are_left_out_of_the_loss_and_counted(folder: Path) -> None:
    """With ``--train-constrained`` they are trained on, over the ids that were allowed."""

    async def scenario(trains: bool) -> None:
        async with engine_front(folder) as (_, engine):
            chat_format = ChatFormat(tokenizer())

            class Pool:
                async def usable(self, own: int | None) -> int:
                    return 0

                async def generate(self, _: int, requests: Any, on_tokens: Any) -> Any:
                    return await engine.generate(requests)

            states = {"one": AgentState(0, True)}
            sessions = PooledSessions(chat_format, Pool(), states, 500, 7, trains_constrained=trains)  # type: ignore[arg-type]
            session = sessions.open("one")
            free = SamplingParams(6, temperature=0.9)
            await session.chat(ASK, None, free)
            held = await session.chat(ASK, None, replace(free, max_new_tokens=100, json_schema=json.dumps(SCHEMA)))
            one, other = session.samples(Sample(index=0))
            assert sum(one.loss_mask or []) == 6
            assert CONSTRAINED_TOKENS not in one.metadata
            assert other.metadata[CONSTRAINED_TOKENS] == len(held.output_ids)
            mask = np.array(other.loss_mask)
            if not trains:
                assert not mask.any()
                assert other.kept is None
                return
            assert mask.all()
            assert other.kept is not None
            assert (other.kept.counts > 0).all()
            assert all(t in ids for t, ids in zip(other.response_ids, other.kept.rows(), strict=True))
            with pytest.raises(ValueError, match="the request sets presence_penalty, so its tokens"):
                await session.chat(ASK, None, replace(free, presence_penalty=1.0))

    run(scenario(False))
    run(scenario(True))


def test_a_reply_goes_on_from_its_beginning_and_effort_reaches_the_template(folder: Path) -> None:
    async def scenario() -> None:
        async with engine_front(folder) as (ask, _):
            goes_on = {"continue_final_message": True, "add_generation_prompt": False, "return_token_ids": True}
            body = {
                "messages": [*ASK, {"role": "assistant", "content": "It is "}],
                "seed": 1,
                "max_tokens": 9,
                **goes_on,
            }
            _, answer = await ask("/v1/chat/completions", body)
            (choice,) = answer["choices"]
            prompt = tokenizer().decode(choice["prompt_token_ids"])
            assert prompt.endswith("<|im_start|>assistant\nIt is ")
            assert not choice["message"]["content"].startswith("It is")
            chunks = await ask.stream("/v1/chat/completions", body)
            said = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
            assert said == choice["message"]["content"]
            held = {**body, "messages": [*ASK, {"role": "assistant", "content": "12"}], "guided_regex": "[0-9]{4}x"}
            _, answer = await ask("/v1/chat/completions", held)
            assert re.fullmatch("[0-9]{2}x", answer["choices"][0]["message"]["content"])
            for wrong, words in (
                ({"messages": ASK}, "the last message must be the assistant's"),
                ({"continue_final_message": False}, "add_generation_prompt=false needs"),
                (
                    {"tools": [TOOL], "tool_choice": "required"},
                    "a reply that begins with text cannot become a tool call",
                ),
            ):
                status, answer = await ask("/v1/chat/completions", {**body, **wrong})
                assert (status, words in answer["error"]["message"]) == (400, True), answer

    run(scenario())
    qwen3, plain = ChatFormat(tokenizer("qwen3")), ChatFormat(tokenizer())
    assert (qwen3.effort_kwargs("none"), qwen3.effort_kwargs("high")) == ({"enable_thinking": False}, {})
    assert plain.effort_kwargs("high") == {}
    plain.tokenizer.chat_template = "{{ reasoning_effort }}"
    assert [plain.effort_kwargs(effort)["reasoning_effort"] for effort in ("none", "medium", "max")] == [
        "low",
        "medium",
        "high",
    ]
