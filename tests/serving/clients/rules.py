"""What the ruled model says: it calls a tool that it is shown, and answers when it has the result.

Some clients show their tools in words of their own, or ask for a form of the answer; the model knows these forms.
"""

from __future__ import annotations

import json


def call(name: str, **arguments: object) -> str:
    """A call as Qwen2.5 writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


WEATHER = call("get_weather", city="Paris")
ECHO = "echo 12 degrees"
STRUCTURED = {"city": "Paris", "degrees": 12}
CODE = 'final_answer(get_weather("Paris"))'
# a tool that the model may be shown -> how it calls it
CALLS = {
    "get_weather": WEATHER,
    "exec_command": call("exec_command", cmd=ECHO),  # Codex
    "Bash": call("Bash", command=ECHO),  # Claude Code
    "bash": call("bash", command=ECHO, description="Asks for the weather"),  # opencode, mini-swe-agent
    "run_shell_command": call("run_shell_command", command=ECHO, is_background=False),  # qwen-code
    "Weather": call("Weather", **STRUCTURED),  # instructor
    "PartialWeather": call("PartialWeather", **STRUCTURED),
}
# a tool by which an agent is told that it is done, or a sentence that tells it how -> the call that ends the work
ENDS = {
    '"name": "final_answer"': call("final_answer", answer="It is 12 degrees in Paris."),  # smolagents
    "COMPLETE_TASK_AND_SUBMIT": call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),  # mini-swe-agent
}
FIELDS = "[[ ## city ## ]]\nParis\n\n[[ ## degrees ## ]]\n12\n\n[[ ## completed ## ]]"
ACTION = "[[ ## next_thought ## ]]\nI look it up.\n\n[[ ## next_tool_name ## ]]\n{}\n\n[[ ## next_tool_args ## ]]\n{}"
FOUND = "12 degrees in Paris"
# a text of the prompt, one that its last message must not have -> the reply
FORMS = [
    ("field `[[ ## city", None, FIELDS),  # dspy
    ("field `[[ ## reasoning", None, f"[[ ## reasoning ## ]]\nIt was told.\n\n{FIELDS}"),
    ("field `[[ ## next_thought", "[[ ## observation_0", ACTION.format("get_weather", '{"city": "Paris"}')),
    ("field `[[ ## next_thought", None, ACTION.format("finish", "{}")),
    ("JSON object", None, json.dumps(STRUCTURED)),
    ("*file listing*", None, f"I look it up.\n\nweather.txt\n```\n{FOUND}\n```"),  # aider
    ("*SEARCH/REPLACE block*", None, f"weather.txt\n```\n<<<<<<< SEARCH\n=======\n{FOUND}\n>>>>>>> REPLACE\n```"),
    ("<code>", "Observation:", f"I look it up.\n<code>\n{CODE}\n</code>"),  # smolagents
]
BEGIN = "<|im_start|>assistant\n"


def reply(prompt: str, grammar: tuple[str, str] | None) -> str:
    """The reply to a prompt, whose kind and text of a ``grammar`` it is held to."""
    before, _, begun = prompt.rpartition(BEGIN)
    asked = before.rpartition("<|im_start|>user")[2]
    if grammar is not None and grammar[0] == "json_schema":
        wants_code = "code" in json.loads(grammar[1]).get("properties", {})
        return json.dumps({"thought": "I look it up.", "code": CODE} if wants_code else STRUCTURED)
    if "<tools>" not in prompt:
        return next((said for has, but, said in FORMS if has in prompt and not (but and but in asked)), "It is 42.")
    if "<tool_response>" in asked or "Observation:" in asked:
        said = next((said for mark, said in ENDS.items() if mark in prompt), "It is 12 degrees in Paris.")
    else:
        said = next(call for name, call in CALLS.items() if f'"name": "{name}"' in prompt)
    # a client's `tool_choice` may have begun the call
    return said.removeprefix(begun) if begun or said[0] != "<" else f"I look it up.\n{said}"
