r"""``math``: the last ``\boxed{}`` equals the label, as text, as a number or by algebra.

As in slime: a fraction must be reduced, and an integer must be written as one (``\frac{4}{2}`` is not 2). Unlike slime,
which evaluates the text as Python, algebra is left to math-verify, in a worker.
"""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import accumulate

from slimelite.rewards.latex import extract_boxed_answer, normalize_answer
from slimelite.rewards.rule import Answer, Rule

# longer than any answer of MATH; what is longer must match as text
MAX_ANSWER_CHARS = 500

UNITS = "degree|cm|centimeter|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard|percent"
# two letters are two variables elsewhere than behind the number, at the end
SHORT_UNITS = "km|mm|dm|kg|mg|ft|lb|hr|min|sec|mph"
# one pass each, in this order: pattern, replacement
TIDY = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:text|textbf|mathrm|mathbf|mbox)\{([^{}]*)\}", r"\1"),
        (r"\{,\}|,\\! *", ","),
        (r"(?<!\\)\\[ :]|~|\\q?quad(?![a-zA-Z])", " "),
        (r"\\[!,;]|\\left(?![a-z])|\\right(?![a-z])|\\?[$%]", ""),
        (r"\\[td]frac", r"\\frac"),
        (r"\\(le|ge|ne)(?![a-zA-Z])", r"\\\1q"),
        (r"<=", r"\\leq "),
        (r">=", r"\\geq "),
        (r"(?<=[0-9])_\{([0-9]+)\}", r"_\1"),
        (r"\\frac([0-9])([0-9])", r"\\frac{\1}{\2}"),
        (r" (?:or|and) ", " , "),
        (rf"(?:{UNITS})(?:es)?s? ?(?:\^[0-9]+)?", ""),
        (rf"(?<=[0-9}}]) ?(?:{SHORT_UNITS})s?(?:\^\{{?[23]\}}?)?\.?$", ""),
        (r"\^ ?(?:\{\\circ\}|\\circ)", ""),
        (r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", ""),
        (r"^\s*(-?[0-9]+)\s+([0-9]+)/([0-9]+)\s*$", r"\1\\frac{\2}{\3}"),
        (r"- +", "-"),
    )
)
WRAPPER = re.compile(r"(?:\\(?:text|textbf|mathrm|mathbf|mbox))?\{")
INTEGER = re.compile(r"-?[0-9]+(?:\.0*)?")
# three digits of exponent: Fraction computes the power
DECIMAL = re.compile(r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")
FRACTION = re.compile(r"(-?)\\frac\{(-?)([0-9]+)\}\{([0-9]+)\}|(-?)([0-9]+)/([0-9]+)")
COMMANDS = re.compile(r"\\(?:begin|end)\{[a-z]+\}|\\[a-zA-Z]+|sin|cos|tan|cot|sec|csc|log|exp|sqrt")
WORD = re.compile(r"[^\W\d_]{3}")


def quick(answer: Answer) -> float | None:
    """1 or 0 where text and numbers decide; None where only algebra can.

    Raises:
        ValueError: the label is a GSM8K solution, which no boxed answer can equal.
    """
    if "####" in answer.label:
        raise ValueError(f"math needs the answer alone as label; use --rm-type gsm8k for {answer.label[-40:]!r}")
    given, truth = extract_boxed_answer(answer.response), unboxed(answer.label)
    if given is None or not truth:
        return 0.0
    verdict = compare(given, truth)
    return None if verdict is None else float(verdict)


def slow(answer: Answer) -> float:
    """1 if algebra makes the boxed answer and the label equal, else 0."""
    given, truth = extract_boxed_answer(answer.response), unboxed(answer.label)
    return float(given is not None and truth is not None and equal_by_algebra(given, truth))


def unboxed(label: str) -> str | None:
    r"""The label itself, or what is in its ``\boxed{}``."""
    return extract_boxed_answer(label) if "\\boxed" in label else label


def compare(given: str, truth: str) -> bool | None:
    """Whether two answers are equal as text or as numbers; None if only algebra can tell."""
    if normalize_answer(given) == normalize_answer(truth):
        return True
    if len(given) > MAX_ANSWER_CHARS or len(truth) > MAX_ANSWER_CHARS:
        return False
    verdicts = [compare_part(a, b) for a, b in pairs(tidy(given), tidy(truth))]
    if not verdicts or False in verdicts:
        return False
    return None if None in verdicts else True


def equal_by_algebra(given: str, truth: str) -> bool:
    """Whether two answers that `compare` cannot tell apart are equal, part by part."""
    from slimelite.rewards import symbolic  # sympy: workers alone pay for it

    return all(compare_part(a, b) or symbolic.equivalent(a, b) for a, b in pairs(tidy(given), tidy(truth)))


def compare_part(given: str, truth: str) -> bool | None:
    """`compare` for one tidied element of a tuple."""
    given, truth = plain(given), plain(truth)
    if given.replace(" ", "").lower() == truth.replace(" ", "").lower():
        return True
    if is_text(given) or is_text(truth) or bool(INTEGER.fullmatch(given)) != bool(INTEGER.fullmatch(truth)):
        return False
    one, other = number(given), number(truth)
    if one is None or other is None:
        return None
    both_fractions = FRACTION.fullmatch(given) and FRACTION.fullmatch(truth)
    return (one[1] == other[1] if both_fractions else True) and one[0] == other[0]


def plain(text: str) -> str:
    """``text`` without a leading plus, and 1e3 as 1000."""
    text = text.removeprefix("+").lstrip()
    whole = Fraction(text) if "e" in text.lower() and DECIMAL.fullmatch(text) else Fraction(1, 2)
    return str(whole) if whole.denominator == 1 else text


def number(text: str) -> tuple[Fraction, int] | None:
    """(value, denominator as written) of an integer, decimal or simple fraction; None for anything else."""
    if match := FRACTION.fullmatch(text):
        signs, top, bottom = match[1] or match[5], match[3] or match[6], match[4] or match[7]
        if int(bottom) == 0:
            return None
        minus = ((signs or "") + (match[2] or "")).count("-") % 2
        return Fraction(-int(top) if minus else int(top), int(bottom)), int(bottom)
    return (Fraction(text), 1) if DECIMAL.fullmatch(text) else None


def is_text(text: str) -> bool:
    """Does it hold a word? Words compare as text: to algebra they are products, in which 'listen' equals 'silent'."""
    return WORD.search(COMMANDS.sub(" ", text)) is not None


def tidy(text: str) -> str:
    """The answer without units, currency, percent signs, layout commands and commas in numbers."""
    for pattern, replacement in TIDY:
        text = pattern.sub(replacement, text)
    return unwrapped(text.strip())


def unwrapped(text: str) -> str:
    r"""What stands inside braces or a ``\text{}`` that hold the whole text, without a full stop behind it."""
    while match := WRAPPER.match(text):
        depths = accumulate({"{": 1, "}": -1}.get(c, 0) for c in text[match.end() - 1 :])
        if next((i for i, depth in enumerate(depths) if depth == 0), 0) != len(text) - match.end():
            break
        text = text[match.end() : -1].strip()
    return text[:-1].rstrip() if text.endswith(".") and not text.endswith("..") else text


def pairs(given: str, truth: str) -> list[tuple[str, str]]:
    """What must be equal one to one: the elements of two flat tuples, intervals or ratios, or else the whole texts.

    Empty where no equality is possible: other brackets, a ratio and a quotient, another number of elements, no answer.
    """
    if not given or is_ratio(given) != is_ratio(truth):
        return []
    one, other = elements(given), elements(truth)
    if len(one) > 1 and len(other) > 1:
        alike = len(one) == len(other) and (is_ratio(given) or (given[0], given[-1]) == (truth[0], truth[-1]))
        return list(zip(one, other, strict=True)) if alike else []
    return [(given, truth)] if len(one) != len(other) else [(one[0], other[0])]


def elements(text: str) -> list[str]:
    """The elements of a flat tuple, an interval or a ratio; the whole text for anything else."""
    if is_ratio(text):
        return [part.strip() for part in text.rpartition("=")[2].split(":")]
    inner = text[1:-1]
    if len(text) > 2 and text[0] in "([" and text[-1] in ")]" and not set(inner) & set("()[]"):
        return [part.strip() for part in inner.split(",")]
    return [text]


def is_ratio(text: str) -> bool:
    """Is it a ratio, a time or the like? 3:5 is not 3/5."""
    return ":" in text and "\\{" not in text


def example(answer: Answer) -> str:
    """A response that is right."""
    return f"\\boxed{{{unboxed(answer.label)}}}"


RULE = Rule("math", quick, slow, example, bounded=True)
