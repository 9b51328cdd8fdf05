"""Reads what `--trace` writes, as a viewer does."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from typing import Any

Event = dict[str, Any]


def spans(text: str) -> list[Event]:
    """The bars of a trace, each with the names of its worker and its track, as a viewer shows them."""
    events = json.loads(text)
    workers = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    bars = [e for e in events if e["ph"] == "X"]
    return [bar | {"worker": workers[bar["pid"]], "track": tracks[bar["pid"], bar["tid"]]} for bar in bars]


def assert_laid_out(bars: list[Event]) -> None:
    """Bars of a lane lie beside each other: viewers draw those that overlap only in part anywhere."""
    lanes = defaultdict(list)
    for bar in bars:
        lanes[bar["pid"], bar["tid"]].append(bar)
    for lane in lanes.values():
        lane.sort(key=lambda bar: bar["ts"])
        for before, after in itertools.pairwise(lane):
            assert before["ts"] + before["dur"] <= after["ts"] + 2, (before, after)  # each is rounded
