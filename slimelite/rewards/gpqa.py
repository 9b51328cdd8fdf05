"""``gpqa``: the option letter that the response settles on, or the text of the right option.

Metadata may bring ``choices`` (list, or dict of letter to text), ``correct_letter``, ``correct_answer`` or
``answer_text`` and ``valid_letters``. The label is a letter, an option's number from 0, or an option's text; labels are
read as text, so that digits mean the number even where an option consists of the same digits.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import Any

from slimelite.rewards.rule import Answer, Rule

LETTERS = string.ascii_uppercase[:10]
# A letter stands alone, unlike the d of "the answer depends". The small a and i, which are words too, must end their
# clause, unlike the a of "the answer is a gas"; "e.g." and "I'd" hold no letters
LETTER = r"(?!\w(?:\.\w\.|['’]\w))([A-Z]\b|[b-hj-z]\b|[ai](?=[.,;:)\]*]|$))"
# tried in this order; each reads its first match. A letter in brackets or stars is the answer after "answer is",
# "answer:" and "final answer"; after a bare word, as in "option (A) is wrong", it may be one that is turned down
WRAP = r"[ (*\[]{0,4}"
PATTERNS = (
    re.compile(rf"(?i:(?:answer|option|choice)(?: ?(?:is|:){WRAP}| ?)|final (?:answer|option){WRAP}){LETTER}"),
    re.compile(r"\b([A-Zb-hj-z])[)\]*]{0,4} is (?:the )?correct"),
)


def quick(answer: Answer) -> float:
    """1 if the response chooses the right option, else 0."""
    choices = _choices(answer.metadata)
    letters = _letters(answer.metadata, choices)
    label = answer.label.strip()
    correct = _correct_letter(answer.metadata, label, choices, letters)
    text = answer.response.rpartition("</think>")[2]
    chosen = extract_letter(text, letters)
    if chosen and correct:
        return float(chosen == correct)
    targets = [str(answer.metadata[key]) for key in ("correct_answer", "answer_text") if answer.metadata.get(key)]
    if correct in letters and letters.index(correct) < len(choices):
        targets.append(choices[letters.index(correct)])
    if label.upper() not in letters and not label.isdecimal():
        targets.append(label)
    words = f" {plain(text)} "
    return float(any(plain(target) and f" {plain(target)} " in words for target in targets))


def extract_letter(text: str | None, letters: Sequence[str]) -> str | None:
    """The option letter in a phrase such as "the answer is (B)", or else the last capital that stands alone."""
    text = " ".join((text or "").rpartition("</think>")[2].split())
    for pattern in PATTERNS:
        if (match := pattern.search(text)) and match[1].upper() in letters:
            return match[1].upper()
    alone = [letter for letter in re.findall(r"\b([A-Z])\b", text) if letter in letters]
    return alone[-1] if alone else None


def plain(text: str) -> str:
    """Lower-case words and digits, single spaces."""
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


def _choices(metadata: dict[str, Any]) -> list[str]:
    choices = metadata.get("choices")
    if choices is None:
        return []
    return [str(choice) for choice in (choices.values() if isinstance(choices, dict) else choices)]


def _letters(metadata: dict[str, Any], choices: list[str]) -> list[str]:
    given = metadata.get("valid_letters")
    if given is not None and len(given):
        return [str(letter).upper() for letter in given]
    return list(string.ascii_uppercase[: len(choices)] if choices else LETTERS)


def _correct_letter(metadata: dict[str, Any], label: str, choices: list[str], letters: list[str]) -> str | None:
    """The right option's letter: metadata's, or the label as letter, number or text of an option."""
    if isinstance(given := metadata.get("correct_letter"), str) and given.strip():
        return given.strip().upper()
    if label.upper() in letters:
        return label.upper()
    if label.isdecimal() and int(label) < len(letters):
        return letters[int(label)]
    same = [letter for letter, choice in zip(letters, choices, strict=False) if plain(choice) == plain(label)]
    return same[0] if same and plain(label) else None


def example(answer: Answer) -> str:
    """A response that is right."""
    choices = _choices(answer.metadata)
    letter = _correct_letter(answer.metadata, answer.label.strip(), choices, _letters(answer.metadata, choices))
    return f"Answer: {letter}" if letter else answer.label


RULE = Rule("gpqa", quick, example=example, needs_label=False, boxable=True)
