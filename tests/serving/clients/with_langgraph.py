"""An agent on langgraph, by ``langchain-openai``, against the front; `scripts/test_clients.sh` runs it."""

from __future__ import annotations

import importlib.metadata

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from weather import ANSWER, KEY, QUESTION, RULED, STRUCTURED, get_weather, in_session


class Weather(BaseModel):
    city: str
    degrees: int


def chat(url: str, key: str, responses: bool) -> ChatOpenAI:
    return ChatOpenAI(model="ruled", base_url=f"{url}/v1", api_key=key, max_retries=0, use_responses_api=responses)


def main() -> None:
    ask = {"messages": [{"role": "user", "content": QUESTION}]}
    for responses in (False, True):
        model = chat(RULED, KEY, responses)
        agent = create_agent(model, tools=[get_weather])
        said = agent.invoke(ask)["messages"]
        assert [message.type for message in said] == ["human", "ai", "tool", "ai"], said
        assert said[-1].text == ANSWER, said
        chunks = [chunk for chunk, _ in agent.stream(ask, stream_mode="messages")]
        assert len(chunks) > 10
        assert "".join(chunk.text for chunk in chunks[-40:]).endswith(ANSWER)
        assert model.with_structured_output(Weather).invoke(QUESTION) == Weather(**STRUCTURED)

        def work(url: str, key: str, responses: bool = responses) -> None:
            create_agent(chat(url, key, responses), tools=[get_weather]).invoke(ask)

        assert in_session(work) == [None, 0], "the second turn goes on on the tokens of the first"
    version, openai = map(importlib.metadata.version, ("langgraph", "langchain-openai"))
    print(
        f"langgraph {version}: an agent with a tool by `langchain-openai` {openai}, Chat and Responses, "
        "whole, streamed and in a session; structured output"
    )


if __name__ == "__main__":
    main()
