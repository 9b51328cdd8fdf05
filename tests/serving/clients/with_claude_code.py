"""Claude Code, without its screen, against the front, and in a session; `scripts/test_clients.sh` runs it.

``python with_claude_code.py CLAUDE``: the path of its program.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.serving.clients.weather import ANSWER, KEY, QUESTION, RULED, alone, in_session, version_of

# nothing but requests for messages
QUIET = (
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC",
    "DISABLE_TELEMETRY",
    "DISABLE_ERROR_REPORTING",
    "DISABLE_AUTOUPDATER",
)


def answer(program: str, url: str, key: str) -> dict[str, Any]:
    """What the program says about the weather."""
    words = [program, "-p", QUESTION, "--output-format", "json", "--allowedTools", "Bash"]
    route = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key}
    said: dict[str, Any] = json.loads(alone(words, **route, **dict.fromkeys(QUIET, "1")))
    return said


def main(program: str) -> None:
    said = answer(program, RULED, KEY)
    assert (said["result"], said["num_turns"]) == (ANSWER, 2), said

    def again(url: str, key: str) -> None:
        assert answer(program, url, key)["result"] == said["result"]

    assert in_session(again) == [None, 0], "the second turn goes on on the tokens of the first"
    print(f"Claude Code {version_of(program, 0)}: a question that it answers with a command; in a session")


if __name__ == "__main__":
    main(sys.argv[1])
