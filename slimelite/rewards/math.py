r"""The rules for answers to mathematical questions: ``math``, ``deepscaler``, ``gsm8k`` and ``dapo``.

For ``math``, the content of the last ``\boxed{}`` must equal the label as text, as a number or by algebra. As in slime,
a fraction must be reduced, and an integer must be written as an integer, so ``\frac{4}{2}`` does not equal 2. For the
algebra, slime evaluates the text as Python code; slimelite uses the library math-verify in a worker process.
"""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate

from slimelite.rewards.rules import Answer

# no answer in MATH is longer; longer answers must match as text
MAX_ANSWER_CHARS = 500

UNITS = "degree|cm|centimeter|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard|percent"
# these are units only after a number at the end; elsewhere, two letters are two variables
SHORT_UNITS = "km|mm|dm|kg|mg|ft|lb|hr|min|sec|mph"
# (pattern, replacement); each is applied once, in this order
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
# the exponent has at most three digits, because Fraction computes the power
DECIMAL = re.compile(r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")
FRACTION = re.compile(r"(-?)\\frac\{(-?)([0-9]+)\}\{([0-9]+)\}|(-?)([0-9]+)/([0-9]+)")
COMMANDS = re.compile(r"\\(?:begin|end)\{[a-z]+\}|\\[a-zA-Z]+|sin|cos|tan|cot|sec|csc|log|exp|sqrt")
WORD = re.compile(r"[^\W\d_]{3}")


def last_boxed_only_string(text: str) -> str | None:
    r"""The last ``\boxed{...}`` in ``text``, up to its closing brace. If there is no ``\boxed``, the last
    ``\fbox{...}`` is returned; if there is no ``\fbox`` either, None."""
    start = text.rfind("\\boxed")
    if start < 0:
        start = text.rfind("\\fbox")
    if start < 0:
        return None
    depth = 0
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0 and brace.group() == "}":
            return text[start : start + brace.end()]
    return None


def remove_boxed(text: str | None) -> str | None:
    r"""The content of the box, if ``text`` is exactly one ``\boxed{...}``; otherwise None."""
    if text is None or not text.startswith("\\boxed{") or not text.endswith("}"):
        return None
    return text[len("\\boxed{") : -1]


def extract_boxed_answer(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}`` in ``text``, or None if there is none."""
    return remove_boxed(last_boxed_only_string(text))


def normalize_answer(text: str) -> str:
    r"""The normalised form of a MATH answer (Hendrycks et al. 2021), without a ``\text{...}`` around the whole
    answer."""
    text = text.strip()
    whole = re.search(r"^\\text\{(.+?)\}$", text)
    return strip_string(whole[1].strip() if whole else text)


def strip_string(text: str) -> str:
    r"""Normalise an answer as the MATH dataset's own code does. This code rewrites or removes spaces, ``\left``,
    degrees, units, ``\%``, ``\frac12``, ``3/4``, ``0.5``, ``x =``."""
    text = text.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac").replace("\\left", "").replace("\\right", "")
    text = text.replace("^{\\circ}", "").replace("^\\circ", "").replace("\\$", "")
    # in answers, "\text{ " only starts a unit
    text = text.partition("\\text{ ")[0].replace("\\%", "")
    text = text.replace(" .", " 0.").replace("{.", "{0.")
    if text.startswith("."):
        text = "0" + text
    left, equals, right = text.partition("=")
    if equals and len(left) <= 2 and "=" not in right:
        text = right
    text = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", text.replace(" ", ""))
    text = re.sub(r"\\frac([^{])(.)", _brace_fraction, text)
    if text == "0.5":
        return "\\frac{1}{2}"
    return re.sub(r"^(0|-?[1-9][0-9]*)/(0|-?[1-9][0-9]*)$", r"\\frac{\1}{\2}", text)


def _brace_fraction(match: re.Match[str]) -> str:
    top, bottom = match.groups()
    return f"\\frac{{{top}}}{bottom}" if bottom == "{" else f"\\frac{{{top}}}{{{bottom}}}"


def quick(answer: Answer) -> float | None:
    """Compare the response's boxed answer with the label, as text and as numbers. Return 1 if they are equal, 0 if they
    differ or there is no box, and None if algebra is needed.

    Raises:
        ValueError: the label is a whole GSM8K solution, which no boxed answer can equal.
    """
    if "####" in answer.label:
        raise ValueError(f"math needs a label that is only the answer; use --rm-type gsm8k for {answer.label[-40:]!r}")
    prediction, truth = extract_boxed_answer(answer.response), unboxed(answer.label)
    if prediction is None or not truth:
        return 0.0
    verdict = compare(prediction, truth)
    return None if verdict is None else float(verdict)


def slow(answer: Answer) -> float:
    """Return 1 if algebra shows that the response's boxed answer equals the label, else 0."""
    prediction, truth = extract_boxed_answer(answer.response), unboxed(answer.label)
    return float(prediction is not None and truth is not None and equal_by_algebra(prediction, truth))


def unboxed(label: str) -> str | None:
    r"""The content of the last ``\boxed{}`` in the label. If the label has no box, the label itself."""
    return extract_boxed_answer(label) if "\\boxed" in label else label


def compare(prediction: str, truth: str) -> bool | None:
    """Whether two answers are equal as text or as numbers. Returns None if algebra is needed."""
    if normalize_answer(prediction) == normalize_answer(truth):
        return True
    if len(prediction) > MAX_ANSWER_CHARS or len(truth) > MAX_ANSWER_CHARS:
        return False
    verdicts = [compare_part(a, b) for a, b in pairs(tidy(prediction), tidy(truth))]
    if not verdicts or False in verdicts:
        return False
    return None if None in verdicts else True


def equal_by_algebra(prediction: str, truth: str) -> bool:
    """Whether algebra shows that two answers are equal, element by element (see `pairs`). This function is for answers
    for which `compare` returns None."""
    from slimelite.rewards import symbolic  # imported here, because only workers should load sympy

    return all(compare_part(a, b) or symbolic.equivalent(a, b) for a, b in pairs(tidy(prediction), tidy(truth)))


def compare_part(prediction: str, truth: str) -> bool | None:
    """Like `compare`, but for one pair of elements (see `pairs`). `tidy` has already cleaned both texts."""
    prediction, truth = plain(prediction), plain(truth)
    if prediction.replace(" ", "").lower() == truth.replace(" ", "").lower():
        return True
    if is_text(prediction) or is_text(truth) or bool(INTEGER.fullmatch(prediction)) != bool(INTEGER.fullmatch(truth)):
        return False
    one, other = number(prediction), number(truth)
    if one is None or other is None:
        return None
    both_fractions = FRACTION.fullmatch(prediction) and FRACTION.fullmatch(truth)
    return (one[1] == other[1] if both_fractions else True) and one[0] == other[0]


def plain(text: str) -> str:
    """``text`` without a leading plus. A number in the form 1e3 is rewritten as 1000."""
    text = text.removeprefix("+").lstrip()
    whole = Fraction(text) if "e" in text.lower() and DECIMAL.fullmatch(text) else Fraction(1, 2)
    return str(whole) if whole.denominator == 1 else text


def number(text: str) -> tuple[Fraction, int] | None:
    """The pair (value, denominator as written) if ``text`` is an integer, a decimal or a simple fraction; otherwise
    None."""
    if match := FRACTION.fullmatch(text):
        signs, top, bottom = match[1] or match[5], match[3] or match[6], match[4] or match[7]
        if int(bottom) == 0:
            return None
        minus = ((signs or "") + (match[2] or "")).count("-") % 2
        return Fraction(-int(top) if minus else int(top), int(bottom)), int(bottom)
    return (Fraction(text), 1) if DECIMAL.fullmatch(text) else None


def is_text(text: str) -> bool:
    """Whether ``text`` contains a word. Answers with words must be compared as text: in algebra a word is a product of
    variables, so 'listen' would equal 'silent'."""
    return WORD.search(COMMANDS.sub(" ", text)) is not None


def tidy(text: str) -> str:
    """``text`` without units, currency signs, percent signs, layout commands, and commas in numbers."""
    for pattern, replacement in TIDY:
        text = pattern.sub(replacement, text)
    return unwrapped(text.strip())


def unwrapped(text: str) -> str:
    r"""``text`` without braces or a ``\text{}`` around all of it, and without a full stop at its end."""
    while match := WRAPPER.match(text):
        depths = accumulate({"{": 1, "}": -1}.get(c, 0) for c in text[match.end() - 1 :])
        if next((i for i, depth in enumerate(depths) if depth == 0), 0) != len(text) - match.end():
            break
        text = text[match.end() : -1].strip()
    return text[:-1].rstrip() if text.endswith(".") and not text.endswith("..") else text


def pairs(prediction: str, truth: str) -> list[tuple[str, str]]:
    """Pairs of texts to compare. The two answers are equal if the two texts of each pair are equal. For two flat
    tuples, intervals or ratios, the pairs consist of their elements. For other answers, the only pair is the two whole
    texts.

    The list is empty if the answers cannot be equal. Answers cannot be equal if they differ in their brackets or number
    of elements, if only one of them is a ratio, or if the prediction is empty.
    """
    if not prediction or is_ratio(prediction) != is_ratio(truth):
        return []
    one, other = elements(prediction), elements(truth)
    if len(one) > 1 and len(other) > 1:
        alike = len(one) == len(other) and (
            is_ratio(prediction) or (prediction[0], prediction[-1]) == (truth[0], truth[-1])
        )
        return list(zip(one, other, strict=True)) if alike else []
    return [(prediction, truth)] if len(one) != len(other) else [(one[0], other[0])]


def elements(text: str) -> list[str]:
    """The elements of ``text`` if it is a flat tuple, an interval or a ratio. Otherwise the only element is the whole
    ``text``."""
    if is_ratio(text):
        return [part.strip() for part in text.rpartition("=")[2].split(":")]
    inner = text[1:-1]
    if len(text) > 2 and text[0] in "([" and text[-1] in ")]" and not set(inner) & set("()[]"):
        return [part.strip() for part in inner.split(",")]
    return [text]


def is_ratio(text: str) -> bool:
    """Whether ``text`` contains a colon (as ratios and times do) and no set in braces. The ratio 3:5 is not treated as
    equal to 3/5."""
    return ":" in text and "\\{" not in text


def example(answer: Answer) -> str:
    """A response to which the rule ``math`` gives reward 1."""
    return f"\\boxed{{{unboxed(answer.label)}}}"


def deepscaler(answer: Answer) -> float | None:
    """The function ``quick`` of the rule ``deepscaler``. It calls `quick` with the part of the response that `solution`
    returns. If `solution` returns None, the result is 0."""
    tail = solution(answer.response)
    return 0.0 if tail is None else quick(replace(answer, response=tail))


def deepscaler_slow(answer: Answer) -> float:
    """The function ``slow`` of the rule ``deepscaler``. It calls `slow` with the part of the response that `solution`
    returns."""
    return slow(replace(answer, response=solution(answer.response) or ""))


def solution(response: str) -> str | None:
    """The text after the last ``</think>``. If there is no ``</think>``, the text after the first ``###Response``.
    Returns None if the response contains neither marker."""
    if "</think>" in response:
        return response.rpartition("</think>")[2]
    _, marker, tail = response.partition("###Response")
    return tail.partition("###Response")[0] if marker else None


def deepscaler_example(answer: Answer) -> str:
    """A response to which the rule ``deepscaler`` gives reward 1."""
    return f"</think>{example(answer)}"


# a full stop after the number is not part of the number, and 5/8 is not the number 5
_NUMBER = r"([-+]?)\$?([-+]?)([0-9][0-9,]{0,60}(?:\.[0-9]{1,60})?|\.[0-9]{1,60})(?![0-9/]|\.[0-9])"
NUMBER = re.compile(r"[ \t]{0,8}" + _NUMBER)


def gsm8k(answer: Answer) -> float:
    """1 if the number after the last ``####`` of the response equals the label's number, else 0.

    Raises:
        ValueError: the label, or its text after the last ``####``, does not begin with a number.
    """
    truth = gsm8k_number(answer.label.rpartition("####")[2])
    if truth is None:
        raise ValueError(f"gsm8k needs a number as label (after '####' in a solution), not {answer.label[-60:]!r}")
    _, marker, tail = answer.response.rpartition("####")
    return float(bool(marker) and gsm8k_number(tail) == truth)


def gsm8k_number(text: str) -> Fraction | None:
    """The number at the start of ``text``, or None if ``text`` does not start with a number."""
    match = NUMBER.match(text)
    if match is None:
        return None
    value = Fraction(match[3].replace(",", ""))
    return -value if "-" in match[1] + match[2] else value


def gsm8k_example(answer: Answer) -> str:
    """A response to which the rules ``gsm8k`` and ``last_number`` give reward 1."""
    return f"#### {answer.label.rpartition('####')[2]}"


# a number that is not part of a word, a fraction or a longer number
ANY_NUMBER = re.compile(r"(?<![\w./])" + _NUMBER)


def last_number(answer: Answer) -> float:
    r"""Return 1 if the last number of the response equals the label's number, else 0. If the last ``\boxed{}`` contains
    numbers, only the numbers in this box are considered.

    Raises:
        ValueError: the label, or its text after the last ``####``, does not begin with a number.
    """
    truth = gsm8k_number(answer.label.rpartition("####")[2])
    if truth is None:
        raise ValueError(
            f"last_number needs a number as label (after '####' in a solution), not {answer.label[-60:]!r}"
        )
    boxed = extract_boxed_answer(answer.response) or ""
    numbers = [match[0] for match in ANY_NUMBER.finditer(boxed)]
    numbers = numbers or [match[0] for match in ANY_NUMBER.finditer(answer.response)]
    return float(bool(numbers) and gsm8k_number(numbers[-1]) == truth)


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
DAPO_UNITS = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples"),
)
DAPO_MARKS = (
    *("\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}", "\\mathrm{th}"),
    *("^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots", "<|im_end|>", "<|endoftext|>"),
)


