"""A program of ``pydantic-ai`` against the front, in a session; `scripts/test_clients.sh` runs it."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import urllib.request
from typing import Any

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

KEY, RULED = os.environ["API_KEY"], os.environ["RULED_URL"]


def asked(path: str, body: bytes | None = None) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {KEY}"}
    with urllib.request.urlopen(urllib.request.Request(RULED + path, body, headers)) as got:
        found: dict[str, Any] = json.load(got)
    return found


def agent(kind: type, url: str, key: str) -> Agent:
    made = Agent(
        kind("ruled", provider=OpenAIProvider(base_url=f"{url}/v1", api_key=key)), instructions="Use the tool."
    )

    @made.tool_plain
    def get_weather(city: str) -> str:
        """The weather of a city."""
        return f"12 degrees in {city}"

    return made


async def main() -> None:
    question = "What is the weather in Paris?"
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        one = agent(kind, RULED, KEY)
        assert (await one.run(question)).output == "It is 12 degrees in Paris."
        async with one.run_stream_events(question) as events:
            streamed = [event async for event in events]
        assert len(streamed) > 10
        assert streamed[-1].result.output == "It is 12 degrees in Paris."
        opened = asked("/sessions", b"{}")
        await agent(kind, RULED + opened["path"], opened["key"]).run(question)
        turns = asked(opened["path"])["turns"]
        assert [turn["parent"] for turn in turns] == [None, 0], "the second turn goes on on the tokens of the first"
    version = importlib.metadata.version("pydantic-ai-slim")
    print(f"pydantic-ai {version}: an agent with a tool, by Chat and by Responses, whole, streamed and in a session")


if __name__ == "__main__":
    asyncio.run(main())
