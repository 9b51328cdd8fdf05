"""The official ``anthropic`` client against the front; `scripts/test_clients.sh` runs it."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import anthropic
from anthropic import beta_tool
from weather import ANSWER, get_weather, in_session

KEY = os.environ["API_KEY"]
ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOL = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def refused(kind: type[Exception], ask: Callable[[], Any]) -> Any:
    """The error of this kind that asking ends in."""
    try:
        ask()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def runs_tools(url: str, key: str) -> None:
    """The tool runner of the SDK calls the function and sends its result, until the model calls no more."""
    client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
    asked = {"model": "ruled", "max_tokens": 100, "messages": ASK, "tools": [beta_tool(get_weather)]}
    turns = list(client.beta.messages.tool_runner(**asked))
    assert [turn.stop_reason for turn in turns] == ["tool_use", "end_turn"]
    assert turns[-1].content[0].text == ANSWER


def streams_tools(client: anthropic.Anthropic) -> None:
    """The same, where each turn is a stream."""
    asked = {"model": "ruled", "max_tokens": 100, "messages": ASK, "tools": [beta_tool(get_weather)], "stream": True}
    runner, turns, pieces = client.beta.messages.tool_runner(**asked), [], 0
    for stream in runner:
        pieces += len(list(stream))
        turns.append(stream.get_final_message())
    assert [turn.stop_reason for turn in turns] == ["tool_use", "end_turn"]
    assert turns[-1].content[0].text == ANSWER
    assert pieces > 10


def main() -> None:
    client = anthropic.Anthropic(base_url=os.environ["RULED_URL"], api_key=KEY, max_retries=0)
    common = {"model": "ruled", "max_tokens": 100}
    said = client.messages.create(**common, messages=ASK, system="Be short.")
    assert (said.content[0].text, said.stop_reason) == ("It is 42.", "end_turn")
    assert said.usage.output_tokens > 3
    said = client.messages.create(**common, messages=ASK, stop_sequences=[" 4"])
    assert (said.content[0].text, said.stop_reason, said.stop_sequence) == ("It is", "stop_sequence", " 4")
    said = client.messages.create(
        **{**common, "max_tokens": 2}, messages=ASK, extra_body={"temperature": 0.3, "top_k": 5}
    )
    assert said.stop_reason == "max_tokens"
    with client.messages.stream(**common, messages=ASK, system=[{"type": "text", "text": "Be short."}]) as stream:
        assert "".join(stream.text_stream) == "It is 42."
        assert stream.get_final_message().stop_reason == "end_turn"

    called = client.messages.create(**common, messages=ASK, tools=[TOOL], tool_choice={"type": "auto"})
    assert called.stop_reason == "tool_use"
    text, use = called.content
    assert (text.text, use.name, use.input) == ("I look it up.", "get_weather", {"city": "Paris"})
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "12 degrees"}]}
    history = [*ASK, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    said = client.messages.create(**common, messages=history, tools=[TOOL])
    assert said.content[0].text == "It is 12 degrees in Paris."
    with client.messages.stream(**common, messages=ASK, tools=[TOOL]) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["text", "tool_use"]
    assert final.content[1].input == {"city": "Paris"}
    counted = client.messages.count_tokens(model="ruled", messages=ASK, system="Be short.").input_tokens
    assert 10 < counted < 200
    assert counted < client.messages.count_tokens(model="ruled", messages=ASK, tools=[TOOL]).input_tokens

    runs_tools(os.environ["RULED_URL"], KEY)
    streams_tools(client)
    assert in_session(runs_tools) == [None, 0], "the second turn goes on on the tokens of the first"

    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        (use,) = client.messages.create(**common, messages=ASK, tools=[TOOL], tool_choice=choice).content
        assert (use.name, use.input) == ("get_weather", {"city": "Paris"})
    unknown = partial(client.messages.create, **common, messages=ASK, tools=[TOOL], tool_choice={"type": "x"})
    assert "tool_choice" in refused(anthropic.BadRequestError, unknown).message
    stranger = anthropic.Anthropic(base_url=os.environ["RULED_URL"], api_key="wrong")
    error = refused(anthropic.AuthenticationError, partial(stranger.messages.create, **common, messages=ASK))
    assert error.body["error"]["type"] == "authentication_error"
    print(
        f"anthropic {anthropic.__version__}: Messages, streams, tools, the SDK's tool runner (whole, streamed and in a "
        "session), stop sequences, counts, errors"
    )


if __name__ == "__main__":
    main()
