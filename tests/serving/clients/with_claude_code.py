"""Claude Code, without its screen, against the front, and in a session; `scripts/test_clients.sh` runs it.

``python with_claude_code.py CLAUDE``: the path of its program.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from typing import Any

KEY, RULED = os.environ["API_KEY"], os.environ["RULED_URL"]
# nothing but requests for messages
QUIET = (
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC",
    "DISABLE_TELEMETRY",
    "DISABLE_ERROR_REPORTING",
    "DISABLE_AUTOUPDATER",
)


def answer(program: str, url: str, key: str) -> dict[str, Any]:
    """What the program says about the weather; it knows nothing of this machine but where it may write."""
    with tempfile.TemporaryDirectory() as home:
        env = {"PATH": os.environ["PATH"], "HOME": home, "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key}
        env |= dict.fromkeys(QUIET, "1") | {"NO_PROXY": "127.0.0.1"}
        command = [program, "-p", "What is the weather in Paris?", "--output-format", "json", "--allowedTools", "Bash"]
        done = subprocess.run(
            command, env=env, cwd=home, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 0, done.stdout + done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def asked(path: str, body: bytes | None = None) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {KEY}"}
    with urllib.request.urlopen(urllib.request.Request(RULED + path, body, headers)) as got:
        found: dict[str, Any] = json.load(got)
    return found


def main(program: str) -> None:
    said = answer(program, RULED, KEY)
    assert (said["result"], said["num_turns"]) == ("It is 12 degrees in Paris.", 2), said
    opened = asked("/sessions", b"{}")
    assert answer(program, RULED + opened["path"], opened["key"])["result"] == said["result"]
    turns = asked(opened["path"])["turns"]
    assert [turn["parent"] for turn in turns] == [None, 0], "the second turn goes on on the tokens of the first"
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.split()[0]
    print(f"Claude Code {version}: a question that it answers with a command; in a session")


if __name__ == "__main__":
    main(sys.argv[1])
