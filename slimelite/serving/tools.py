"""How families of models write tool calls and thinking, one record each.

A record finds the pieces of a reply that are calls, and reads one. A call that cannot be read becomes a sentence that
says why, which the environment may show the model, and its text stays in the content of the reply.

``--tool-call-parser`` and ``--reasoning-parser`` name a record; without them it is found by a mark in the text of the
chat template. To add one, write its functions and add a record here or in a file that ``--import-file`` names.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from slimelite.data.messages import BadCell, sound
from slimelite.registry import Registry
from slimelite.text import is_text

# name of a function -> name of a parameter -> its JSON schema
Schemas = Mapping[str, Mapping[str, Any]]
# Qwen3.5's template writes these as Python does
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


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes tool calls.

    ``pieces``: text of a reply -> its `Piece` objects, in order. ``read``: (what is inside a piece, schemas of the
    tools) -> each call as (name, arguments); it raises `Unreadable`, and nothing else whatever the text.
    ``marks``: a chat template that contains one of these texts is of this family; the first record that fits is taken.
    ``begins``: texts that a call begins with; what follows one is shown when the reply has ended. ``closes``: the text
    that every call ends with; None: only what follows a call shows where it ends.
    ``sglang``: what SGLang calls its parsers of this format, where that is another name.
    """

    name: str
    pieces: Callable[[str], Iterator[Piece]]
    read: Callable[[str, Schemas], list[tuple[str, str]]]
    marks: tuple[str, ...]
    begins: tuple[str, ...] = ("<tool_call>",)
    closes: str | None = "</tool_call>"
    sglang: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReasoningFormat:
    """The texts between which a family of models writes its thinking; ``sglang``: see `ToolFormat`."""

    name: str
    start: str
    end: str
    sglang: tuple[str, ...] = ()


class Unreadable(ValueError):
    """Why a tool call cannot be read."""


def _call(value: object) -> tuple[str, str]:
    """(name, arguments) of a call in JSON; `Unreadable` if it is none."""
    if not isinstance(value, dict) or not is_text(value.get("name")) or not value["name"]:
        raise Unreadable('it is not an object with a "name" and "arguments"')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _json(arguments)
    return value["name"], _object(arguments)


def _object(arguments: object) -> str:
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


def _json(text: str) -> Any:
    value, end = _first_json(text, 0)
    if text[end:].strip():
        raise Unreadable(f"text follows its JSON: {_short(text[end:])}")
    return value


def _first_json(text: str, start: int) -> tuple[object, int]:
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


def _short(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "…")


def after(mark: str, text: str) -> Iterator[Piece]:
    """Yields the parts of ``text`` that begin with ``mark``; each ends where the next one begins, or with the text."""
    starts = [found.start() for found in re.finditer(re.escape(mark), text)]
    for start, end in pairwise([*starts, len(text)]):
        yield Piece(start, end, text[start + len(mark) : end])


def between(begin: str, close: str, text: str) -> Iterator[Piece]:
    """Yields the parts of ``text`` that stand between the marks ``begin`` and ``close``, such as ``<tool_call>`` and
    ``</tool_call>``. A part that nothing closes ends where the next one begins, or with the text.
    """
    for piece in after(begin, text):
        inside, closed, rest = piece.inside.partition(close)
        yield Piece(piece.start, piece.end - len(rest), inside, None if closed else close)


