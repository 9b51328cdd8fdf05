"""Programs of ``dspy`` against the front; `scripts/test_clients.sh` runs it."""

from __future__ import annotations

import asyncio
import importlib.metadata

import dspy
from weather import KEY, QUESTION, RULED, get_weather, in_session


class Weather(dspy.Signature):
    """The weather of a city."""

    question: str = dspy.InputField()
    city: str = dspy.OutputField()
    degrees: int = dspy.OutputField()


def model(url: str, key: str) -> dspy.LM:
    return dspy.LM("openai/ruled", api_base=f"{url}/v1", api_key=key, cache=False, num_retries=0)


async def streamed() -> str:
    predict = dspy.streamify(dspy.Predict(Weather), stream_listeners=[dspy.streaming.StreamListener("city")])
    parts = [part async for part in predict(question=QUESTION)]
    assert any(isinstance(part, dspy.streaming.StreamResponse) for part in parts), parts
    return str(parts[-1].city)


def main() -> None:
    lm = model(RULED, KEY)
    for adapter in (dspy.ChatAdapter(), dspy.JSONAdapter()):
        with dspy.context(lm=lm, adapter=adapter):
            said = dspy.Predict(Weather)(question=QUESTION)
            assert (said.city, said.degrees) == ("Paris", 12), said
    with dspy.context(lm=lm, adapter=dspy.ChatAdapter()):
        assert asyncio.run(streamed()) == "Paris"
        said = dspy.ReAct("question -> city, degrees: int", tools=[get_weather], max_iters=3)(question=QUESTION)
        assert said.trajectory["observation_0"] == "12 degrees in Paris", said
        assert said.city == "Paris"

    def work(url: str, key: str) -> None:
        with dspy.context(lm=model(url, key), adapter=dspy.ChatAdapter()):
            dspy.Predict(Weather)(question=QUESTION)

    assert in_session(work) == [None]
    version = importlib.metadata.version("dspy")
    print(
        f"dspy {version}: `Predict` by `ChatAdapter`, whole, streamed and in a session, and by `JSONAdapter`; `ReAct` "
        "with a tool; not: structured output, which it does not ask of a model that it does not know"
    )


if __name__ == "__main__":
    main()
