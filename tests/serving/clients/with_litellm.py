"""``litellm`` against the front, by each of its routes; `scripts/test_clients.sh` runs it."""

from __future__ import annotations

import importlib.metadata
import json
from typing import Any

import litellm
from weather import ANSWER, KEY, QUESTION, RULED, STRUCTURED, in_session

ASK = [{"role": "user", "content": QUESTION}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "It.", "parameters": PARAMETERS}}
SHAPE = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}


def round_trip(**route: Any) -> None:
    """A call and its result."""
    message = litellm.completion(messages=ASK, tools=[TOOL], **route).choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "12 degrees"}
    said = litellm.completion(messages=[*ASK, message.model_dump(), result], tools=[TOOL], **route)
    assert said.choices[0].message.content == ANSWER, said


def main() -> None:
    # of a model that it does not know it asks for no stream of Responses, but makes one up, whose calls are doubled
    known = {"litellm_provider": "openai", "mode": "chat", "supports_native_streaming": True}
    litellm.register_model({"openai/ruled": known, "ruled": known})
    routes: list[dict[str, Any]] = [
        {"model": "openai/ruled", "api_base": f"{RULED}/v1", "api_key": KEY},
        {"model": "hosted_vllm/ruled", "api_base": f"{RULED}/v1", "api_key": KEY},
        {"model": "openai/responses/ruled", "api_base": f"{RULED}/v1", "api_key": KEY},
        {"model": "anthropic/ruled", "api_base": RULED, "api_key": KEY, "max_tokens": 500},
    ]
    for route in routes:
        round_trip(**route)
        chunks = list(litellm.completion(messages=ASK, tools=[TOOL], stream=True, **route))
        built = litellm.stream_chunk_builder(chunks).choices[0].message
        assert built.content == "I look it up.", built
        assert json.loads(built.tool_calls[0].function.arguments) == {"city": "Paris"}
    shape = {"type": "json_schema", "json_schema": {"name": "weather", "strict": True, "schema": SHAPE}}
    for route in routes[:3]:
        said = litellm.completion(messages=ASK, response_format=shape, **route).choices[0].message.content
        assert json.loads(said) == STRUCTURED, said
    too_long = [{"role": "user", "content": "long " * 200_000}]
    try:
        litellm.completion(messages=too_long, **routes[0])
        raise AssertionError("a prompt that is too long was answered")
    except litellm.ContextWindowExceededError:
        pass

    def work(url: str, key: str) -> None:
        round_trip(model="openai/ruled", api_base=f"{url}/v1", api_key=key)

    assert in_session(work) == [None, 0], "the second turn goes on on the tokens of the first"
    version = importlib.metadata.version("litellm")
    print(
        f"litellm {version}: a tool by `openai/`, `hosted_vllm/`, `openai/responses/` and `anthropic/`, whole and "
        "streamed; a session; structured output; a prompt that is too long; not: tools without the package "
        "`mcp`; streamed calls by `openai/responses/`, unless "
        "`register_model` gives the model `supports_native_streaming`"
    )


if __name__ == "__main__":
    main()
