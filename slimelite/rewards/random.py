"""``random``: a fair coin, to check that a run without signal learns nothing."""

from __future__ import annotations

from hashlib import sha256

from slimelite.rewards.rule import Answer, Rule


def quick(answer: Answer) -> float:
    """0 or 1, drawn from the sample and its response, so that a repeated run draws the same."""
    return float(sha256(f"{answer.key}\0{answer.response}".encode("utf-8", "replace")).digest()[0] & 1)


RULE = Rule("random", quick, needs_label=False, boxable=True)