def dapo(answer: Answer) -> dict[str, object]:
    """The rule ``dapo``. The reward is the result of `compute_score`, a dict with score, acc and pred.

    Raises:
        ValueError: the label is not an integer.
    """
    return compute_score(
        answer.response, answer.label, strict_box_verify=bool(answer.metadata.get("strict_box_verify"))
    )


def compute_score(response: str, label: str, *, strict_box_verify: bool = False) -> dict[str, object]:
    """A dict with ``score`` (1 or −1), ``acc`` (whether the answer is correct) and ``pred`` (the answer), computed from
    the last 300 characters of the response."""
    tail, label = response[-RESPONSE_CHARS:], str(label)
    correct, pred = verify_strict_box(tail, label) if strict_box_verify else verify_minerva(tail, label)
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}


def verify_minerva(response: str, label: str) -> tuple[bool, str]:
    """The pair (correct, prediction), where the prediction is the answer in the last line ``Answer: ...``. The label
    must be an integer."""
    answers = re.findall(r"(?i)answer\s*:\s*([^\n]+)", response)
    pred = normalize_final_answer(answers[-1] if answers else "[INVALID]")
    return pred == integer(label), pred


def verify_strict_box(response: str, label: str) -> tuple[bool, str | None]:
    """The pair (correct, prediction), where the prediction is the content of the last box in the response's last 100
    characters. The prediction is correct if it equals the label exactly."""
    pred = extract_boxed_answer(response[-STRICT_CHARS:])
    return pred == label, pred


