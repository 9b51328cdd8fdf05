"""Answers written in LaTeX: find the last box, bring what is in it to one form."""

from __future__ import annotations

import re


def last_boxed_only_string(text: str) -> str | None:
    r"""The last ``\boxed{...}``, or else ``\fbox{...}``, up to its closing brace; None if there is none."""
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
    r"""What stands inside ``\boxed{...}``; None if ``text`` is not exactly one box."""
    if text is None or not text.startswith("\\boxed{") or not text.endswith("}"):
        return None
    return text[len("\\boxed{") : -1]


def extract_boxed_answer(text: str) -> str | None:
    r"""What stands inside the last ``\boxed{...}``."""
    return remove_boxed(last_boxed_only_string(text))


def normalize_answer(text: str) -> str:
    r"""One spelling for an answer of MATH (Hendrycks et al. 2021), with ``\text{...}`` around the whole taken off."""
    text = text.strip()
    whole = re.search(r"^\\text\{(.+?)\}$", text)
    return strip_string(whole[1].strip() if whole else text)


def strip_string(text: str) -> str:
    r"""MATH's own normalisation: spaces, ``\left``, degrees, units, ``\%``, ``\frac12``, ``3/4``, ``0.5``, ``x =``."""
    text = text.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac").replace("\\left", "").replace("\\right", "")
    text = text.replace("^{\\circ}", "").replace("^\\circ", "").replace("\\$", "")
    # "\text{ " only ever starts a unit
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
