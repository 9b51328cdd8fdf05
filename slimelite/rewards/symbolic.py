r"""Tests by algebra whether two LaTeX expressions are equal. Only worker processes import this module, because it loads
sympy, which takes half a second.

This module uses only the LaTeX grammar and the comparison of the library math-verify. It does not use the library's
mode for plain expressions. That mode passes text to sympy's ``parse_expr``, which calls ``eval``. But ``eval`` must
never run text from a model.
"""

from __future__ import annotations

import re
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, _Latex2Sympy, normalize_latex
from latex2sympy2_extended.sets import FiniteSet
from math_verify import verify
from math_verify.grader import should_treat_as_complex
from math_verify.parser import get_last_eq

from slimelite.rewards.rules import TooCostly

Expression = Any  # an expression of sympy, or a node of the parse tree; neither library has type hints
# units=False, because units include single letters, so the t of x + 2t would be removed; boxed="none", because the box
# is already removed
NORMALIZATION = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
# decimal digits of numerical comparisons; models have not memorised decimal expansions of this length
PRECISION = 60
# size of the largest allowed number [bits]; it has 10,000 decimal digits, and sympy needs milliseconds for it
MAX_BITS = 32_768
# the largest power of a sum that sympy may expand
MAX_POWER_OF_SUM = 1000
MAX_TERMS = 10_000
# a number with its base, such as 101_2 or 1A_{16}; the grammar would drop the base of 101_2
BASE = re.compile(r"[0-9)][\s}]*_|[0-9][A-F]+_\{?(?:1[1-6]|[23][0-9])")
# LaTeX commands without their backslash, as in pi/2, 2sqrt3, sin(x)
BARE = re.compile(r"(?<![\\a-zA-Z])(pi|sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|theta|alpha|beta)(?![a-zA-Z])")
ROOT = re.compile(r"\\?sqrt\s?\(([^()]*)\)")
# functions that make a matrix from a number, such as eye(10000)
MATRIX_MAKERS = re.compile(r"\\operatorname\s*\{\s*(?:eye|zeros|ones|diag)\s*\}")


def equivalent(prediction: str, truth: str) -> bool:
    """Whether ``prediction`` equals ``truth`` (LaTeX without dollar signs). If one of the two texts cannot be parsed,
    the result is False.

    A decimal is read as an exact fraction, so 3.141593 is not pi. Repeated elements of a list count, so ``1,1,2`` does
    not equal ``1,2``.

    Raises:
        TooCostly: a number or a power in one of the expressions is too large to compute.
    """
    if prediction.count("'") != truth.count("'"):
        return False  # the grammar would read f'(x) as f(x)
    try:
        gold, pred = _parse(truth), _parse(prediction)
    except Exception:
        return False
    return _equal(gold, pred, braced="\\{" in prediction or "\\{" in truth)


def _equal(gold: Expression, pred: Expression, braced: bool = False) -> bool:
    """Like `verify`, but repeated elements of lists count (`verify` drops them). ``braced``: whether one side is a set
    in braces."""
    golds, preds = _written(gold), _written(pred)
    other = gold if golds is None else pred if preds is None else None
    beside_a_set = isinstance(other, sympy.Set) and not isinstance(other, sympy.Interval)
    of_two = isinstance(gold, sympy.Eq) and isinstance(pred, sympy.Eq) and gold.lhs != pred.lhs
    if (golds is None and preds is None) or beside_a_set or of_two:
        return bool(verify([gold], [pred], numeric_precision=PRECISION, timeout_seconds=None))
    golds, preds = golds or _ordered(gold), preds or _ordered(pred)
    if len(golds) != len(preds) or (other is not None and len(golds) > 1 and braced):
        return False
    if other is not None:  # one side is the list 1, 2 and the other side is the tuple (1, 2)
        return all(map(_equal, golds, preds))
    for element in golds:
        match = next((i for i, candidate in enumerate(preds) if _equal(element, candidate)), None)
        if match is None:
            return False
        del preds[match]
    return True


def _written(expression: Expression) -> list[Expression] | None:
    """The elements of a list or a finite set, in the order of the text. A leading ``x =`` is allowed. Returns None for
    any other expression."""
    if isinstance(expression, sympy.Eq):
        expression = expression.rhs
    return list(expression._unsorted_args) if isinstance(expression, FiniteSet) else None


def _ordered(expression: Expression) -> list[Expression]:
    """The elements of a tuple. The grammar may read a tuple as an open interval. For any other expression, the only
    element is the expression."""
    if isinstance(expression, sympy.Interval) and expression.is_open:
        return [expression.start, expression.end]
    return list(expression) if isinstance(expression, sympy.Tuple) else [expression]


