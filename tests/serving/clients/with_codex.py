"""Codex, without its screen, against the front, and in a session; `scripts/test_clients.sh` runs it.

``python with_codex.py CODEX``: the path of its program.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from tests.serving.clients.with_claude_code import asked

KEY, RULED = os.environ["API_KEY"], os.environ["RULED_URL"]


def answer(program: str, url: str, key: str) -> list[dict[str, Any]]:
    """What the program reports; it knows nothing of this machine but where it may write."""
    provider = {"name": "local", "base_url": f"{url}/v1", "env_key": "KEY", "wire_api": "responses"}
    retries = dict.fromkeys(("request_max_retries", "stream_max_retries"), 0)
    table = ",".join(f"{name}={json.dumps(value)}" for name, value in {**provider, **retries}.items())
    with tempfile.TemporaryDirectory() as home:
        command = [program, "exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        command += ["-c", f"model_providers.local={{{table}}}", "-c", "model_provider=local", "-m", "ruled"]
        env = {"PATH": os.environ["PATH"], "HOME": home, "KEY": key, "NO_PROXY": "127.0.0.1"}
        done = subprocess.run(
            [*command, "What is the weather in Paris?"],
            env=env, cwd=home, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def main(program: str) -> None:
    said = answer(program, RULED, KEY)
    items = [event["item"] for event in said if event["type"] == "item.completed"]
    (ran,) = [item for item in items if item["type"] == "command_execution"]
    assert (ran["exit_code"], ran["aggregated_output"]) == (0, "12 degrees\n"), ran
    assert items[-1]["text"] == "It is 12 degrees in Paris.", items
    opened = asked("/sessions", b"{}")
    answer(program, RULED + opened["path"], opened["key"])
    turns = asked(opened["path"])["turns"]
    assert [turn["parent"] for turn in turns] == [None, 0], "the second turn goes on on the tokens of the first"
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.split()[-1]
    print(f"Codex {version}: a question that it answers with a command; in a session")


if __name__ == "__main__":
    main(sys.argv[1])
