"""A task of ``inspect`` against the front, by each API that it knows; `scripts/test_clients.sh` runs it."""

from __future__ import annotations

import importlib.metadata
import os
import tempfile

KEY, RULED = os.environ["API_KEY"], os.environ["RULED_URL"]
os.environ |= {"ANTHROPIC_BASE_URL": RULED, "ANTHROPIC_API_KEY": KEY}
for api in ("OPENAI", "LOCAL"):
    os.environ |= {f"{api}_BASE_URL": f"{RULED}/v1", f"{api}_API_KEY": KEY}

from inspect_ai import Task, eval  # noqa: E402  # it reads the environment
from inspect_ai.dataset import Sample  # noqa: E402
from inspect_ai.scorer import includes  # noqa: E402
from inspect_ai.solver import generate, use_tools  # noqa: E402
from inspect_ai.tool import Tool, tool  # noqa: E402


@tool
def get_weather() -> Tool:
    async def execute(city: str) -> str:
        """The weather of a city.

        Args:
            city: Its name.
        """
        return f"12 degrees in {city}"

    return execute


def main() -> None:
    question = Sample(input="What is the weather in Paris?", target="12 degrees")
    with tempfile.TemporaryDirectory() as logs:
        for model in ("anthropic/ruled", "openai/ruled", "openai-api/local/ruled"):
            task = Task(dataset=[question], solver=[use_tools(get_weather()), generate()], scorer=includes())
            (log,) = eval(task, model=model, display="none", log_dir=logs)
            assert log.status == "success", log.error
            assert log.results.scores[0].metrics["accuracy"].value == 1
    version = importlib.metadata.version("inspect-ai")
    print(f"inspect {version}: a task with a tool, by `anthropic/`, `openai/` (Responses) and `openai-api/` (Chat)")


if __name__ == "__main__":
    main()