class _Exact(_Latex2Sympy):
    """The library's parser with exact decimals. The parser computes some numbers while it parses, so `bits` checks
    their size first."""

    def parse_number(self, text: str) -> sympy.Rational:
        """Convert the text of a number to an exact fraction."""
        digits, _, exponent = text.replace(",", "").lower().partition("e")
        if abs(int(exponent or 0)) > MAX_BITS // 4:
            raise TooCostly(f"10^{exponent}")
        return sympy.Rational(digits) * sympy.Integer(10) ** int(exponent or 0)

    def convert_binom(self, binom: Expression) -> Expression:
        """Convert a binomial coefficient without computing its value."""
        return sympy.binomial(self.convert_expr(binom.upper), self.convert_expr(binom.lower), evaluate=False)

    def convert_func(self, func: Expression) -> Expression:
        """Convert a function. Arguments of gamma functions and degrees of roots are checked before the conversion,
        because sympy computes the values of such functions during the conversion."""
        named = func.func_normal_single_arg()
        if named and named.start.text in ("\\Gamma", "\\gamma"):
            argument = self.convert_func_arg(func.func_single_arg() or func.func_single_arg_noparens())
            _ = bits(sympy.gamma(argument, evaluate=False))
        if func.FUNC_SQRT() and func.root:
            _ = bits(self.convert_expr(func.root))
        return super().convert_func(func)

    def handle_exp(self, func: Expression) -> Expression:
        """Convert a power of e, after a check that its value is not too large."""
        if func.supexpr() and func.supexpr().expr():
            _ = bits(sympy.exp(self.convert_expr(func.supexpr().expr()), evaluate=False))
        return super().handle_exp(func)

    def handle_gcd_lcm(self, f: str, args: Expression) -> Expression:
        """Convert a gcd or lcm, after a check that its arguments are not too large."""
        _ = bits(list(args))
        return super().handle_gcd_lcm(f, args)

    def convert_interval(self, expr: Expression) -> Expression:
        """Convert an interval, after a check that its ends are not too large, because sympy compares the ends."""
        _ = bits([self.convert_expr(end) for end in expr.expr()])
        return super().convert_interval(expr)


def _parse(text: str) -> Expression:
    """Parse ``text`` as an expression. If this fails, parse only the last side of its chain of equations."""
    if BASE.search(text) or ":" in text or MATRIX_MAKERS.search(text):
        raise ValueError(f"not an expression: {text}")
    text = ROOT.sub(r"\\sqrt{\1}", text).replace("**", "^")
    text = normalize_latex(BARE.sub(r"\\\1", text), NORMALIZATION)
    try:
        expression = _read(text)
    except Exception:
        last = get_last_eq(text)
        if last == text:
            raise
        expression = _read(last)
    _ = bits(expression)
    return expression


def _read(text: str) -> Expression:
    return _Exact(is_real=not should_treat_as_complex(text)).parse(text)


def bits(expression: Expression) -> float:
    """An upper bound for the size of the numbers that occur when ``expression`` is computed [bits]. A variable is
    treated as a number of one bit.

    Raises:
        TooCostly: the bound is above ``MAX_BITS``, a sum is raised to a high power, or a series has too many terms.
    """
    size = _bits(expression)
    if size > MAX_BITS:
        raise TooCostly(f"a number of {size:.3g} bits")
    return size


def _bits(expression: Expression) -> float:
    if isinstance(expression, list):
        return max(map(bits, expression), default=1.0)
    if isinstance(expression, sympy.Rational):
        return float(max(int(expression.p).bit_length(), int(expression.q).bit_length(), 1))
    if isinstance(expression, sympy.MatrixBase):
        return sum(map(bits, expression.flat())) * max(expression.shape)
    parts = list(map(bits, getattr(expression, "args", ())))
    if isinstance(expression, sympy.Pow | sympy.exp):
        base, exponent = expression.as_base_exp()
        power = _value(exponent)
        if base.free_symbols and base.has(sympy.Add) and power > MAX_POWER_OF_SUM:
            raise TooCostly(f"a sum raised to the power {power:.3g}")
        return max(2.0 if isinstance(expression, sympy.exp) else parts[0], *parts) * max(power, 1.0)
    if isinstance(expression, sympy.factorial | sympy.factorial2 | sympy.gamma):
        return max(_value(expression.args[0]), 1.0) * parts[0]
    if isinstance(expression, sympy.binomial):
        return min(_value(expression.args[0]), _value(expression.args[1]) * parts[0]) + max(parts)
    if isinstance(expression, sympy.Sum | sympy.Product):
        terms = [_value(high - low) for _, low, high in expression.limits]
        if any(MAX_TERMS < count < float("inf") for count in terms):
            raise TooCostly(f"{max(terms):.3g} terms")
    return max(sum(parts), 1.0)


def _value(expression: Expression) -> float:
    """The absolute value of ``expression`` as a float. The value is 1 if the expression has variables. The caller must
    have checked the size."""
    if expression.free_symbols:
        return 1.0
    try:
        value = abs(complex(expression.evalf(15)))
    except OverflowError:
        return float("inf")
    return 1.0 if value != value else value
