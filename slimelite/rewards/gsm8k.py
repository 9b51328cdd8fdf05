"""``gsm8k``: the number after the last ``####`` equals the label's (Cobbe et al. 2021).

Labels are the data set's full solutions or their final numbers. Numbers compare by value: ``1,000``, ``$1000`` and
``1000.00`` are equal.
"""

from __future__ import annotations

import re
from fractions import Fraction

from slimelite.rewards.rule import Answer, Rule

# a sentence's full stop is no part of the number, and 5/8 is not the number 5
NUMBER = re.compile(r"[ \t]{0,8}([-+]?)\$?([-+]?)([0-9][0-9,]{0,60}(?:\.[0-9]{1,60})?|\.[0-9]{1,60})(?![0-9/]|\.[0-9])")


def quick(answer: Answer) -> float:
    """1 if the numbers are equal, else 0.

    Raises:
        ValueError: the label holds no number.
    """
    truth = number(answer.label.rpartition("####")[2])
    if truth is None:
        raise ValueError(f"gsm8k needs a number as label (after '####' in a solution), not {answer.label[-60:]!r}")
    _, marker, tail = answer.response.rpartition("####")
    return float(bool(marker) and number(tail) == truth)


def number(text: str) -> Fraction | None:
    """The number that ``text`` starts with."""
    match = NUMBER.match(text)
    if match is None:
        return None
    value = Fraction(match[3].replace(",", ""))
    return -value if "-" in match[1] + match[2] else value


def example(answer: Answer) -> str:
    """A response that is right."""
    return f"#### {answer.label.rpartition('####')[2]}"


RULE = Rule("gsm8k", quick, example=example)
