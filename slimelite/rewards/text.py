r"""Reward rules for words, option letters and tags: ``f1``, ``gpqa``, ``multiple_choice``, ``format``, ``random``,
``zero``."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

from slimelite.rewards.math import extract_boxed_answer
from slimelite.rewards.rules import Answer

# answers for which a partial match counts as 0
VERDICTS = ("yes", "no", "noanswer")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def f1(answer: Answer) -> float:
    """The rule ``f1``: the F1 score between the words of the response and the words of the label, in any order."""
    return f1_score(answer.response, answer.label)[0]


def f1_score(prediction: str | None, label: str) -> tuple[float, float, float]:
    """The numbers (f1, precision, recall) for the normalised words of two texts. All three are 0 if the texts have no
    word in common."""
    if prediction is None:
        return 0.0, 0.0, 0.0
    predicted, truth = normalize_answer(prediction), normalize_answer(label)
    if predicted != truth and (predicted in VERDICTS or truth in VERDICTS):
        return 0.0, 0.0, 0.0
    predicted_words, truth_words = predicted.split(), truth.split()
    shared = (Counter(predicted_words) & Counter(truth_words)).total()
    if shared == 0:
        return 0.0, 0.0, 0.0
    precision, recall = shared / len(predicted_words), shared / len(truth_words)
    return 2 * precision * recall / (precision + recall), precision, recall


def normalize_answer(text: str) -> str:
    """The text in lower case, without punctuation, articles and extra spaces."""
    text = text.lower().translate(PUNCTUATION)
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", text).split())


def label(answer: Answer) -> str:
    """A response to which the rule ``f1`` gives reward 1: the label."""
    return answer.label


LETTERS = string.ascii_uppercase[:10]
# An option letter is a separate word, so the d of "the answer depends" does not count. The small a and i are words of
# English, so they count only at the end of a clause, and the a of "the answer is a gas" does not count. "e.g." and
# "I'd" contain no option letter.
LETTER = r"(?!\w(?:\.\w\.|['’]\w))([A-Z]\b|[b-hj-z]\b|[ai](?=[.,;:)\]*]|$))"
# The patterns are tried in this order, and only the first match of each pattern counts. A letter in brackets or stars
# is accepted after "answer is", "answer:" and "final answer". It is not accepted after another word, because "option
# (A) is wrong" rejects its letter.
WRAP = r"[ (*\[]{0,4}"
PATTERNS = (
    re.compile(rf"(?i:(?:answer|option|choice)(?: ?(?:is|:){WRAP}| ?)|final (?:answer|option){WRAP}){LETTER}"),
    re.compile(r"\b([A-Zb-hj-z])[)\]*]{0,4} is (?:the )?correct"),
)


def gpqa(answer: Answer) -> float:
    """The rule ``gpqa``: 1 if the response names the right option, else 0."""
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
    """The option letter in a phrase such as "the answer is (B)". If ``text`` has no such phrase, the last option letter
    that is a word of its own."""
    text = " ".join((text or "").rpartition("</think>")[2].split())
    for pattern in PATTERNS:
        if (match := pattern.search(text)) and match[1].upper() in letters:
            return match[1].upper()
    alone = [letter for letter in re.findall(r"\b([A-Z])\b", text) if letter in letters]
    return alone[-1] if alone else None


def plain(text: str) -> str:
    """The words and numbers of ``text`` in lower case, separated by single spaces."""
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


def _choices(metadata: dict[str, Any]) -> list[str]:
    choices = metadata.get("choices")
    if choices is None:
        return []
    return [str(choice) for choice in (choices.values() if isinstance(choices, dict) else choices)]


def _letters(metadata: dict[str, Any], choices: list[str]) -> list[str]:
    letters = metadata.get("valid_letters")
    if letters is not None and len(letters):
        return [str(letter).upper() for letter in letters]
    return list(string.ascii_uppercase[: len(choices)] if choices else LETTERS)


def _correct_letter(metadata: dict[str, object], label: str, choices: list[str], letters: list[str]) -> str | None:
    """The letter of the right option. The letter comes from the metadata, or from the label. The label may be an
    option's letter, number or text."""
    if isinstance(correct := metadata.get("correct_letter"), str) and correct.strip():
        return correct.strip().upper()
    if label.upper() in letters:
        return label.upper()
    if label.isdecimal() and int(label) < len(letters):
        return letters[int(label)]
    same = [letter for letter, choice in zip(letters, choices, strict=False) if plain(choice) == plain(label)]
    return same[0] if same and plain(label) else None


def gpqa_example(answer: Answer) -> str:
    """A response to which the rules ``gpqa`` and ``multiple_choice`` give reward 1."""
    choices = _choices(answer.metadata)
    letter = _correct_letter(answer.metadata, answer.label.strip(), choices, _letters(answer.metadata, choices))
    return f"Answer: {letter}" if letter else answer.label


# long enough for a letter with its wrappers; the limit is needed because the pattern below takes quadratic time
BOX_CHARS = 40


def multiple_choice(answer: Answer) -> float:
    """The rule ``multiple_choice``: 1 if the response names the right option, else 0."""
    box = (extract_boxed_answer(answer.response) or "")[:BOX_CHARS]
    letter = re.fullmatch(r"\W*(?:\\text\w*\{)?\W*([A-Za-z])\W*", box)
    return gpqa(replace(answer, response=f"Answer: {letter[1]}") if letter else answer)


TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def format_quick(answer: Answer) -> float | None:
    """Return 1 if the response has the default format, else 0. If --format-regex is set, return None, because matching
    a regular expression may take very long."""
    return None if answer.settings.format_regex is not None else float(is_think_answer(answer.response))


def format_slow(answer: Answer) -> float:
    """Return 1 if --format-regex matches the whole response, else 0."""
    assert answer.settings.format_regex is not None
    return float(re.fullmatch(answer.settings.format_regex, answer.response.strip(), re.DOTALL) is not None)


def is_think_answer(response: str) -> bool:
    """Whether ``response`` is ``<think>…</think>``, then ``<answer>…</answer>``, with each tag exactly once. Both parts
    must contain text, and only white space may be before, between and after them."""
    text = response.strip()
    if any(text.count(tag) != 1 for tag in TAGS):
        return False
    thought, _, rest = text.removeprefix("<think>").partition("</think>")
    answer = rest.strip().removeprefix("<answer>").removesuffix("</answer>")
    # a tag that remains in the text was in a wrong place
    return bool(thought.strip() and answer.strip()) and not any(tag in thought + answer for tag in TAGS)


def coin(answer: Answer) -> float:
    """The rule ``random``. The reward is 0 or 1, computed from a hash of the sample's key and response. So equal
    responses get equal rewards when the run is repeated.

    Use this rule to check that a run without a reward signal learns nothing.
    """
    return float(sha256(f"{answer.key}\0{answer.response}".encode("utf-8", "replace")).digest()[0] & 1)


def nothing(_: Answer) -> float:
    """The rule ``zero``. The reward is always 0. This rule is for runs that do not learn from the reward, such as
    on-policy distillation."""
    return 0.0
