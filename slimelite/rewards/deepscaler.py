r"""``deepscaler``: ``math`` on what follows the thinking.

The response must hold ``</think>`` or ``###Response`` (DeepScaleR's markers); without one the reward is 0.
"""

from __future__ import annotations

from dataclasses import replace

from slimelite.rewards import math
from slimelite.rewards.rule import Answer, Rule


def quick(answer: Answer) -> float | None:
    """`math.quick` on the text after the marker; 0 without one."""
    tail = solution(answer.response)
    return 0.0 if tail is None else math.quick(replace(answer, response=tail))


def slow(answer: Answer) -> float:
    """`math.slow` on the text after the marker."""
    return math.slow(replace(answer, response=solution(answer.response) or ""))


def solution(response: str) -> str | None:
    """What follows the last ``</think>``, or else the first ``###Response``; None without either."""
    if "</think>" in response:
        return response.rpartition("</think>")[2]
    _, marker, tail = response.partition("###Response")
    return tail.partition("###Response")[0] if marker else None


def example(answer: Answer) -> str:
    """A response that is right."""
    return f"</think>{math.example(answer)}"


RULE = Rule("deepscaler", quick, slow, example, bounded=True)
