"""An agent of openai-agents with a tool. It needs only that package, not slimelite.

    python -m venv agent && agent/bin/pip install 'openai-agents>=0.24'

and then --agent-command 'agent/bin/python calculator.py'.
"""

import json
import re
import sys

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI


@function_tool
def calculator(expression: str) -> str:
    """The product of two numbers, such as 47*86."""
    found = re.fullmatch(r"(\d+)([*+])(\d+)", expression)
    if found is None:
        return "an error"
    a, b = int(found[1]), int(found[3])
    return str(a * b if found[2] == "*" else a + b)


set_tracing_disabled(True)  # otherwise it would send traces to OpenAI
row = json.loads(sys.stdin.readline())
model = OpenAIChatCompletionsModel(
    "mine", AsyncOpenAI()
)  # OPENAI_BASE_URL and OPENAI_API_KEY set the address and the key
agent = Agent("calculator", model=model, tools=[calculator])
result = Runner.run_sync(agent, row["prompt"], max_turns=4)
print(json.dumps({"reward": float(str(result.final_output).strip() == row["label"])}))