def integer(label: str) -> str:
    """The integer ``label``, written as plain digits without decimals."""
    text = normalize_final_answer(label)
    match = re.fullmatch(r"([-+]?[0-9]+)(?:\.0*)?", text)
    if match is None:
        raise ValueError(f"dapo needs integer labels, not {label!r}; use --rm-type math for other answers")
    return str(int(match[1]))


def normalize_final_answer(text: str) -> str:
    """The answer in ``text``, normalised as for Minerva (Lewkowycz et al. 2022): the part after the last ``=``, without
    articles, units and LaTeX commands around the answer."""
    text = text.rpartition("=")[2]
    for before, after in SUBSTITUTIONS:
        text = text.replace(before, after)
    for mark in (*DAPO_UNITS, *DAPO_MARKS):
        text = text.replace(mark, "")
    text = re.sub(r".*?\$(.*?)\$.*", r"$\1$", text)
    for wrapper in ("text", "textbf", "overline"):  # one after the other, because they may be nested
        text = re.sub(rf"\\{wrapper}\{{(.*?)\}}", r"\1", text)
    text = re.sub(r"\\boxed\{(.*)\}", r"\1", text)
    # \frac12 -> \frac{1}{2}, \sqrt3 -> \sqrt{3}
    text = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", text).replace("$", "")
    digits = text.replace(",", "")
    return (digits if digits.isdigit() else text).strip()


def dapo_example(answer: Answer) -> str:
    """A response to which the rule ``dapo`` gives reward 1."""
    strict = answer.metadata.get("strict_box_verify")
    return f"\\boxed{{{answer.label}}}" if strict else f"Answer: {integer(answer.label)}"
