"""What the clients share: the question, its answers, sessions of the front, and a home for programs."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable
from typing import Any

KEY, RULED = os.environ["API_KEY"], os.environ["RULED_URL"]
QUESTION, ANSWER = "What is the weather in Paris?", "It is 12 degrees in Paris."
# what the ruled model says where its reply is held to a grammar
STRUCTURED = {"city": "Paris", "degrees": 12}


def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: Its name.
    """
    return f"12 degrees in {city}"


def asked(path: str, body: bytes | None = None) -> dict[str, Any]:
    """What the ruled front answers."""
    headers = {"Authorization": f"Bearer {KEY}"}
    with urllib.request.urlopen(urllib.request.Request(RULED + path, body, headers)) as got:
        found: dict[str, Any] = json.load(got)
    return found


def in_session(work: Callable[[str, str], None]) -> list[int | None]:
    """Do ``work(url, key)`` in a session; the turns that its turns go on from."""
    opened = asked("/sessions", b"{}")
    work(RULED + opened["path"], opened["key"])
    return [turn["parent"] for turn in asked(opened["path"])["turns"]]


def alone(words: list[str], **env: str) -> str:
    """What a program prints; it knows nothing of this machine but where it may write, and ``env``."""
    with tempfile.TemporaryDirectory() as home:
        env = {"PATH": os.environ["PATH"], "HOME": home, "NO_PROXY": "127.0.0.1", **env}
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        done = subprocess.run(words, env=env, cwd=home, timeout=600, **pipes)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


def version_of(program: str, word: int = -1) -> str:
    """A word of what ``--version`` prints; the last by default."""
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.split()[word]
