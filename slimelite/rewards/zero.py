"""``zero``: no reward at all, for runs that learn from something else (on-policy distillation)."""

from __future__ import annotations

from slimelite.rewards.rule import Answer, Rule


def quick(_: Answer) -> float:
    """0."""
    return 0.0


RULE = Rule("zero", quick, needs_label=False, boxable=False)
