"""A program of ``openai-agents`` against the front, in a session; `scripts/test_clients.sh` runs it."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import urllib.request

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

KEY = os.environ["API_KEY"]


@function_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"12 degrees in {city}"


def agent(kind: type, url: str, key: str) -> Agent:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    model = kind(model="ruled", openai_client=client)
    return Agent(name="Weather", instructions="Answer with the tool.", tools=[get_weather], model=model)


async def tries(kind: type) -> None:
    """An agent that asks by this API, whole, streamed and in a session."""
    asked = agent(kind, os.environ["RULED_URL"], KEY)
    result = await Runner.run(asked, "What is the weather in Paris?")
    assert result.final_output == "It is 12 degrees in Paris.", result.final_output
    streamed = Runner.run_streamed(asked, "What is the weather in Paris?")
    kinds = [event.type async for event in streamed.stream_events()]
    assert streamed.final_output == "It is 12 degrees in Paris."
    assert kinds.count("raw_response_event") > 10

    headers = {"Authorization": f"Bearer {KEY}"}
    with urllib.request.urlopen(
        urllib.request.Request(os.environ["RULED_URL"] + "/sessions", b"{}", headers)
    ) as answer:
        opened = json.load(answer)
    inside = agent(kind, os.environ["RULED_URL"] + opened["path"], opened["key"])
    await Runner.run(inside, "What is the weather in Paris?")
    with urllib.request.urlopen(
        urllib.request.Request(os.environ["RULED_URL"] + opened["path"], headers=headers)
    ) as answer:
        turns = json.load(answer)["turns"]
    assert [turn["parent"] for turn in turns] == [None, 0], "the second turn goes on on the tokens of the first"


async def main() -> None:
    set_tracing_disabled(True)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        await tries(kind)
    version = importlib.metadata.version("openai-agents")
    print(f"openai-agents {version}: an agent with a tool, by Chat and by Responses, whole, streamed and in a session")


if __name__ == "__main__":
    asyncio.run(main())
