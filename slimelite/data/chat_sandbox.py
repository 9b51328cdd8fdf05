"""The Jinja environment of chat templates. It refuses an operation that makes a huge value from small ones.

Python cannot interrupt one operation, such as ``'x' * 10 ** 10``. So the size of its result is estimated before the
operation runs. This happens only in code that `slimelite.data.messages.bounded` limits. For other code, such as a
plugin that renders messages, the environment behaves like Jinja's own.
"""

from __future__ import annotations

import functools
import re
import string
from collections.abc import Callable, Iterable
from types import BuiltinMethodType, FunctionType
from typing import Any

from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

from slimelite.data.render_watch import Stop, watch

# the most characters or items that one operation may make; the largest integer in a product, power or division [bits]
LARGEST, BITS = 1 << 27, 1 << 14
# a filter or a method may make a list with 64 bytes for each character; strftime makes up to 256 characters for one
PER_CHARACTER, PER_DATE = 8, 256
# the longest indentation of JSON, whose number of lines is not known in advance
INDENT = 100
# a specification of the width and the form of a value, or a part of it
SPEC = re.compile(r"(.?[<>=^])?[-+ ]?z?#?\d*[,_]?\.?\d*[A-Za-z%]?", re.DOTALL)
SIZED = (str, bytes, list, tuple)
FUNCTIONS = (BuiltinMethodType, FunctionType)
OWNERS = (str, bytes, int)


def _limit(name: str, size: int, most: int = LARGEST) -> None:
    if size > most:
        raise Stop(f"makes a value that is too large (with {name!r})")


def _longest(values: Iterable[Any], numbers: bool = False) -> int:
    """The length of the longest text or list in ``values``. With ``numbers``, integers are lengths, too."""
    longest, ahead, seen = 0, [*values], set[int]()
    while ahead:
        value = ahead.pop()
        if isinstance(value, SIZED):
            longest = max(longest, len(value))
        elif numbers and isinstance(value, int):
            longest = max(longest, abs(value))
        if isinstance(value, list | tuple | dict) and id(value) not in seen:
            seen.add(id(value))
            ahead += value.values() if isinstance(value, dict) else value
    return longest


