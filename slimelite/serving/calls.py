"""What readers of tool calls share, whatever the family of the model: the values that they make of a text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from slimelite.base.files import is_text
from slimelite.data.messages import BadCell, sound

# name of a function -> name of a parameter -> its JSON schema
Schemas = Mapping[str, Mapping[str, Any]]
# some templates write these as Python does
PYTHON = {"None": None, "True": True, "False": False}
# a longer piece of a reply is cut in a message about it [characters]
SHOWN = 80


@dataclass(frozen=True)
class ToolCall:
    """A call that the model asks for; ``arguments``: the JSON text of an object."""

    id: str
    name: str
    arguments: str


class Piece(NamedTuple):
    """Characters [start, end) of a reply that are a tool call, or a list of some, and the text ``inside`` their marks.

    ``missing``: the mark that should close them, and does not.
    """

    start: int
    end: int
    inside: str
    missing: str | None = None


class Unreadable(ValueError):
    """Why a tool call cannot be read."""


def json_call(value: object) -> tuple[str, str]:
    """(name, arguments) of a call in JSON; `Unreadable` if it is none."""
    if not isinstance(value, dict) or not is_text(value.get("name")) or not value["name"]:
        raise Unreadable('it is not an object with a "name" and "arguments"')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json_value(arguments)
    return value["name"], arguments_text(arguments)


def arguments_text(arguments: object) -> str:
    """The JSON text of a call's arguments; `Unreadable` if they are not an object that JSON can write."""
    if not isinstance(arguments, dict):
        raise Unreadable("its arguments are not a JSON object")
    try:
        sound(arguments, "arguments")
    except BadCell:  # the next prompt could not show them
        raise Unreadable("its arguments are nested too deep, or have half of a character") from None
    try:
        return json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:  # Python would write Infinity, which other languages cannot read
        raise Unreadable("its arguments have a number that is too large") from None


def json_value(text: str) -> Any:
    """The value of a text that is JSON and nothing else; `Unreadable` if it is not."""
    value, end = first_json(text, 0)
    if text[end:].strip():
        raise Unreadable(f"text follows its JSON: {short(text[end:])}")
    return value


def first_json(text: str, start: int) -> tuple[object, int]:
    """The JSON value that begins at ``start``, and where it ends."""
    start += len(text[start:]) - len(text[start:].lstrip())
    try:
        return json.JSONDecoder(strict=False, parse_constant=_constant).raw_decode(text, start)
    except Unreadable:
        raise
    except json.JSONDecodeError as error:
        raise Unreadable(f"it is not JSON ({error.msg} at character {error.pos - start})") from None
    except (RecursionError, ValueError):  # ValueError: a number of thousands of digits
        raise Unreadable("its JSON is nested too deep or has too long a number") from None


def _constant(name: str) -> None:
    """Refuse NaN and Infinity, which Python reads and writes as JSON and others do not."""
    raise Unreadable(f"{name} is not JSON")


def short(text: str) -> str:
    """A text in a message, without its end if it is long."""
    text = text.strip()
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "…")


def after(mark: str, text: str) -> Iterator[Piece]:
    """Yields the parts of ``text`` that begin with ``mark``; each ends where the next one begins, or with the text."""
    starts = [match.start() for match in re.finditer(re.escape(mark), text)]
    for start, end in pairwise([*starts, len(text)]):
        yield Piece(start, end, text[start + len(mark) : end])


def between(begin: str, close: str, text: str) -> Iterator[Piece]:
    """Yields the parts of ``text`` that stand between the marks ``begin`` and ``close``, such as ``<tool_call>`` and
    ``</tool_call>``. A part that nothing closes ends where the next one begins, or with the text.
    """
    for piece in after(begin, text):
        inside, closed, rest = piece.inside.partition(close)
        yield Piece(piece.start, piece.end - len(rest), inside, None if closed else close)


def typed_call(name: str, pairs: list[tuple[str, str]], rest: str, schemas: Schemas) -> tuple[str, str]:
    """A call whose values are text, each read by the schema of its parameter; ``rest``: what of it is no parameter."""
    if not name or "<" in name:
        raise Unreadable("it has no name")
    if rest.strip():
        raise Unreadable(f"it has something else than parameters: {short(rest)}")
    arguments = {key.strip(): _typed(text, _kinds(schemas.get(name, {}).get(key.strip()))) for key, text in pairs}
    return name, arguments_text(arguments)


def _typed(text: str, kinds: set[str]) -> object:
    """``text`` as the value of a parameter of these ``kinds``: JSON if it is, but a text where the schema allows one.

    There a list, an object or a null is one if the schema allows that too; 5 and true are texts.
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
    """The types that a JSON schema allows, as far as it says so; "any" stands for what it does not say.

    ``chosen``: it is one of the choices of another, and its own are not looked at.
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
