"""Common shapes of data rows, which a run recognises without a flag: ShareGPT; Alpaca; prompt and completion; messages.

A run tries to recognise the shape only if ``--input-key`` has its default value, and logs the shape that it used.
`docs/data_formats.md` shows each shape, and the flags with which the same rows can be read.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

# a quoted text; or the end of an object and the start of the next one, without a comma between the two
QUOTED_OR_GAP = re.compile(r"""('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")|\}\s+\{""", re.DOTALL)
# a row of a file: column -> value
Row = dict[str, object]

# the speaker in a ShareGPT message -> the role in OpenAI's form
SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "system": "system",
    "tool": "tool",
    "function_response": "tool",
    "observation": "tool",
}
# columns with the system prompt of a row
SYSTEM = ("system", "system_prompt")
# roles of a message with the system prompt; the second is OpenAI's newer name
SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True)
class Shape:
    """A shape of data rows. ``columns`` are the columns that identify the shape. ``read`` is a function that returns
    the prompt or the conversation in a row."""

    name: str
    columns: tuple[str, ...]
    read: Callable[[Mapping[str, object]], object]
    optional: tuple[str, ...] = ()


def _conversation(question: object, answer: object) -> list[dict[str, object]]:
    turns = [("user", question), ("assistant", answer)]
    return [{"role": role, "content": content} for role, content in turns if content not in (None, "")]


def _alpaca(row: Mapping[str, object]) -> object:
    parts = [row[name] for name in ("instruction", "input") if row.get(name)]
    if not all(isinstance(part, str) for part in parts):
        return parts  # the parts are neither text nor messages, so the row is refused
    history = row.get("history") or []
    if isinstance(history, str):  # a cell of a CSV file
        history = next(parsed(history), history)
    if not isinstance(history, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in history):
        return [{"history": history}]  # the row is refused, too
    turns = [*history, ("\n\n".join(map(str, parts)), row["output"])]
    return [message for question, answer in turns for message in _conversation(question, answer)]


def parsed(text: str) -> Iterator[object]:
    """The value that ``text`` shows in JSON's form, and then the value in Python's form, if it has these forms."""
    for parse in (json.loads, _from_python):
        with suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            yield parse(text)


def _from_python(text: str) -> object:
    """The value that ``text`` shows. If pandas read a list of objects from a parquet file, it writes no commas between
    the objects."""
    return ast.literal_eval(QUOTED_OR_GAP.sub(lambda match: match[1] or "},{", text))


def _completion(row: Mapping[str, object]) -> object:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        return [*prompt, *completion]
    return _conversation(prompt, completion)


ALPACA = Shape("Alpaca: instruction/input/output", ("instruction", "output"), _alpaca, ("input", "history"))
# shapes whose rows contain an answer to train on
ANSWERED = (ALPACA, Shape("prompt and completion: prompt/completion", ("prompt", "completion"), _completion))
SHAPES = (
    Shape("messages: messages", ("messages",), lambda row: row["messages"]),
    Shape("ShareGPT: conversations/from/value", ("conversations",), lambda row: row["conversations"]),
    Shape("prompts: prompt", ("prompt",), lambda row: row["prompt"]),
)


def shape_of(names: Collection[str], input_key: str, *, answers: bool, chosen: str | None = None) -> Shape | None:
    """The shape of rows whose columns are ``names``. Returns None if no known shape fits. Also returns None if
    ``input_key`` is one of these columns, because then no shape is needed. This does not apply to Alpaca's rows if
    ``answers`` is True, because their column ``input`` is only a part of the prompt.

    Args:
        answers: whether the run trains on answers that are in the rows (SFT, KTO).
        chosen: for preference pairs, the column of the preferred replies, which may include the prompt.
    """
    # Alpaca's column "input" is only part of the prompt
    if input_key in names and not (answers and set(ALPACA.columns) <= set(names)):
        return None
    for shape in (*(ANSWERED if answers else ()), *SHAPES):
        if set(shape.columns) <= set(names):
            return shape
    if chosen is not None and chosen in names:
        return Shape(f"pairs: the prompt is in {chosen!r}", (chosen,), lambda row: row[chosen])
    return None


def read_prompts(
    rows: Iterable[tuple[str, Row]],
    shape: Shape | None,
    input_key: str,
    label_key: str | None,
    *,
    template: bool,
    warn: Callable[[str], None],
) -> Iterator[tuple[str, Row]]:
    """The rows, in which the column ``input_key`` contains the prompt or the conversation that ``shape`` reads.

    The text of a column in `SYSTEM` becomes the first message, unless the messages begin with a system prompt. A prompt
    that is text becomes messages for this purpose if the run uses the chat ``template``. ``warn`` gets a message if
    such a column is not used. If ``shape`` is None, these columns are not used.
    """
    unused: dict[str, str] = {}
    for place, row in rows:
        content = row[input_key] if shape is None else shape.read(row)
        for name in SYSTEM:
            system = row.get(name)
            if name in (input_key, label_key) or not system:
                continue
            if shape is None:
                unused[name] = f"write it as the first message of {input_key!r}"
            elif not isinstance(system, str):
                unused[name] = "its value is not text; write it as the first message of the prompt"
            elif isinstance(content, str) and not template:
                unused[name] = "a text has no place for it; add --apply-chat-template"
            elif (first := _system(content)) is None:
                content = _with_system(content, system)
            elif first != system:
                unused[name] = "some messages already begin with another system prompt; remove one of the two"
        yield place, {**row, input_key: content}
    for name, remedy in unused.items():
        warn(f"the column {name!r} is not used: {remedy} (docs/data_formats.md)")


def _system(content: object) -> object:
    """The system prompt at the start of a conversation, or None."""
    first = content[0] if isinstance(content, list) and content and isinstance(content[0], dict) else {}
    begins = first.get("role", first.get("from")) in SYSTEM_ROLES
    return (first.get("content", first.get("value")) or "") if begins else None


def _with_system(content: object, system: str) -> object:
    messages = _conversation(content, None) if isinstance(content, str) else content
    return [{"role": "system", "content": system}, *messages] if isinstance(messages, list) and messages else content


def share_gpt(message: Mapping[str, object]) -> dict[str, object] | None:
    """Convert a message in ShareGPT's form, ``{"from": "human", "value": ...}``, to OpenAI's form with ``role`` and
    ``content``. Returns None if ``message`` has another form."""
    speaker = message.get("from")
    if "role" in message or not isinstance(speaker, str) or speaker not in SPEAKERS:
        return None
    others = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {**others, "role": SPEAKERS[speaker], "content": message.get("value")}
