"""The Jinja environment in which chat templates run. It limits the sizes of the values that a template makes.

Chat templates come with models of strangers. Python cannot interrupt one operation, such as ``'x' * 10 ** 10``. So the
environment counts the characters and items of each large value. If an operation may return more than it gets, its
result is counted before the operation runs.

When this module is imported, transformers compiles all later chat templates for this environment.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from itertools import islice, permutations
from types import BuiltinMethodType, FunctionType
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from transformers.utils import chat_template_utils

# the most characters and items that all values of one rendering may have together; values up to SMALL do not count
LARGEST, SMALL = 1 << 27, 1000
SEQUENCES = (str, bytes, list, tuple)
VIEWS: tuple[type[Iterable[Any]], ...] = (
    list,
    tuple,
    set,
    frozenset,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)
# the largest result of ``**`` and of a product of integers [bits]
BITS = 10_000
# filters that return a part of a list, or work item by item
FREE = {
    *("abs", "attr", "count", "d", "default", "filter", "first", "float", "int", "items", "last", "length", "map"),
    *("max", "min", "random", "reject", "rejectattr", "select", "selectattr"),
}
# filters that return the items of a list
LISTS = {"dictsort", "groupby", "list", "reverse", "sort", "unique"}
# filters, methods and functions whose result may be longer than all their arguments
GROWING = {
    *("batch", "center", "expandtabs", "format", "format_map", "indent", "join", "ljust", "replace", "rjust", "round"),
    *("slice", "strftime_now", "to_bytes", "tojson", "translate", "zfill"),
}
# filters whose results may have any length; no template of a model uses them
REFUSED = ("pprint", "urlize", "wordwrap", "xmlattr")


class TooLarge(MemoryError):
    """A chat template makes values that are too large."""


class _Budget(threading.local):
    left = LARGEST


_budget = _Budget()


def renew() -> None:
    """Record that the calling thread begins a rendering, which may make `LARGEST` characters and items."""
    _budget.left = LARGEST


def spend(size: int) -> None:
    """Count a value of this ``size``."""
    if size > SMALL:
        _budget.left -= size
        if _budget.left < 0:
            raise TooLarge


def measured(value: Any) -> Any:
    """Count ``value``, and return it."""
    if isinstance(value, SEQUENCES) and len(value) > SMALL:
        spend(len(value))
    return value


def size_as_text(value: object) -> int:
    """About the number of characters of ``value`` as text. A value that a list contains twice counts twice."""
    size, ahead = 0, list[tuple[Any, int]]([(value, 1)])
    while ahead and size <= LARGEST:
        part, depth = ahead.pop()
        size += depth
        if isinstance(part, (str, bytes, range)):
            size += len(part)
        elif isinstance(part, dict):
            ahead += [(one, depth + 1) for pair in part.items() for one in pair]
        elif isinstance(part, VIEWS):
            ahead += [(one, depth + 1) for one in part]
        elif isinstance(part, Namespace):
            size += LARGEST  # it may contain itself
    return size


def _text(value: object) -> object:
    """Count ``value``, which will be converted to text, and return it."""
    if not isinstance(value, str):
        spend(size_as_text(value))
    elif len(value) > SMALL:
        spend(len(value))
    return value


def _count_before(name: str, value: Any, others: list[Any]) -> None:
    """Count the result of the filter or method ``name`` before it is called. ``others``: its arguments."""
    texts = [other for other in others if isinstance(other, str | bytes)]
    numbers = [abs(other) for other in others if isinstance(other, int)]
    if name == "replace":
        whole: Any = value if isinstance(value, bytes) else str(value)
        spend(max((whole.count(old) * len(new) for old, new in permutations(texts, 2)), default=0))
    elif name == "join":
        spend(len(value) * sum(map(len, texts)) + size_as_text(value))
    elif name in ("format", "format_map", "%"):
        fields = re.findall(r"%[^A-Za-z%]*|\{[^}]*", str(value))
        width = 10 ** max((len(digits) for field in fields for digits in re.findall(r"\d+", field)), default=0)
        if any("*" in field or "{" in field[1:] for field in fields):  # an argument may be a width
            width = max(width, *_numbers(others), 0)
        spend(len(fields) * (width + size_as_text(others)))
    elif name in ("translate", "strftime_now"):
        spend(256 * size_as_text(value) * size_as_text(others))
    else:  # a number may be a width, a number of items or an indentation
        numbers.append(size_as_text(others) if name in ("indent", "tojson") else 0)  # an indentation may be a text
        spend((1 + size_as_text(value)) * max(numbers))


def _numbers(values: Iterable[object]) -> list[int]:
    """The integers in ``values``, and in the lists and mappings in ``values``."""
    flat = [one for value in values for one in (value if isinstance(value, list | tuple) else [value])]
    flat = [one for value in flat for one in (value.values() if isinstance(value, Mapping) else [value])]
    return [abs(one) for one in flat if isinstance(one, int)]


def _limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter ``function``, which counts its result."""
    if name in FREE:
        return function
    first = int(hasattr(function, "jinja_pass_arg"))  # the first argument may be the template's context

    @functools.wraps(function)
    def limited(*args: Any, **kwargs: Any) -> Any:
        others = [*args[first + 1 :], *kwargs.values()]
        if name in REFUSED or (name == "sum" and any(isinstance(other, SEQUENCES[2:]) for other in others)):
            raise TooLarge  # a sum that begins with a list joins lists
        if name == "join":
            args = (*args[:first], list(args[first]), *args[first + 1 :])
        if name not in LISTS:
            _text(args[first])
        if name in GROWING and (others or name == "join"):
            _count_before(name, args[first], others)
        return measured(function(*args, **kwargs))

    return limited


