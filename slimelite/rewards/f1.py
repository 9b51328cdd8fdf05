"""``f1``: overlap of the words of response and label (SQuAD's measure, Rajpurkar et al. 2016)."""

from __future__ import annotations

import re
import string
from collections import Counter

from slimelite.rewards.rule import Answer, Rule

# answers of which half a match is no match
VERDICTS = ("yes", "no", "noanswer")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def quick(answer: Answer) -> float:
    """F1 of the two bags of words."""
    return f1_score(answer.response, answer.label)[0]


def f1_score(prediction: str | None, label: str) -> tuple[float, float, float]:
    """(f1, precision, recall) of the normalised words; zeros where they share none."""
    if prediction is None:
        return 0.0, 0.0, 0.0
    given, truth = normalize_answer(prediction), normalize_answer(label)
    if given != truth and (given in VERDICTS or truth in VERDICTS):
        return 0.0, 0.0, 0.0
    given_words, truth_words = given.split(), truth.split()
    shared = (Counter(given_words) & Counter(truth_words)).total()
    if shared == 0:
        return 0.0, 0.0, 0.0
    precision, recall = shared / len(given_words), shared / len(truth_words)
    return 2 * precision * recall / (precision + recall), precision, recall


def normalize_answer(text: str) -> str:
    """Lower case without punctuation, articles and extra spaces."""
    text = text.lower().translate(PUNCTUATION)
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", text).split())


def example(answer: Answer) -> str:
    """A response that is right."""
    return answer.label


RULE = Rule("f1", quick, example=example, boxable=True)
