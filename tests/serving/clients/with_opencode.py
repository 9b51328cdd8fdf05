"""opencode, without its screen, against the front, and in a session; `scripts/test_clients.sh` runs it.

``python with_opencode.py OPENCODE``: the path of its program.
"""

from __future__ import annotations

import json
import sys

from tests.serving.clients.weather import ANSWER, KEY, QUESTION, RULED, alone, in_session, version_of


def answer(program: str, url: str, key: str) -> str:
    """What the program says about the weather."""
    provider = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": f"{url}/v1", "apiKey": key}}
    config = {"provider": {"local": {**provider, "models": {"ruled": {}}}}, "small_model": "local/ruled"}
    config |= {"autoupdate": False, "share": "disabled", "permission": {"bash": "allow"}}
    quiet = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"}
    words = [program, "run", "-m", "local/ruled", "--format", "json", QUESTION]
    printed = alone(words, OPENCODE_CONFIG_CONTENT=json.dumps(config), **quiet)
    events = [json.loads(line) for line in printed.splitlines()]
    assert any("12 degrees" in json.dumps(event) for event in events if event["type"] == "tool_use"), events
    texts = [event["part"]["text"] for event in events if event["type"] == "text"]
    return str(texts[-1])


def main(program: str) -> None:
    assert answer(program, RULED, KEY) == ANSWER
    parents = in_session(lambda url, key: print(answer(program, url, key)))
    # the title of the conversation is a branch of its own
    assert sum(parent is not None for parent in parents) == 1, parents
    print(f"opencode {version_of(program)}: a question that it answers with a command; in a session")


if __name__ == "__main__":
    main(sys.argv[1])
