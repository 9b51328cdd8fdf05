"""Messages as data files have them, and as chat templates want them: OpenAI's form, with what differs levelled.

Files write an argument list as JSON text (OpenAI) or as an object, an absent value as null, and a call with or without
``function`` around it. Templates differ as well: most write ``arguments | tojson``, which would quote a text once more;
DeepSeek's join texts; some print a null as the word None; Hermes' wants the name of the tool beside its answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from slimelite.data.templates import bounded

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

Rendered = TypeVar("Rendered")
Kind = TypeVar("Kind", list[Any], dict[str, Any])
Message = dict[str, Any]
Messages = list[Message]
# descriptions of functions, in OpenAI's form
Tools = list[dict[str, object]] | None
# what a tool looks like
A_TOOL = '{"type": "function", "function": {"name": ...}}'
# deepest nesting of a value: deeper ones may exceed the recursion limit when they are copied or written
DEPTH = 100


class BadCell(ValueError):
    """A problem in one column of a row."""

    def __init__(self, column: str, problem: str) -> None:
        super().__init__(f"column {column!r}: {problem}")
        self.problem = problem


def read_messages(content: object, column: str = "messages") -> Messages:
    """``content`` as messages: no nulls, content a text, arguments objects, answers of tools with the tool's name.

    A message without any of this comes back equal. Tool calls may be JSON text as a whole, as parquet files have them.

    Raises:
        BadCell: it is not a list of messages, or a call has no name or its arguments are not an object.
    """
    if not isinstance(content, list) or not content:
        raise BadCell(column, f"text or a list of messages is expected, not {content!r:.60}")
    messages: Messages = []
    called: dict[str | int, str] = {}  # id of a call -> name of the tool
    unanswered: list[str] = []
    for number, raw in enumerate(content):
        if not isinstance(raw, dict) or not isinstance(raw.get("role"), str):
            raise BadCell(column, f"message {number} needs a role and a content, got {raw!r:.60}")
        message = {key: value for key, value in raw.items() if value is not None}
        calls = message.pop("tool_calls", None)
        if not calls and not message.keys() & {"content", "reasoning_content"}:
            raise BadCell(column, f"message {number} ({message['role']}) says nothing: content is missing")
        message.setdefault("content", "")
        if calls:
            where = f"message {number}: tool_calls"
            message["tool_calls"] = [
                _call(call, f"{where}[{i}]", column)
                for i, call in enumerate(parsed(calls, list, column, f"{where} are "))
            ]
            unanswered = [call["function"]["name"] for call in message["tool_calls"]]
            called |= {call["id"]: call["function"]["name"] for call in message["tool_calls"] if "id" in call}
        elif message["role"] == "tool":
            call_id = message.get("tool_call_id", "")
            if not isinstance(call_id, str | int):
                raise BadCell(column, f"message {number}: tool_call_id must be text, not {call_id!r:.60}")
            name = unanswered.pop(0) if unanswered else None
            name = called.get(call_id, name)
            if name is not None:
                message.setdefault("name", name)
        messages.append(message)
    return messages


def sound(value: object, column: str, depth: int = 0) -> object:
    """``value`` if all its text can be encoded as UTF-8 and it is not nested too deep; `BadCell` otherwise."""
    if depth > DEPTH:
        raise BadCell(column, f"is nested more than {DEPTH} deep")
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            half = value[error.start : error.start + 1]
            raise BadCell(column, f"half a character ({half!r}, a lone surrogate) at {error.start}") from error
    elif isinstance(value, dict):
        for key, item in value.items():
            sound(key, column)
            sound(item, column, depth + 1)
    elif isinstance(value, list):
        for item in value:
            sound(item, column, depth + 1)
    return value


def _call(raw: object, where: str, column: str) -> dict[str, object]:
    """A tool call in OpenAI's form, but for its arguments, which are an object."""
    call = {key: value for key, value in raw.items() if value is not None} if isinstance(raw, dict) else {}
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadCell(column, f"{where} needs a function with a name and arguments, got {raw!r:.80}")
    if not isinstance(call.get("id", ""), str | int):
        raise BadCell(column, f"{where} ({function['name']}): its id must be text, not {call['id']!r:.60}")
    raw_arguments = function.get("arguments") or {}  # some programs, such as PHP's, write an empty object as []
    arguments = parsed(raw_arguments, dict, column, f"{where} ({function['name']}): arguments are ")
    rest = {key: value for key, value in call.items() if key in ("id", "index")}
    return {**rest, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def parsed(value: object, kind: type[Kind], column: str, where: str = "") -> Kind:
    """``value``, parsed if it is text, as a ``kind``, list or dict; null and empty text are an empty one.

    ``where``: the part of the cell that it is, with a verb, for the message.

    Raises:
        BadCell: it is neither a ``kind`` nor its JSON text.
    """
    what = "an object" if kind is dict else "a list"
    try:
        decoded = json.loads(value) if isinstance(value, str) and value else value
    except (ValueError, RecursionError) as error:
        raise BadCell(column, f"{where}not JSON ({error}): {value!r:.60}; write {what} or its JSON text") from error
    if decoded is None or value == "":
        return kind()
    if not isinstance(decoded, kind):
        raise BadCell(column, f"{where}not {what}: {value!r:.60}; write {what} or its JSON text")
    sound(decoded, column)
    return decoded


def render(tokenizer: PreTrainedTokenizerBase, messages: Messages, tools: Tools, settings: Mapping[str, object]) -> str:
    """The text of messages by the chat template, whose variables are ``settings``; whatever the template raises goes on
    to the caller, and a template is a program. One that takes too long raises `slimelite.data.templates.TooSlow`.
    """
    apply = tokenizer.apply_chat_template
    with bounded(tokenizer):
        return with_arguments(lambda m: str(apply(m, tools=tools, tokenize=False, **settings)), messages)


def with_arguments(render: Callable[[Messages], Rendered], messages: Messages) -> Rendered:
    """``render(messages)``; if the template refuses objects as arguments, they are JSON text in a second try."""
    try:
        return render(messages)
    except TypeError:
        as_text = [_with_text(message) for message in messages]
        if as_text == messages:
            raise
        return render(as_text)


def _with_text(message: Message) -> Message:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(arguments, ensure_ascii=False)}}
        if isinstance(arguments := call.get("function", {}).get("arguments"), dict)
        else call
        for call in message.get("tool_calls") or []
    ]
    return {**message, "tool_calls": calls} if calls else message
