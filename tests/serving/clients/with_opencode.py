"""opencode, without its screen, against the front, and in a session; `scripts/test_clients.sh` runs it.

``python with_opencode.py OPENCODE``: the path of its program.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile

from tests.serving.clients.weather import ANSWER, KEY, QUESTION, RULED, in_session


def answer(program: str, url: str, key: str) -> str:
    """What the program says about the weather; it knows nothing of this machine but where it may write."""
    provider = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": f"{url}/v1", "apiKey": key}}
    config = {"provider": {"local": {**provider, "models": {"ruled": {}}}}, "small_model": "local/ruled"}
    config |= {"autoupdate": False, "share": "disabled", "permission": {"bash": "allow"}}
    with tempfile.TemporaryDirectory() as home:
        env = {"PATH": os.environ["PATH"], "HOME": home, "OPENCODE_CONFIG_CONTENT": json.dumps(config)}
        env |= {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1", "NO_PROXY": "127.0.0.1"}
        done = subprocess.run(
            [program, "run", "-m", "local/ruled", "--format", "json", QUESTION],
            env=env, cwd=home, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert any("12 degrees" in json.dumps(event) for event in events if event["type"] == "tool_use"), events
    texts = [event["part"]["text"] for event in events if event["type"] == "text"]
    return str(texts[-1])


def main(program: str) -> None:
    assert answer(program, RULED, KEY) == ANSWER
    parents = in_session(lambda url, key: print(answer(program, url, key)))
    # the title of the conversation is a branch of its own
    assert sum(parent is not None for parent in parents) == 1, parents
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.split()[-1]
    print(f"opencode {version}: a question that it answers with a command; in a session")


if __name__ == "__main__":
    main(sys.argv[1])