def read_hermes(inside: str, _: Schemas) -> list[tuple[str, str]]:
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` of Hermes and Qwen."""
    return [_call(_json(inside))]


def read_glm(inside: str, schemas: Schemas) -> list[tuple[str, str]]:
    """``<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>…</tool_call>`` of GLM."""
    pair = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
    name, mark, rest = inside.partition("<arg_key>")
    return [_typed(name.strip(), pair.findall(mark + rest), pair.sub("", mark + rest), schemas)]


def read_qwen3_coder(inside: str, schemas: Schemas) -> list[tuple[str, str]]:
    """``<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>`` of Qwen3-Coder."""
    pair = re.compile(r"<parameter=([^>\n]*)>\n?(.*?)\n?</parameter>", re.DOTALL)
    found = re.fullmatch(r"\s*<function=([^>\n]*)>(.*)</function>\s*", inside, re.DOTALL)
    if found is None:
        raise Unreadable("it is not <function=name> … </function>")
    return [_typed(found[1].strip(), pair.findall(found[2]), pair.sub("", found[2]), schemas)]


def _typed(name: str, pairs: list[tuple[str, str]], rest: str, schemas: Schemas) -> tuple[str, str]:
    """A call whose values are text: a parameter that the schema calls a string is that text, others are JSON if it is.

    ``rest``: what of the call is no parameter.
    """
    if not name or "<" in name:
        raise Unreadable("it has no name")
    if rest.strip():
        raise Unreadable(f"it has something else than parameters: {_short(rest)}")
    arguments: dict[str, object] = {}
    for key, value in pairs:
        arguments[key.strip()] = value
        if schemas.get(name, {}).get(key.strip(), {}).get("type") != "string":
            try:
                arguments[key.strip()] = PYTHON[value] if value in PYTHON else _json(value)
            except Unreadable:
                continue  # it stays text
    return name, _object(arguments)


def llama3_pieces(text: str) -> Iterator[Piece]:
    """What follows the first ``<|python_tag|>``, or the whole reply."""
    head, tag, inside = text.partition("<|python_tag|>")
    if tag:
        yield Piece(len(head), len(text), inside)
    # a reply in JSON is a call only if it has a name: a model may well answer in JSON
    elif re.match(r'\s*\{\s*"(name|type)"\s*:', text):
        yield Piece(len(text) - len(text.lstrip()), len(text), text)


def read_llama3(inside: str, _: Schemas) -> list[tuple[str, str]]:
    """``{"name": …, "parameters": {…}}`` as the whole reply or after ``<|python_tag|>``; ``;`` separates several."""
    found, at = [], 0
    while True:
        value, at = _first_json(inside, at)
        found.append(_call(value))
        left = inside[at:].lstrip(" \n\t;")
        if not left:
            return found
        if not left.startswith("{"):
            raise Unreadable(f"text follows its JSON: {_short(left)}")
        at = len(inside) - len(left)


def read_mistral(inside: str, _: Schemas) -> list[tuple[str, str]]:
    """``[TOOL_CALLS][{…}, …]``, or as newer ones write it ``[TOOL_CALLS]name[ARGS]{…}`` for each call."""
    if inside.lstrip().startswith("["):
        return [_call(value) for value in _json(inside)]
    head, brace, rest = inside.partition("{")
    name = re.split(r"\[(?:ARGS|CALL_ID)\]", head)[0].strip()
    if not name or not brace:
        raise Unreadable("neither a list of calls nor a name with arguments follows")
    return [(name, _object(_json(brace + rest)))]


def deepseek_pieces(text: str) -> Iterator[Piece]:
    """Each call, the marks around all of them included."""
    opening, closing = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    for piece in between("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", text):
        before, rest = text[: piece.start].rstrip(), text[piece.end :].lstrip()
        start = len(before) - len(opening) if before.endswith(opening) else piece.start
        end = len(text) - len(rest) + len(closing) if rest.startswith(closing) else piece.end
        yield piece._replace(start=start, end=end)


def read_deepseek(inside: str, _: Schemas) -> list[tuple[str, str]]:
    """DeepSeek's calls: V3 writes ``function<sep>name`` and a block of JSON, V3.1 ``name<sep>{…}``."""
    sep = "<｜tool▁sep｜>"
    head, found, rest = inside.partition(sep)
    block = re.fullmatch(r"\s*(\S+)\s*```json\n(.*?)\n?```\s*", rest, re.DOTALL)
    name, arguments = (block[1], block[2]) if block else (head.strip(), rest)
    if not found or not name:
        raise Unreadable(f"it is not a name, {sep} and arguments")
    return [(name, _object(_json(arguments)))]


TAGGED = partial(between, "<tool_call>", "</tool_call>")
TOOL_FORMATS = Registry[ToolFormat](
    "tool-call parser",
    "--tool-call-parser",
    [
        ToolFormat("glm", TAGGED, read_glm, ("<arg_key>",), sglang=("glm45", "glm47")),
        ToolFormat("qwen3_coder", TAGGED, read_qwen3_coder, ("<function=",)),
        ToolFormat("hermes", TAGGED, read_hermes, ("<tool_call>",), sglang=("qwen", "qwen25")),
        ToolFormat(
            "mistral",
            partial(after, "[TOOL_CALLS]"),
            read_mistral,
            marks=("[TOOL_CALLS]",),
            begins=("[TOOL_CALLS]",),
            closes=None,
        ),
        ToolFormat(
            "deepseek",
            deepseek_pieces,
            read_deepseek,
            marks=("<｜tool▁call▁begin｜>",),
            begins=("<｜tool▁call",),
            closes="<｜tool▁call▁end｜>",
            sglang=("deepseekv3", "deepseekv31"),
        ),
        ToolFormat(
            "llama3",
            llama3_pieces,
            read_llama3,
            marks=("<|python_tag|>", "ipython", '"parameters": '),
            begins=("<|python_tag|>", "{"),
            closes=None,
        ),
    ],
)
REASONING_FORMATS = Registry[ReasoningFormat](
    "reasoning parser",
    "--reasoning-parser",
    [
        ReasoningFormat(
            "think", "<think>", "</think>", ("qwen3", "qwen3-thinking", "deepseek-r1", "deepseek-v3", "glm45")
        ),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("seed", "<seed:think>", "</seed:think>"),
    ],
)


def tool_format(template: str, name: str | None = None) -> ToolFormat | None:
    """The format called ``name``, or the one that a mark in the chat template names; None: the model calls no tools.

    Raises:
        ValueError: there is no format of this name.
    """
    if name is not None:
        return TOOL_FORMATS[name]
    return next((f for f in TOOL_FORMATS.values() if any(mark in template for mark in f.marks)), None)


def reasoning_format(template: str, name: str | None = None) -> ReasoningFormat | None:
    """The format called ``name``, or the one whose end the chat template contains; None: the model does not think.

    Raises:
        ValueError: there is no format of this name.
    """
    if name is not None:
        return REASONING_FORMATS[name]
    return next((f for f in REASONING_FORMATS.values() if f.end in template), None)


def read_reasoning(text: str, form: ReasoningFormat | None, *, opened: bool) -> tuple[str | None, str]:
    """(the thinking or None, what comes after it); ``opened``: the prompt ends with the start of the thinking.

    Thinking that does not end takes the whole text.
    """
    if form is None:
        return None, text
    begun = text.lstrip().startswith(form.start)
    inside = text.lstrip()[len(form.start) :] if begun else text
    if not (begun or opened or (form.end in text and form.start not in text)):
        return None, text
    thinking, ended, rest = inside.partition(form.end)
    return thinking.strip("\n") or None, rest.lstrip("\n") if ended else ""


def read_tools(
    text: str, form: ToolFormat | None, schemas: Schemas, salt: str
) -> tuple[str, tuple[ToolCall, ...], tuple[str, ...]]:
    """(content, calls, one sentence for each call that cannot be read).

    ``salt`` makes ids differ from those of the same calls elsewhere; they are 9 letters and digits, as Mistral's
    templates want them.
    """
    if form is None:
        return text, (), ()
    content, at = "", 0
    calls: list[ToolCall] = []
    malformed: list[str] = []
    for start, end, inside, missing in form.pieces(text):
        try:
            if missing is not None:
                raise Unreadable(f"it is not closed by {missing}")
            found = form.read(inside, schemas)
        except Unreadable as error:
            malformed.append(f"The tool call {_short(text[start:end])} cannot be read: {error}.")
            continue
        content, at = content + text[at:start], end
        for name, arguments in found:
            key = f"{salt}/{len(calls)}/{name}/{arguments}".encode(errors="replace")
            calls.append(ToolCall(hashlib.blake2b(key).hexdigest()[:9], name, arguments))
    content += text[at:]
    return content.strip() if calls else content, tuple(calls), tuple(malformed)
