r"""``format``: the response is ``<think>…</think> <answer>…</answer>`` and nothing else, or matches --format-regex.

The regex must match the whole response, without the spaces around it; ``.`` matches line breaks too.
"""

from __future__ import annotations

import re

from slimelite.rewards.rule import Answer, Rule

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def quick(answer: Answer) -> float | None:
    """1 or 0 for the default format; None for a regex, which may take any time."""
    return None if answer.settings.format_regex is not None else float(is_think_answer(answer.response))


def slow(answer: Answer) -> float:
    """1 if --format-regex matches the whole response, else 0."""
    assert answer.settings.format_regex is not None
    return float(re.fullmatch(answer.settings.format_regex, answer.response.strip(), re.DOTALL) is not None)


def is_think_answer(response: str) -> bool:
    """Each tag once, in order, with text between, and nothing but spaces before, after and between the two parts."""
    text = response.strip()
    if any(text.count(tag) != 1 for tag in TAGS):
        return False
    thought, _, rest = text.removeprefix("<think>").partition("</think>")
    said = rest.strip().removeprefix("<answer>").removesuffix("</answer>")
    # a tag that is still there stood in the wrong place
    return bool(thought.strip() and said.strip()) and not any(tag in thought + said for tag in TAGS)


RULE = Rule("format", quick, slow, needs_label=False)
