"""Codex, without its screen, against the front, and in a session; `scripts/test_clients.sh` runs it.

``python with_codex.py CODEX``: the path of its program.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.serving.clients.weather import ANSWER, KEY, QUESTION, RULED, alone, in_session, version_of


def answer(program: str, url: str, key: str) -> list[dict[str, Any]]:
    """What the program reports."""
    provider = {"name": "local", "base_url": f"{url}/v1", "env_key": "KEY", "wire_api": "responses"}
    retries = dict.fromkeys(("request_max_retries", "stream_max_retries"), 0)
    table = ",".join(f"{name}={json.dumps(value)}" for name, value in {**provider, **retries}.items())
    words = [program, "exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    words += ["-c", f"model_providers.local={{{table}}}", "-c", "model_provider=local", "-m", "ruled", QUESTION]
    return [json.loads(line) for line in alone(words, KEY=key).splitlines()]


def main(program: str) -> None:
    said = answer(program, RULED, KEY)
    items = [event["item"] for event in said if event["type"] == "item.completed"]
    (ran,) = [item for item in items if item["type"] == "command_execution"]
    assert (ran["exit_code"], ran["aggregated_output"]) == (0, "12 degrees\n"), ran
    assert items[-1]["text"] == ANSWER, items
    parents = in_session(lambda url, key: print(answer(program, url, key)))
    assert parents == [None, 0], "the second turn goes on on the tokens of the first"
    print(f"Codex {version_of(program)}: a question that it answers with a command; in a session")


if __name__ == "__main__":
    main(sys.argv[1])
