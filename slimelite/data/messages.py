"""Converts messages in data files to OpenAI's form, which chat templates expect.

Data files differ in their form. The arguments of a tool call are JSON text (as in OpenAI's API) or an object. A missing
value may be absent or null. The name and the arguments of a tool call may be inside a ``function`` field. Chat
templates differ too. Most templates write ``arguments | tojson``. This would quote JSON text a second time. DeepSeek's
templates need JSON text, because they concatenate it with other text. Some templates print null as the word None.
For Hermes' template, each message with a tool's answer must contain the tool's name.

Chat templates are programs that come with a model, and may be malicious. So each template is first tried in a separate
process with limits on time and memory. Later, each rendering of a conversation has such limits, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from slimelite.data.render_watch import Stop, watch
from slimelite.data.shapes import share_gpt

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

# limits for rendering a few short conversations: CPU time [s], memory in addition to this process's [bytes], time [s]
CPU_S, MEMORY, DEADLINE_S = 2, 1 << 29, 60.0
# exit status of the trial
WELL, NO_MEMORY = 0, 3
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "1"}}}
TOOL = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": TOOL}}]
ASKED = [{"role": "user", "content": "a"}]
ANSWERED = [{"role": "system", "content": "s"}, *ASKED, {"role": "assistant", "content": "b"}, *ASKED]
CALLED: list[dict[str, Any]] = [
    *ASKED,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "look", "content": "c"},
]


def try_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Render a few short conversations with the chat template, if there is one. A copy of this process does this, with
    limits on time and memory.

    This test takes about ten milliseconds. Errors that the template raises during this test are ignored.

    Raises:
        ValueError: the template needs too much time or memory.
    """
    if not tokenizer.chat_template:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a copy of a process with threads may hang; `_ended` kills it
        child = os.fork()
    if not child:
        status = NO_MEMORY
        try:
            status = _trial(tokenizer)
        finally:
            os._exit(status)  # skips the parent's exit handlers
    ended = _ended(child)
    if ended == WELL:
        return
    slow = ended in (-signal.SIGXCPU, -signal.SIGKILL)
    raise ValueError(
        f"the chat template takes more than {f'{CPU_S} s' if slow else f'{MEMORY >> 20} MB'} to render a few words: "
        "it is broken or hostile; use the model's original template (chat_template.jinja or tokenizer_config.json)"
    )


