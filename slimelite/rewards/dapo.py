r"""``dapo``: the last ``Answer: ...`` of the response equals an integer label (DAPO, Yu et al. 2025).

The reward is a dict ``{"score": 1 or -1, "acc": bool, "pred": str}``: it needs ``--reward-key score``. With
``strict_box_verify`` in a sample's metadata the last ``\boxed{}`` of the final 100 characters must be the label itself.
"""

from __future__ import annotations

import re
from typing import Any

from slimelite.rewards.latex import extract_boxed_answer
from slimelite.rewards.rule import Answer, Rule

RESPONSE_CHARS = 300
STRICT_CHARS = 100

SUBSTITUTIONS = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
UNITS = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples"),
)
MARKS = (
    *("\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}", "\\mathrm{th}"),
    *("^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots", "<|im_end|>", "<|endoftext|>"),
)


def quick(answer: Answer) -> dict[str, Any]:
    """The dict described above.

    Raises:
        ValueError: the label is not an integer.
    """
    return compute_score(
        answer.response, answer.label, strict_box_verify=bool(answer.metadata.get("strict_box_verify"))
    )


def compute_score(response: str, label: str, *, strict_box_verify: bool = False) -> dict[str, Any]:
    """``{"score", "acc", "pred"}`` of the response's last 300 characters."""
    tail, label = response[-RESPONSE_CHARS:], str(label)
    correct, pred = verify_strict_box(tail, label) if strict_box_verify else verify_minerva(tail, label)
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}


def verify_minerva(response: str, label: str) -> tuple[bool, str]:
    """(correct, prediction): the last ``Answer: ...`` line against an integer label."""
    answers = re.findall(r"(?i)answer\s*:\s*([^\n]+)", response)
    pred = normalize_final_answer(answers[-1] if answers else "[INVALID]")
    return pred == integer(label), pred


def verify_strict_box(response: str, label: str) -> tuple[bool, str | None]:
    """(correct, prediction): the last box of the final 100 characters, verbatim."""
    pred = extract_boxed_answer(response[-STRICT_CHARS:])
    return pred == label, pred


def integer(label: str) -> str:
    """An integer label in plain digits."""
    text = normalize_final_answer(label)
    match = re.fullmatch(r"([-+]?[0-9]+)(?:\.0*)?", text)
    if match is None:
        raise ValueError(f"dapo needs integer labels, not {label!r}; use --rm-type math for other answers")
    return str(int(match[1]))


def normalize_final_answer(text: str) -> str:
    """Minerva's form (Lewkowycz et al. 2022): what follows the last ``=``, without articles, units and wrappers."""
    text = text.rpartition("=")[2]
    for before, after in SUBSTITUTIONS:
        text = text.replace(before, after)
    for mark in (*UNITS, *MARKS):
        text = text.replace(mark, "")
    text = re.sub(r".*?\$(.*?)\$.*", r"$\1$", text)
    for wrapper in ("text", "textbf", "overline"):  # one after the other: they may be nested
        text = re.sub(rf"\\{wrapper}\{{(.*?)\}}", r"\1", text)
    text = re.sub(r"\\boxed\{(.*)\}", r"\1", text)
    # \frac12 -> \frac{1}{2}, \sqrt3 -> \sqrt{3}
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text).replace("$", "")
    digits = text.replace(",", "")
    return (digits if digits.isdigit() else text).strip()


def example(answer: Answer) -> str:
    """A response that is right."""
    strict = answer.metadata.get("strict_box_verify")
    return f"\\boxed{{{answer.label}}}" if strict else f"Answer: {integer(answer.label)}"


RULE = Rule("dapo", quick, example=example, zero={"score": 0.0, "acc": False, "pred": None})
