r"""Equality of two LaTeX expressions by algebra. Importing this loads sympy (half a second): only workers do.

Only math-verify's LaTeX grammar is used. Its plain-expression mode hands text to sympy's ``parse_expr``, which is
``eval``; nothing here may evaluate what a model wrote.
"""

from __future__ import annotations

import re

from math_verify import LatexExtractionConfig, parse, verify

# towers of powers, five-digit exponents and factorials of thousands: sympy would compute them
HUGE = re.compile(r"\^[\s{(]*[0-9]+\s*\^|\^[\s{(-]*[0-9]{5}|[0-9]{4}\s*!|!\s*!")


def equivalent(given: str, truth: str) -> bool:
    """Whether ``given`` equals ``truth`` (LaTeX without dollar signs), to 6 decimals where it must be numeric.

    What does not parse is not equal. There is no time limit in here: the worker pool sets it.
    """
    if HUGE.search(given) or HUGE.search(truth):
        return False
    one, other = _parse(truth), _parse(given)
    return bool(one and other) and bool(verify(one, other, timeout_seconds=None))


def _parse(text: str) -> list[object]:
    found: list[object] = parse(
        f"${text}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None
    )
    return found
