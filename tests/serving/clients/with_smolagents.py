"""Agents of ``smolagents`` against the front; `scripts/test_clients.sh` runs it."""

from __future__ import annotations

import importlib.metadata

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool
from smolagents.monitoring import LogLevel
from weather import KEY, QUESTION, RULED, get_weather, in_session

TOOL = tool(get_weather)
QUIET = {"verbosity_level": LogLevel.OFF}


def model(url: str, key: str) -> OpenAIServerModel:
    return OpenAIServerModel("ruled", api_base=f"{url}/v1", api_key=key)


def main() -> None:
    for settings in ({}, {"stream_outputs": True}):
        for kind in (ToolCallingAgent, CodeAgent):
            said = kind(tools=[TOOL], model=model(RULED, KEY), max_steps=3, **settings, **QUIET).run(QUESTION)
            assert "12 degrees in Paris" in str(said), (kind, said)
    agent = CodeAgent([TOOL], model(RULED, KEY), use_structured_outputs_internally=True, max_steps=3, **QUIET)
    said = agent.run(QUESTION)
    assert "12 degrees in Paris" in str(said), said

    def work(url: str, key: str) -> None:
        ToolCallingAgent(tools=[TOOL], model=model(url, key), max_steps=3, **QUIET).run(QUESTION)

    assert in_session(work) == [None, None]  # it sends calls and results as texts of its own
    version = importlib.metadata.version("smolagents")
    print(
        f"\nsmolagents {version}: `ToolCallingAgent` and `CodeAgent` with a tool, whole, streamed and in a session; "
        "code in structured output"
    )


if __name__ == "__main__":
    main()
