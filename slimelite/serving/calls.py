"""Functions that read tool calls, for all model families. The functions convert a text to values.

The argument values in calls of Gemma 4 and LFM2 are neither JSON nor plain text, but look like Python.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from slimelite.base.files import is_text
from slimelite.data.messages import DEPTH, BadCell, sound

# name of a function -> name of a parameter -> its JSON schema
Schemas = Mapping[str, Mapping[str, Any]]
# some templates write these values in Python's form
PYTHON = {"None": None, "True": True, "False": False}
# in a message, a longer piece of a reply is cut to this length [characters]
SHOWN = 80
SPACE = re.compile(r"\s*")
# texts in quotes, and the characters that JSON has outside of them; there it has neither "<" nor a backslash
LIKE_JSON = re.compile(r'(?:[\s\w\[\]{}:,.+-]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A tool call of the model. ``arguments``: the JSON text of an object."""

    id: str
    name: str
    arguments: str


class Piece(NamedTuple):
    """The characters [start, end) of a reply, which contain one or several tool calls. ``inside``: the text between the
    marks of the calls.

    ``missing``: the closing mark, if the reply lacks it.
    """

    start: int
    end: int
    inside: str
    missing: str | None = None


class Unreadable(ValueError):
    """A tool call cannot be read. The message gives the reason."""


def json_call(value: object) -> tuple[str, str]:
    """Returns (name, arguments) of a call in JSON. Raises `Unreadable` if ``value`` is not a call."""
    if not isinstance(value, dict) or not is_text(value.get("name")) or not value["name"]:
        raise Unreadable('it is not an object with a "name" and "arguments"')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json_value(arguments)
    return value["name"], arguments_text(arguments)


def arguments_text(arguments: object) -> str:
    """The JSON text of a call's arguments. Raises `Unreadable` if ``arguments`` is not an object, or if JSON cannot
    represent it."""
    if not isinstance(arguments, dict):
        raise Unreadable("its arguments are not a JSON object")
    try:
        sound(arguments, "arguments")
    except BadCell:  # the next prompt could not show such arguments
        raise Unreadable("its arguments are nested too deep, or contain half of a character") from None
    try:
        return json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:  # Python would write Infinity, which other languages cannot read
        raise Unreadable("its arguments have a number that is too large") from None


def json_value(text: str) -> Any:
    """The JSON value that ``text`` represents. Raises `Unreadable` unless the text is exactly one JSON value."""
    value, end = first_json(text, 0)
    if text[end:].strip():
        raise Unreadable(f"text follows its JSON: {short(text[end:])}")
    return value


def first_json(text: str, start: int) -> tuple[object, int]:
    """Returns the JSON value that begins at ``start``, and the position of its end."""
    start = _end(SPACE, text, start)
    try:
        return json.JSONDecoder(strict=False, parse_constant=_constant).raw_decode(text, start)
    except Unreadable:
        raise
    except json.JSONDecodeError as error:
        raise Unreadable(f"it is not JSON ({error.msg} at character {error.pos - start})") from None
    except (RecursionError, ValueError):  # ValueError: a number of thousands of digits
        raise Unreadable("its JSON is nested too deep, or has a number with too many digits") from None


def _constant(name: str) -> None:
    """Refuse NaN and Infinity. Python reads and writes them as JSON, but other programs do not."""
    raise Unreadable(f"{name} is not JSON")


def _end(pattern: re.Pattern[str], text: str, start: int) -> int:
    """The end of the match of ``pattern`` at ``start``."""
    match = pattern.match(text, start)
    return match.end() if match else start


def short(text: str) -> str:
    """The text in quotes, for a message. The end of a long text is cut."""
    text = text.strip()
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "…")


def after(mark: str, text: str) -> Iterator[Piece]:
    """Yields the parts of ``text`` that begin with ``mark``. Each part ends where the next part begins, or at the end
    of the text."""
    starts = [match.start() for match in re.finditer(re.escape(mark), text)]
    for start, end in pairwise([*starts, len(text)]):
        yield Piece(start, end, text[start + len(mark) : end])


def between(begin: str, close: str, text: str, *, holds_json: bool = False) -> Iterator[Piece]:
    """Yields the parts of ``text`` between the marks ``begin`` and ``close``, such as ``<tool_call>`` and
    ``</tool_call>``. A part without a closing mark ends where the next part begins, or at the end of the text.

    ``holds_json``: the parts are JSON, and marks inside a JSON value belong to this value.
    """
    end = 0
    while (start := text.find(begin, end)) >= 0:
        inside = body = start + len(begin)
        if holds_json:
            with suppress(Unreadable):
                # only this part of the text: to count lines, an error reads all that is before its place
                body += first_json(text[inside : _end(LIKE_JSON, text, inside)], 0)[1]
        until = text.find(begin, body)
        until = len(text) if until < 0 else until
        closed = text.find(close, body, until)
        end = until if closed < 0 else closed + len(close)
        yield Piece(start, end, text[inside : until if closed < 0 else closed], close if closed < 0 else None)


