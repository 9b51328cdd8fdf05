"""qwen-code, without its screen, against the front, and in a session; `scripts/test_clients.sh` runs it.

``python with_qwen_code.py QWEN``: the path of its program.
"""

from __future__ import annotations

import sys

from tests.serving.clients.weather import ANSWER, KEY, QUESTION, RULED, alone, in_session, version_of


def answer(program: str, url: str, key: str) -> str:
    """What the program says about the weather."""
    route = ["--auth-type", "openai", "--openai-api-key", key, "--openai-base-url", f"{url}/v1", "-m", "ruled"]
    return alone([program, *route, "--yolo", QUESTION], QWEN_TELEMETRY_ENABLED="0").strip()


def main(program: str) -> None:
    said = answer(program, RULED, KEY)
    assert said.endswith(ANSWER), said
    parents = in_session(lambda url, key: print(answer(program, url, key)))
    assert sum(parent is not None for parent in parents) == 1, parents
    print(f"qwen-code {version_of(program)}: a question that it answers with a command; in a session")


if __name__ == "__main__":
    main(sys.argv[1])
