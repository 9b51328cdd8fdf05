"""The environment ``calculator``. The sums and products are too hard for a small model alone, but a tool computes
them."""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from slimelite.environments.tools import ToolEnvironment

ROWS = 4096
OPERATIONS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
# limits, because no expression may take long: the longest text, the largest exponent, the largest base of a power
CHARACTERS, EXPONENT, BASE = 400, 64, 1e6


class Calculator(ToolEnvironment):
    """The environment. The reward is 1 if the last number of the last reply equals the label. Without a label, the
    run's reward function scores the episode."""

    def calculator(self, expression: str) -> str:
        """The value of an arithmetic expression with + - * / // % ** and parentheses."""
        return _text(value_of(expression))

    def tools(self) -> Sequence[Callable[..., Any]]:
        """The calculator."""
        return [self.calculator]

    def score(self, content: str) -> float | None:
        """Return 1 if the last number equals the label, else 0. Return None if the row has no label."""
        if self.row.label is None:
            return None
        numbers = re.findall(r"-?\d+(?:\.\d+)?", content)
        return float(bool(numbers) and float(numbers[-1]) == float(self.row.label))

    def metrics(self) -> Mapping[str, float]:
        """The metric ``rightful_calls``. The metric is 1 if the result of a call was the label."""
        if self.row.label is None:
            return {}
        label = _text(float(self.row.label))
        return {"rightful_calls": float(any(result == label for *_, result in self.calls))}


def value_of(expression: str) -> float:
    """The value of an arithmetic expression.

    Raises:
        ValueError: the text is not an arithmetic expression, or a text or a power is too large.
    """
    if len(expression) > CHARACTERS:
        raise ValueError(f"an expression has at most {CHARACTERS} characters")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{expression!r} is not an arithmetic expression") from None


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    operation = OPERATIONS.get(type(getattr(node, "op", None)))
    if operation is None:
        raise ValueError(f"{ast.unparse(node)!r} is not arithmetic")
    values = [_value(node.operand)] if isinstance(node, ast.UnaryOp) else [_value(node.left), _value(node.right)]  # type: ignore[attr-defined]
    if operation is operator.pow and not (abs(values[0]) <= BASE and abs(values[1]) <= EXPONENT):
        raise ValueError("a power is too large")
    return operation(*values)


def _text(value: float) -> str:
    """The number as text, without ``.0`` at the end, such as ``12`` or ``2.5``."""
    return str(int(value)) if value == int(value) else str(value)


def make(spec: str) -> type[Calculator]:
    """The factory of the environment. The factory takes no spec.

    Raises:
        ValueError: a spec is given.
    """
    if spec:
        raise ValueError(f"--environment calculator:{spec}: the calculator takes no spec")
    return Calculator


def rows(_spec: str) -> Iterator[dict[str, Any]]:
    """Products of two numbers of two digits, such as ``47*86=?``."""
    chance = random.Random(0)
    for _ in range(ROWS):
        a, b = chance.randint(10, 99), chance.randint(10, 99)
        yield {"input": f"{a}*{b}=?", "label": str(a * b), "metadata": {}}
