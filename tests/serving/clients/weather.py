"""What the clients share: the question, its answers, and sessions of the front."""

from __future__ import annotations

import json
import os
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
