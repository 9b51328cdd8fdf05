"""The official ``openai`` client against the front; `scripts/test_clients.sh` runs it."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Callable
from functools import partial
from typing import Any

import openai

KEY = os.environ["API_KEY"]
ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def client(name: str, path: str = "", key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=os.environ[name] + path + "/v1", api_key=key, max_retries=0)


def chats(ruled: openai.OpenAI) -> None:
    said = ruled.chat.completions.create(model="ruled", messages=ASK)
    assert said.choices[0].message.content == "It is 42."
    assert said.choices[0].finish_reason == "stop"
    assert said.usage.total_tokens == said.usage.prompt_tokens + said.usage.completion_tokens
    said = ruled.chat.completions.create(model="ruled", messages=ASK, stop=[" 4"], n=2, seed=1, temperature=0.5)
    assert [choice.message.content for choice in said.choices] == ["It is", "It is"]
    said = ruled.chat.completions.create(model="ruled", messages=ASK, max_completion_tokens=3)
    assert (said.choices[0].finish_reason, said.usage.completion_tokens) == ("length", 3)
    options = {"include_usage": True}
    chunks = list(ruled.chat.completions.create(model="ruled", messages=ASK, stream=True, stream_options=options))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "It is 42."
    assert chunks[-1].usage.completion_tokens > 3
    assert [model.id for model in ruled.models.list()] == ["ruled"]
    assert ruled.models.retrieve("ruled").id == "ruled"


def tools(ruled: openai.OpenAI) -> None:
    """A round trip whole, and one by the client's own reader of streams."""
    said = ruled.chat.completions.create(model="ruled", messages=ASK, tools=[TOOL], tool_choice="auto")
    assert said.choices[0].finish_reason == "tool_calls"
    message = said.choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    result = {"role": "tool", "tool_call_id": call.id, "content": "12 degrees"}
    said = ruled.chat.completions.create(model="ruled", messages=[*ASK, message, result], tools=[TOOL])
    assert said.choices[0].message.content == "It is 12 degrees in Paris."
    with ruled.chat.completions.stream(model="ruled", messages=ASK, tools=[TOOL]) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion().choices[0]
    assert {"content.delta", "tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert final.finish_reason == "tool_calls"
    assert final.message.content == "I look it up."
    assert json.loads(final.message.tool_calls[0].function.arguments) == {"city": "Paris"}
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        said = ruled.chat.completions.create(model="ruled", messages=ASK, tools=[TOOL], tool_choice=choice)
        (call,) = said.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    said = ruled.chat.completions.create(model="ruled", messages=ASK, tools=[TOOL], tool_choice="none")
    assert said.choices[0].message.tool_calls is None


def log_probs(tiny: openai.OpenAI) -> None:
    settings = {"model": "tiny", "messages": ASK, "max_tokens": 5, "logprobs": True, "seed": 2}
    said = tiny.chat.completions.create(**settings, top_logprobs=3)
    content = said.choices[0].logprobs.content
    assert len(content) == said.usage.completion_tokens
    assert all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in content)
    streamed = [c.choices[0] for c in tiny.chat.completions.create(**settings, stream=True)]
    entries = [entry for choice in streamed if choice.logprobs for entry in choice.logprobs.content]
    assert [entry.token for entry in entries] == [entry.token for entry in content]
    said = tiny.completions.create(model="tiny", prompt="abc", max_tokens=4, echo=True, logprobs=2, temperature=0)
    found = said.choices[0].logprobs
    assert said.choices[0].text.startswith("abc")
    assert found.token_logprobs[0] is None
    assert len(found.tokens) == len(found.text_offset) == len(found.top_logprobs)
    parts = tiny.completions.create(model="tiny", prompt=["abc", "d"], max_tokens=4, n=2, stream=True)
    assert {part.choices[0].index for part in parts} == {0, 1, 2, 3}


def responses(ruled: openai.OpenAI) -> None:
    said = ruled.responses.create(model="ruled", input="What is it?", instructions="Be short.", max_output_tokens=3)
    assert (said.status, said.incomplete_details.reason, said.usage.output_tokens) == (
        "incomplete",
        "max_output_tokens",
        3,
    )
    said = ruled.responses.create(model="ruled", input="What is it?")
    assert (said.output_text, said.status, said.usage.total_tokens) == (
        "It is 42.", "completed", said.usage.input_tokens + said.usage.output_tokens)  # fmt: skip
    again = ruled.responses.create(model="ruled", input="Is it?", previous_response_id=said.id)
    assert again.usage.input_tokens > said.usage.total_tokens
    assert ruled.responses.retrieve(said.id) == said
    ruled.responses.delete(said.id)
    lost = partial(ruled.responses.create, model="ruled", input="Is it?", previous_response_id=said.id)
    assert refused(openai.BadRequestError, lost).code == "previous_response_not_found"
    tool = {"type": "function", "strict": False, **TOOL["function"]}
    asked: dict[str, Any] = {"model": "ruled", "store": False, "tools": [tool, {"type": "web_search"}]}
    with ruled.responses.stream(**asked, input=ASK) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_response()
    assert events[:4] == [
        *("response.created", "response.in_progress"),
        *("response.output_item.added", "response.content_part.added"),
    ]
    text, call = final.output
    assert (text.content[0].text, call.name, call.arguments) == ("I look it up.", "get_weather", '{"city": "Paris"}')
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees"}
    said = ruled.responses.create(**asked, input=[*ASK, text, call, result])
    assert said.output_text == "It is 12 degrees in Paris."
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        (call,) = ruled.responses.create(**asked, input=ASK, tool_choice=choice).output
        assert call.name == "get_weather"
    said = ruled.responses.create(model="ruled", input=ASK, text={"format": {"type": "json_object"}})
    assert json.loads(said.output_text) == {"city": "Paris", "degrees": 12}


def refused(kind: type[Exception], ask: Callable[[], Any]) -> Any:
    """The error of this kind that asking ends in."""
    try:
        ask()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def errors(ruled: openai.OpenAI) -> None:
    create = partial(ruled.chat.completions.create, model="ruled", messages=ASK)
    for settings, param in (
        ({"extra_body": {"beam": 4}}, "beam"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"stream": True, "n": 1000}, "n"),
    ):
        error = refused(openai.BadRequestError, partial(create, **settings))
        assert error.param == param, error
    error = refused(openai.AuthenticationError, client("RULED_URL", key="wrong").models.list)
    assert error.code == "invalid_api_key"


def session() -> None:
    """The second turn goes on on the tokens of the first."""
    headers = {"Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(os.environ["RULED_URL"] + "/sessions", b"{}", headers)
    with urllib.request.urlopen(request) as answer:
        opened = json.load(answer)
    tools(client("RULED_URL", opened["path"], opened["key"]))
    request = urllib.request.Request(os.environ["RULED_URL"] + opened["path"], headers=headers)
    with urllib.request.urlopen(request) as answer:
        turns = json.load(answer)["turns"]
    assert [turn["parent"] for turn in turns] == [None, 0, None, None, None, None]
    before = turns[0]["prompt_ids"] + turns[0]["output_ids"]
    assert turns[1]["prompt_ids"][: len(before)] == before


if __name__ == "__main__":
    ruled = client("RULED_URL")
    chats(ruled)
    tools(ruled)
    errors(ruled)
    responses(ruled)
    log_probs(client("TINY_URL"))
    session()
    print(
        f"openai {openai.__version__}: Chat, Responses, completions, streams, tools, a session, structured output, "
        "log-probs, errors"
    )