def typed_call(name: str, pairs: list[tuple[str, str]], rest: str, schemas: Schemas) -> tuple[str, str]:
    """A call with values in text form. The schema of a parameter determines how its value is read. ``rest``: the text
    outside all parameters."""
    if not name or "<" in name:
        raise Unreadable("it has no name")
    if rest.strip():
        raise Unreadable(f"it contains something other than parameters: {short(rest)}")
    arguments = {key.strip(): _typed(text, _kinds(schemas.get(name, {}).get(key.strip()))) for key, text in pairs}
    return name, arguments_text(arguments)


def _typed(text: str, kinds: set[str]) -> object:
    """The value of a parameter that is written as ``text``. ``kinds``: the JSON types that its schema allows. Valid
    JSON is read as JSON, unless the schema allows a text.

    If the schema allows a text and also a list, object or null, then lists, objects and null are read as JSON. But 5
    and true stay texts.
    """
    try:
        value = PYTHON[text] if text in PYTHON else json_value(text)
    except Unreadable:
        return text
    if "string" not in kinds:
        return value
    others = {"null": value is None, "array": isinstance(value, list), "object": isinstance(value, dict)}
    return value if any(others[kind] for kind in kinds & others.keys()) else text


def _kinds(schema: object, *, chosen: bool = False) -> set[str]:
    """The types that a JSON schema allows. "any" stands for the types that the schema does not restrict.

    ``chosen``: whether the schema is one choice of another schema. The choices of this schema itself are then ignored.
    """
    if not isinstance(schema, Mapping):
        return {"any"}
    kinds, choices, values = schema.get("type"), schema.get("anyOf") or schema.get("oneOf"), schema.get("enum")
    if isinstance(kinds, str | list):
        return {str(kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)}
    if isinstance(choices, list) and not chosen:
        return {kind for choice in choices for kind in _kinds(choice, chosen=True)}
    if isinstance(values, list):
        return {"string" if isinstance(value, str) else "null" if value is None else "any" for value in values}
    return {"any"}