class _Filters(dict[str, Callable[..., Any]]):
    """Filters by name. transformers adds its own filters after the environment is made."""

    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        super().__setitem__(name, _limited(name, function))


FUNCTIONS = {BuiltinMethodType, FunctionType}


class _Generator(CodeGenerator):
    """Writes the code of a template. Jinja's code for ``+``, ``~`` and slices calls no method of the environment."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        marked = frame.eval_ctx.volatile or frame.eval_ctx.autoescape
        self.write(f"environment.joined({'markup_join' if marked else 'str_join'}, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        self.write("environment.measured(")
        super().visit_Add(node, frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        cut = isinstance(node.arg, nodes.Slice)
        self.write("environment.measured(" * cut)
        super().visit_Getitem(node, frame)
        self.write(")" * cut)


class ChatSandbox(ImmutableSandboxedEnvironment):
    """Renders like `ImmutableSandboxedEnvironment`. If a rendering makes values that are too large, `TooLarge` is
    raised."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"*", "**", "%"})
    measured = staticmethod(measured)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.finalize = _text
        filters, self.filters = self.filters, _Filters()
        for name, function in filters.items():
            self.filters[name] = function
        del self.globals["lipsum"]  # it returns a text of any length

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str | bytes):
            _count_before("%", left, [right])
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(value, SEQUENCES):
                    spend(len(value) * times)
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > BITS:
                raise TooLarge
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if type(__obj) in FUNCTIONS and __obj.__name__ in GROWING:
            method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps `format`
            name, owner = method.__name__, getattr(method, "__self__", "")
            if name == "join":
                args = tuple(map(list, args))
                _count_before(name, args[0], [owner])
            else:
                _count_before(name, owner, [*args, *kwargs.values()])
        return measured(super().call(__context, __obj, *args, **kwargs))

    def joined(self, join: Callable[[Iterable[Any]], str], parts: tuple[Any, ...]) -> str:
        """The text of ``parts``, which ``~`` joins."""
        text: str = measured(join(map(_text, parts)))
        return text

    def concat(self, pieces: Iterable[str]) -> str:
        """The text of a template, a macro or a block."""
        kept, rest = list[str](), iter(pieces)
        while chunk := list(islice(rest, SMALL)):
            spend(sum(map(len, chunk)) + 10 * len(chunk))
            kept += chunk
        return "".join(kept)


chat_template_utils.ImmutableSandboxedEnvironment = ChatSandbox
