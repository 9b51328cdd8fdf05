"""``instructor`` against the front; `scripts/test_clients.sh` runs it."""

from __future__ import annotations

import importlib.metadata
import os
from typing import Literal

import instructor
import openai
from pydantic import BaseModel
from weather import KEY, QUESTION, RULED, STRUCTURED, in_session

ASK = [{"role": "user", "content": QUESTION}]


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    degrees: int


class Sky(BaseModel):
    sky: Literal["grey", "blue"]
    warm: bool


def client(url: str, key: str, mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0), mode=mode)


def main() -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA):
        asks = client(RULED, KEY, mode).chat.completions
        said = asks.create(model="ruled", response_model=Weather, messages=ASK)
        assert said.model_dump() == STRUCTURED, (mode, said)
        parts = list(asks.create_partial(model="ruled", response_model=Weather, messages=ASK))
        assert len(parts) > (0 if mode is instructor.Mode.TOOLS else 3)  # a call comes in one piece
        assert parts[-1].model_dump() == STRUCTURED, parts[-1]
    # a model with random weights can say nothing else than what the schema allows
    tiny = client(os.environ["TINY_URL"], KEY, instructor.Mode.JSON_SCHEMA).chat.completions
    for seed in range(4):
        tiny.create(model="tiny", response_model=Sky, messages=ASK, seed=seed, max_retries=0, max_tokens=300)

    def work(url: str, key: str) -> None:
        asks = client(url, key, instructor.Mode.TOOLS).chat.completions
        asks.create(model="ruled", response_model=Weather, messages=ASK)

    assert in_session(work) == [None]
    version = importlib.metadata.version("instructor")
    print(
        f"instructor {version}: a model of pydantic by `TOOLS`, `JSON` and `JSON_SCHEMA`, whole and streamed; a session"
    )


if __name__ == "__main__":
    main()
