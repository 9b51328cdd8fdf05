r"""``multiple_choice``: the option letter in the last ``\boxed{}``, or else as ``gpqa`` reads it."""

from __future__ import annotations

import re
from dataclasses import replace

from slimelite.rewards import gpqa
from slimelite.rewards.latex import extract_boxed_answer
from slimelite.rewards.rule import Answer, Rule

# a letter with its wrappers; the pattern below is quadratic
BOX_CHARS = 40


def quick(answer: Answer) -> float:
    """1 if the response chooses the right option, else 0."""
    box = (extract_boxed_answer(answer.response) or "")[:BOX_CHARS]
    letter = re.fullmatch(r"\W*(?:\\text\w*\{)?\W*([A-Za-z])\W*", box)
    return gpqa.quick(replace(answer, response=f"Answer: {letter[1]}") if letter else answer)


RULE = Rule("multiple_choice", quick, example=gpqa.example, needs_label=False)