def _trial(tokenizer: PreTrainedTokenizerBase) -> int:
    """The exit status of the copied process."""
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):
            os.dup2(quiet, descriptor)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGXCPU):
            signal.signal(number, signal.SIG_DFL)
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        for limit, most in ((resource.RLIMIT_CPU, CPU_S), (resource.RLIMIT_AS, size + MEMORY)):
            hard = resource.getrlimit(limit)[1]
            resource.setrlimit(limit, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    except (OSError, ValueError):
        return WELL  # this system has no such limits
    for messages, tools in ((ASKED, None), (ANSWERED, None), (CALLED, TOOLS)):
        try:
            tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        except MemoryError:
            return NO_MEMORY
        except BaseException:
            continue
    return WELL


def _ended(child: int) -> int:
    """The exit status of a child process, negative for a signal. The child is killed at the deadline. The result is
    then `WELL`, because a template cannot wait: a lock of another thread was copied with the process."""
    until, running = time.monotonic() + DEADLINE_S, True
    try:
        while running and time.monotonic() < until:
            time.sleep(0.002)
            running = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None
    finally:
        os.kill(child, signal.SIGKILL)  # does nothing if the child has ended
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return WELL if running else status


class TooCostly(ValueError):
    """A chat template took too much time or memory to render some messages. The template may take as much for other
    messages, so the caller should not render more of them."""


@contextlib.contextmanager
def bounded(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """A context manager for code that renders messages with the chat template of ``tokenizer``, in any thread. It costs
    a few microseconds.

    Raises:
        TooCostly: the code in the ``with`` block exceeds a limit of `slimelite.data.render_watch`, or one operation
            makes a value that is too large.
    """
    from slimelite.data.chat_sandbox import install

    install()
    try:
        watch.begin()
        try:
            yield
        finally:
            watch.end()
    except Stop as stop:
        watch.end()
        raise TooCostly(
            f"the chat template of {tokenizer.name_or_path or 'the tokenizer'} {stop} to render these messages: it is "
            "broken or hostile; use the model's original template (chat_template.jinja or tokenizer_config.json)"
        ) from None


Rendered = TypeVar("Rendered")
Kind = TypeVar("Kind", list[Any], dict[str, Any])
Message = dict[str, Any]
Messages = list[Message]
# descriptions of functions, in OpenAI's form
Tools = list[dict[str, object]] | None
# an example of a tool, for error messages
A_TOOL = '{"type": "function", "function": {"name": ...}}'
# the deepest nesting of a value; a deeper value may exceed the recursion limit when it is copied or written
DEPTH = 100


class BadCell(ValueError):
    """The value in one column of a data row is malformed."""

    def __init__(self, column: str, problem: str) -> None:
        super().__init__(f"column {column!r}: {problem}")
        self.problem = problem


def read_messages(content: object, column: str = "messages") -> Messages:
    """Convert ``content``, a list of messages from a data file, to OpenAI's form. Fields that are null are removed, a
    missing content becomes an empty text, the arguments of tool calls become objects, and each message with a tool's
    answer gets the tool's name.

    Messages that already have this form stay the same. The field ``tool_calls`` of a message may be JSON text, as in
    parquet files.

    Raises:
        BadCell: ``content`` is not a list of messages, a tool call has no name, or the arguments of a tool call are not
            an object.
    """
    if not isinstance(content, list) or not content:
        raise BadCell(column, f"text or a list of messages is expected, not {content!r:.60}")
    messages: Messages = []
    called: dict[str | int, str] = {}  # id of a call -> name of the tool
    unanswered: list[str] = []
    for number, raw in enumerate(content):
        raw = (share_gpt(raw) or raw) if isinstance(raw, dict) else raw
        if not isinstance(raw, dict) or not isinstance(raw.get("role"), str):
            raise BadCell(column, f"message {number} needs a role and a content, got {raw!r:.60}")
        message = {key: value for key, value in raw.items() if value is not None}
        calls = message.pop("tool_calls", None)
        if not calls and not message.keys() & {"content", "reasoning_content"}:
            raise BadCell(column, f"message {number} ({message['role']}) is empty: content is missing")
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
    """Return ``value``. Raises `BadCell` if UTF-8 cannot encode a text in ``value``, or if ``value`` is nested too
    deep."""
    if depth > DEPTH:
        raise BadCell(column, f"the value is nested more than {DEPTH} levels deep")
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            half = value[error.start : error.start + 1]
            raise BadCell(column, f"an incomplete character ({half!r}, a lone surrogate) at {error.start}") from error
    elif isinstance(value, dict):
        for key, item in value.items():
            sound(key, column)
            sound(item, column, depth + 1)
    elif isinstance(value, list):
        for item in value:
            sound(item, column, depth + 1)
    return value


def _call(raw: object, where: str, column: str) -> dict[str, object]:
    """A tool call in OpenAI's form, except that its arguments are an object."""
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
    """Convert ``value`` to the type ``kind``, a list or a dict. If ``value`` is text, it is parsed as JSON. Null and
    empty text give an empty list or dict.

    ``where``: the start of an error message. It names a part of the cell, and ends with a verb. Example: "message 2:
    tool_calls are ".

    Raises:
        BadCell: ``value`` is neither of the type ``kind`` nor JSON text of this type.
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
    """Render ``messages`` with the chat template, and return the text. ``settings`` are variables for the template.
    This function does not catch errors that the template raises. If the template takes too much time or
    memory, `TooCostly` is raised.
    """
    apply = tokenizer.apply_chat_template
    with bounded(tokenizer):
        return with_arguments(lambda m: str(apply(m, tools=tools, tokenize=False, **settings)), messages)


def with_arguments(render: Callable[[Messages], Rendered], messages: Messages) -> Rendered:
    """Return ``render(messages)``. Some templates raise a TypeError, because they do not accept objects as arguments of
    tool calls. Then ``render`` is called again with the arguments as JSON text."""
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
