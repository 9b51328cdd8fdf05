"""qwen-code, without its screen, against the front, and in a session; `scripts/test_clients.sh` runs it.

``python with_qwen_code.py QWEN``: the path of its program.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from tests.serving.clients.weather import ANSWER, KEY, QUESTION, RULED, in_session


def answer(program: str, url: str, key: str) -> str:
    """What the program says about the weather; it knows nothing of this machine but where it may write."""
    with tempfile.TemporaryDirectory() as home:
        env = {"PATH": os.environ["PATH"], "HOME": home, "NO_PROXY": "127.0.0.1", "QWEN_TELEMETRY_ENABLED": "0"}
        route = ["--auth-type", "openai", "--openai-api-key", key, "--openai-base-url", f"{url}/v1", "-m", "ruled"]
        done = subprocess.run(
            [program, *route, "--yolo", QUESTION],
            env=env, cwd=home, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def main(program: str) -> None:
    said = answer(program, RULED, KEY)
    assert said.endswith(ANSWER), said
    parents = in_session(lambda url, key: print(answer(program, url, key)))
    assert sum(parent is not None for parent in parents) == 1, parents
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.split()[-1]
    print(f"qwen-code {version}: a question that it answers with a command; in a session")


if __name__ == "__main__":
    main(sys.argv[1])
