"""``aider``, without its screen, against the front, and in a session; `scripts/test_clients.sh` runs it."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

from weather import KEY, QUESTION, RULED, alone, in_session

TASK = f"{QUESTION} Write it into weather.txt."
QUIET = ("--no-check-update", "--analytics-disable", "--no-show-release-notes", "--no-show-model-warnings")
# what it wrote, and the message of its commit
SHOWN = 'git init --quiet && git config user.name me && git config user.email me@here && touch weather.txt && "$@" 1>&2'
SHOWN += " && cat weather.txt && git log -1 --format=%s"


def work(url: str, key: str, *options: str) -> str:
    """What is in the file then, and how its change is called."""
    aider = str(Path(sys.executable).with_name("aider"))
    words = [aider, "--model", "openai/ruled", "--openai-api-base", f"{url}/v1", "--openai-api-key", key, *QUIET]
    words += ["--yes-always", "--no-pretty", "--no-gitignore", "--map-tokens", "0", *options]
    words += ["--message", TASK, "weather.txt"]
    return alone(["sh", "-c", SHOWN, "sh", *words], LITELLM_LOCAL_MODEL_COST_MAP="True")


def main() -> None:
    for options in ((), ("--no-stream",), ("--edit-format", "diff")):
        # the model has one answer to all other questions, such as that for the commit's message
        assert work(RULED, KEY, *options).split("\n")[:2] == ["12 degrees in Paris", "It is 42."], options

    def again(url: str, key: str) -> None:
        work(url, key)

    parents = in_session(again)
    assert parents == [None] * 3, "the edit, and the messages of two commits: of the file as it was, and of the edit"
    version = importlib.metadata.version("aider-chat")
    print(f"aider {version}: an edit of a file and its commit, by `whole` and `diff`, whole and streamed; in a session")


if __name__ == "__main__":
    main()