def _digits(values: Iterable[Any]) -> int:
    """An upper limit for the digits of one number or one format specification among ``values``."""
    most, ahead, seen = 0, [*values], set[int]()
    while ahead:
        value = ahead.pop()
        if isinstance(value, int):
            most = max(most, value.bit_length() // 3 + 1)
        elif isinstance(value, float) or (isinstance(value, str) and SPEC.fullmatch(value)):
            most = max(most, sum(map(str.isdecimal, str(value))))
        elif isinstance(value, list | tuple | dict) and id(value) not in seen:
            seen.add(id(value))
            ahead += value.values() if isinstance(value, dict) else value
    return most


def _check_format(name: str, text: str, values: list[Any]) -> None:
    """Check a format of the operator ``%`` or of the method ``format``."""
    if name == "%":
        fields = re.findall(r"[*\d]+(?=[.*\d]*[hlL]?[diouxXeEfFgGcrsa])", text)
        width = _longest(values, numbers=True) if "*" in "".join(fields) else 0
    else:
        fields, width = [spec for _, _, spec, _ in string.Formatter().parse(text) if spec], 0
    digits = max((len(run.lstrip("0")) for field in fields for run in re.findall(r"\d+", field)), default=0)
    for field in fields:  # values may be parts of the width
        if name != "%" and "{" in field:
            digits = max(digits, sum(map(str.isdecimal, field)) + field.count("{") * _digits(values))
    width = max(width, 10 ** min(digits, 9))
    _limit(name, text.count("%" if name == "%" else "{") * (width + _longest(values)))


def _check(name: str, value: Any, /, *args: Any, **named: Any) -> None:
    """Check the operation ``name`` on ``value`` before it runs. ``args`` and ``named`` are its other arguments."""
    others, size = [*args, *named.values()], len(value) if isinstance(value, SIZED) else 1
    _limit(name, size * PER_CHARACTER)
    if name in ("center", "ljust", "rjust", "zfill", "to_bytes", "batch"):
        _limit(name, _longest(others, numbers=True))
    elif name in ("expandtabs", "indent"):
        _limit(name, size * _longest(others, numbers=True))
    elif name in ("translate", "wordwrap", "urlize"):
        _limit(name, size * _longest(others))
    elif name in ("round", "tojson"):
        _limit(name, _longest(others, numbers=True), BITS if name == "round" else INDENT)
    elif name in ("join", "sum"):
        sizes = [len(item) if isinstance(item, SIZED) else _longest([item]) for item in value]
        _limit(name, sum(sizes) + size * _longest(others))
    elif name == "replace":
        old, new = ({**dict(zip(("old", "new"), args, strict=False)), **named}.get(key) for key in ("old", "new"))
        texts: list[Any] = [each if isinstance(each, bytes) else str(each) for each in (value, old, new)]
        if type(texts[0]) is type(texts[1]):
            _limit(name, texts[0].count(texts[1]) * len(texts[2]))
    elif name in ("%", "format", "format_map") and isinstance(value, str):
        _check_format(name, value, others)


def _limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter ``function``, with a check before each call."""
    first = int(hasattr(function, "jinja_pass_arg"))  # the first argument may be the environment

    @functools.wraps(function)
    def limited(*args: Any, **named: Any) -> Any:
        if watch.limits_this_thread() and len(args) > first:
            value = list(args[first]) if name in ("join", "sum") else args[first]
            args = (*args[:first], value, *args[first + 1 :])
            _check("%" if name == "format" else name, *args[first:], **named)
        return function(*args, **named)

    return limited


class _Filters(dict[str, Callable[..., Any]]):
    """Filters by name. transformers adds its own filters to the environment."""

    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        super().__setitem__(name, _limited(name, function))


class ChatSandbox(ImmutableSandboxedEnvironment):
    """Renders like `ImmutableSandboxedEnvironment`. In code with limits, `Stop` is raised before an operation that
    makes a huge value."""

    intercepted_binops = frozenset({"*", "**", "%", "//"})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        filters, self.filters = self.filters, _Filters()
        for name, function in filters.items():
            self.filters[name] = function

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Jinja joins all operands of ``a ~ b ~ c`` at once. Here, each operation joins only two values, so that the
        rendering can be interrupted between them."""
        tree = super()._parse(source, name, filename)
        for node in tree.find_all(nodes.Concat):
            if len(node.nodes) > 2:
                half = len(node.nodes) // 2
                halves = (node.nodes[:half], node.nodes[half:])
                node.nodes = [nodes.Concat(part, lineno=node.lineno, environment=self) for part in halves]
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if watch.limits_this_thread():
            if isinstance(left, int) and isinstance(right, int):
                bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
                _limit(operator, bits, BITS)
            elif operator == "*":
                for value, times in ((left, right), (right, left)):
                    if isinstance(value, SIZED) and isinstance(times, int):
                        _limit(operator, len(value) * times)
            elif operator == "%":
                _check(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        if watch.limits_this_thread() and isinstance(obj, FUNCTIONS):
            method: Any = getattr(obj, "__wrapped__", obj)  # Jinja wraps `format`
            name, owner = method.__name__, getattr(method, "__self__", None)
            if name == "strftime_now":
                _limit(name, _longest([*args, *kwargs.values()]) * PER_DATE)
            elif name == "join" and isinstance(owner, str | bytes) and args:
                args = (list(args[0]), *args[1:])
                _check(name, args[0], owner)
            elif isinstance(owner, OWNERS):
                _check(name, owner, *args, **kwargs)
        return super().call(context, obj, *args, **kwargs)

    def concat(self, pieces: Iterable[str]) -> str:
        """The text of a template, a macro or a block."""
        if watch.limits_this_thread():
            pieces = list(pieces)
            _limit("output", sum(map(len, pieces)))
        return "".join(pieces)


@functools.cache
def install() -> None:
    """Make transformers compile all chat templates for `ChatSandbox`."""
    chat_template_utils.ImmutableSandboxedEnvironment = ChatSandbox
    chat_template_utils._compile_jinja_template.cache_clear()