WORDS: dict[str, object] = {**PYTHON, "null": None, "true": True, "false": False}
# Gemma 4's mark around a text, in place of quotes
QUOTE = '<|"|>'
# names of functions and parameters; unlike names in Python, they may have a dash or a dot
NAME = r"""[^\s(){}\[\],='"]+"""
# the text after the closing quote of a parameter: the next parameter, the next call, or the end. Any other quote is
# part of the value, because LFM2.5's template does not escape quotes inside a value
ENDS = re.compile(rf"\s*(?:,\s*{NAME}\s*=|,?\s*\)\s*(?:,\s*{NAME}\s*\(|,?\s*\]?\s*\Z))")
ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(\n|[\\'\"abfnrtv]))")
ESCAPED = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\n": ""}


class Scanner:
    """Reads a text from its beginning. Every method raises `Unreadable` if the text does not fit."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def comes(self, *marks: str) -> bool:
        """Whether one of ``marks`` comes next, after white space. If a mark comes next, the method reads past this
        mark."""
        match = re.compile(rf"\s*(?:{'|'.join(map(re.escape, marks))})").match(self._text, self._at)
        self._at = match.end() if match else self._at
        return match is not None

    def want(self, mark: str) -> None:
        """Read ``mark``."""
        if not self.comes(mark):
            raise Unreadable(f"{mark} is missing before {self._rest()}")

    def name(self) -> str:
        """Read the name of a function or a parameter."""
        match = re.compile(rf"\s*({NAME})").match(self._text, self._at)
        if match is None:
            raise Unreadable(f"a name is missing before {self._rest()}")
        self._at = match.end()
        return match[1]

    def until(self, mark: str) -> str:
        """Read the text up to ``mark``, and then ``mark`` itself."""
        start, end = self._at, self._text.find(mark, self._at)
        if end < 0:
            raise Unreadable(f"{mark} is missing after {short(self._text[start:])}")
        self._at = end + len(mark)
        return self._text[start:end]

    def end(self) -> None:
        """Check that the whole text was read."""
        if rest := self._text[self._at :].strip():
            raise Unreadable(f"text follows it: {short(rest)}")

    def value(self, depth: int = 0, *, parameter: bool = False) -> Any:
        """Read a value of Gemma 4 or LFM2. ``parameter``: whether this is the whole value of a parameter, not an item
        of a list or an object."""
        if depth > DEPTH:
            raise Unreadable("it is nested too deep")
        if self.comes(QUOTE):
            return self.until(QUOTE)
        if self.comes("'"):
            return self._quoted("'", parameter=parameter)
        if self.comes('"'):
            return self._quoted('"', parameter=parameter)
        for begin, end in (("[", "]"), ("(", ")")):
            if self.comes(begin):
                return self._items(end, depth)
        if self.comes("{"):
            return self._entries(depth)
        match = re.compile(r"\s*([^\s,\]})]+)\s*").match(self._text, self._at)
        if match is None:
            raise Unreadable(f"a value is missing before {self._rest()}")
        self._at = match.end()
        return WORDS[match[1]] if match[1] in WORDS else json_value(match[1])

    def entries(self) -> dict[str, Any]:
        """Read ``{key: value, …}``."""
        self.want("{")
        return self._entries(0)

    def _rest(self) -> str:
        rest = self._text[self._at :].strip()
        return short(rest) if rest else "its end"

    def _items(self, end: str, depth: int) -> list[Any]:
        items: list[Any] = []
        while not self.comes(end):
            if items:
                self.want(",")
                if self.comes(end):  # Python writes a comma after the only item of a tuple
                    break
            items.append(self.value(depth + 1))
        return items

    def _entries(self, depth: int) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        while not self.comes("}"):
            if entries:
                self.want(",")
            if self.comes(QUOTE):
                key = self.until(QUOTE)
                self.want(":")
            elif self.comes("'", '"'):
                key = self._quoted(self._text[self._at - 1], parameter=False)
                self.want(":")
            else:
                key = self.until(":").strip()
            entries[key] = self.value(depth + 1)
        return entries

    def _quoted(self, quote: str, *, parameter: bool) -> str:
        """Read the text after a quote up to the closing quote, and the closing quote."""
        for match in re.compile(rf"\\.|{quote}", re.DOTALL).finditer(self._text, self._at):
            if match[0] == quote and (not parameter or ENDS.match(self._text, match.end())):
                text, self._at = self._text[self._at : match.start()], match.end()
                text = ESCAPE.sub(lambda m: ESCAPED.get(m[4], m[4]) if m[4] else _character(m[1] or m[2] or m[3]), text)
                return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")  # joins surrogates
        raise Unreadable(f"{quote} is missing after {short(self._text[self._at :])}")


def _character(number: str) -> str:
    try:
        return chr(int(number, 16))
    except ValueError:
        raise Unreadable(f"{number} is not the code of a character") from None


def read_gemma4(inside: str, _: Schemas) -> list[tuple[str, str]]:
    """Read ``<|tool_call>call:name{key:<|"|>text<|"|>,other:[1,true]}<tool_call|>`` of Gemma 4."""
    text = Scanner(inside)
    text.want("call:")
    name = text.name()
    arguments = text.entries()
    text.end()
    return [(name, arguments_text(arguments))]


def read_lfm2(inside: str, _: Schemas) -> list[tuple[str, str]]:
    """Read ``<|tool_call_start|>[name(key='text', other=[1, True])]<|tool_call_end|>`` of LFM2. If a system prompt asks
    for JSON, the model writes the list of calls as JSON.
    """
    if re.match(r"\s*\[?\s*\{", inside):
        value = json_value(inside)
        return [json_call(call) for call in (value if isinstance(value, list) else [value])]
    text = Scanner(inside)
    listed = text.comes("[")
    calls: list[tuple[str, str]] = []
    while not calls or text.comes(","):
        name, arguments = text.name(), dict[str, Any]()
        text.want("(")
        while not text.comes(")"):
            if arguments:
                text.want(",")
                if text.comes(")"):
                    break
            key = text.name()
            text.want("=")
            arguments[key] = text.value(parameter=True)
        calls.append((name, arguments_text(arguments)))
    if listed:
        text.want("]")
    text.end()
    return calls


def write_lfm2(calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Write calls, given as (name, arguments), in LFM2's form."""
    written = [
        f"{name}({', '.join(f'{key}={_lfm2(value)}' for key, value in arguments.items())})" for name, arguments in calls
    ]
    return f"<|tool_call_start|>[{', '.join(written)}]<|tool_call_end|>"


def _lfm2(value: object) -> str:
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, str):
        for plain, escaped in (("\\", "\\\\"), ("'", "\\'"), ("\n", "\\n"), ("\r", "\\r")):
            value = value.replace(plain, escaped)
        return f"'{value}'"
    return str(value)
