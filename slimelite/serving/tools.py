"""How model families write tool calls and thinking, one record for each family.

A record finds the parts of a reply that are calls, and reads each of them. If a call cannot be read, a sentence gives
the reason, and the environment may show this sentence to the model. The text of the call stays in the content of the
reply.

``--tool-call-parser`` and ``--reasoning-parser`` name a record. Without these flags, a mark in the text of the chat
template selects the record. To support another family, a developer adds a record and its functions to this file or to a
file of ``--import-file``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from slimelite.base.registry import Registry
from slimelite.serving.calls import (
    Piece,
    Schemas,
    ToolCall,
    Unreadable,
    after,
    arguments_text,
    between,
    first_json,
    json_call,
    json_value,
    read_gemma4,
    read_lfm2,
    short,
    typed_call,
    write_lfm2,
)

# A reply of GPT-OSS (harmony) or Muse Glimmer consists of several messages. The head of each message names its
# recipient. The prompt ends with the first <|start|>assistant. This reply of GPT-OSS thinks and calls f:
#   <|channel|>analysis<|message|>…<|end|>
#   <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>
# This reply of Muse Glimmer thinks and answers:
#   " to=self<|message|>…<|eom|><|start|>assistant to=user<|message|>…"
START, BODY = "<|start|>assistant", "<|message|>"
HEAD = re.compile(
    r"(?:(?:\A|<\|start\|>assistant)(?:\s*to=[^\s<]+)?\s*|(?=<\|channel\|>))"
    r"(?:<\|channel\|>[^<]*)?(?:<\|constrain\|>[^<]*)?<\|message\|>"
)
END = re.compile(r"<\|(?:end|call|return|eom|eot)\|>")
# the end of an unfinished text: the beginning of a mark, or the beginning of the first head
HALF = re.compile(r"<(?:\|(?:\w*\|?)?)?\Z|\A\s*(?:t|to|to=[^<]*)?\Z")
# the head of a call without a body
UNFINISHED = re.compile(r"(?:\A\s*|<\|(?:start|channel)\|>[^<]*)to=(?!self|user)")
RECIPIENT = re.compile(r"to=([^\s<]+)")
ANALYSIS = re.compile(r"<\|channel\|>\s*analysis")


class Part(NamedTuple):
    """Characters [start, end) of a reply. A part is either a message with its end mark, or the text between two
    messages. The text between two messages has no head."""

    start: int
    end: int
    head: str
    body: str

    @property
    def recipient(self) -> str | None:
        """The recipient, if the head names a tool."""
        match = RECIPIENT.search(self.head)
        return match[1] if match and match[1] not in ("self", "user") else None

    @property
    def thinks(self) -> bool:
        """Whether the part is thinking."""
        match = RECIPIENT.search(self.head)
        return match[1] == "self" if match else bool(ANALYSIS.search(self.head))


def parts(text: str) -> Iterator[Part]:
    """Yields the parts of a reply in order. Together, the parts are the whole reply."""
    at, head = 0, HEAD.search(text)
    while head is not None:
        if at < head.start():
            yield Part(at, head.start(), "", text[at : head.start()])
        after = HEAD.search(text, head.end())
        end = at = len(text) if after is None else after.start()
        if close := END.search(text, head.end(), end):
            end, at = close.span()
        yield Part(head.start(), at, head[0], text[head.end() : end])
        head = after
    if at < len(text):
        yield Part(at, len(text), "", text[at:])


def read_channels(text: str) -> tuple[str | None, str]:
    """Returns the thinking (or None) and the rest of the reply: the messages to the user without their heads, and the
    tool calls with their heads."""
    thinking, rest = [], ""
    for part in parts(text):
        if part.recipient is not None:
            rest += START + text[part.start : part.end].removeprefix(START)
        elif part.head and part.thinks:
            thinking.append(part.body)
        else:
            rest += part.body
    return "\n".join(thinking).strip("\n") or None, rest


def certain_channels(text: str) -> tuple[str, str]:
    """Like `read_channels`, for a reply that has not ended yet. Text that later tokens may change is left out."""
    half = HALF.search(text)
    text = text[: half.start()] if half else text
    body = text.rfind(BODY)
    begun = [place for mark in ("<|start|>", "<|channel|>") if (place := text.find(mark, max(body, 0))) >= 0]
    thinking, rest = read_channels(text[: min(begun, default=len(text))])
    return thinking or "", rest


def channel_pieces(text: str) -> Iterator[Piece]:
    """Yields the messages that call tools. The last message may lack its end mark, because this mark may be the end
    token of the reply."""
    for part in parts(text):
        if part.recipient is not None:
            yield Piece(part.start, part.end, part.head + part.body)
        elif not part.head and (cut := UNFINISHED.search(part.body)):
            yield Piece(part.start + cut.start(), part.end, part.body[cut.start() :], BODY)


def read_harmony(inside: str, _: Schemas) -> list[tuple[str, str]]:
    """Read ``<|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}`` of GPT-OSS."""
    recipient, body = RECIPIENT.search(inside), inside.partition(BODY)[2]
    assert recipient is not None
    return [(recipient[1].removeprefix("functions."), arguments_text(json_value(body)))]


def read_muse(inside: str, schemas: Schemas) -> list[tuple[str, str]]:
    """Read ``to=name<|message|><atem:function_calls><atem:invoke name="name"><atem:parameter name="key">value…`` of
    Muse."""
    body = inside.partition(BODY)[2]
    block = re.fullmatch(r"\s*<atem:function_calls>(.*)</atem:function_calls>\s*", body, re.DOTALL)
    invoke = re.compile(r'<atem:invoke name="([^"\n]*)">(.*?)</atem:invoke>', re.DOTALL)
    pair = re.compile(r'<atem:parameter name="([^"\n]*)">(.*?)</atem:parameter>', re.DOTALL)
    if block is None or invoke.sub("", block[1]).strip() or not invoke.search(block[1]):
        raise Unreadable("it is not <atem:function_calls> with an <atem:invoke name=…>")
    return [
        typed_call(name, pair.findall(text), pair.sub("", text), schemas) for name, text in invoke.findall(block[1])
    ]


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes tool calls.

    ``pieces``: a function that yields the `Piece` objects of a reply, in order. ``read``: a function that gets the text
    inside a piece and the schemas of the tools, and returns each call as (name, arguments). The only error that
    ``read`` raises is `Unreadable`. ``marks``: a chat template with one of these texts belongs to this family. If
    several records fit a template, the first of these records is used. ``begins``: the texts with which a call may
    begin. Text after one of ``begins`` is not shown before the reply has ended. ``closes``: the text with which every
    call ends; None: only the text after a call shows where the call ends. ``write``: a function that converts calls to
    text, for chat templates that show no calls. ``sglang``: SGLang's names for this format, if they differ from
    ``name``.
    """

    name: str
    pieces: Callable[[str], Iterator[Piece]]
    read: Callable[[str, Schemas], list[tuple[str, str]]]
    marks: tuple[str, ...]
    begins: tuple[str, ...] = ("<tool_call>",)
    closes: str | None = "</tool_call>"
    write: Callable[[Sequence[tuple[str, dict[str, Any]]]], str] | None = None
    sglang: tuple[str, ...] = ()

    @property
    def signs(self) -> tuple[str, ...]:
        """Marks that occur only in replies with a call."""
        return tuple(mark for mark in (*self.begins, self.closes or "") if mark[:1] in ("<", "["))


@dataclass(frozen=True)
class ReasoningFormat:
    """The texts ``start`` and ``end`` around the thinking of a family of models.

    ``mark``: a text that occurs in the family's chat templates. If ``mark`` is None, ``end`` is this text.
    ``channels``: whether a reply consists of several messages, see `read_channels`. ``sglang``: see `ToolFormat`.
    """

    name: str
    start: str
    end: str
    sglang: tuple[str, ...] = ()
    mark: str | None = None
    channels: bool = False


def read_hermes(inside: str, _: Schemas) -> list[tuple[str, str]]:
    """Read ``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` of Hermes and Qwen."""
    return [json_call(json_value(inside))]


def read_glm(inside: str, schemas: Schemas) -> list[tuple[str, str]]:
    """Read ``<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>…</tool_call>`` of GLM."""
    pair = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
    name, mark, rest = inside.partition("<arg_key>")
    return [typed_call(name.strip(), pair.findall(mark + rest), pair.sub("", mark + rest), schemas)]


def read_qwen3_coder(inside: str, schemas: Schemas) -> list[tuple[str, str]]:
    """Read ``<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>`` of Qwen3-Coder."""
    pair = re.compile(r"<parameter=([^>\n]*)>\n?(.*?)\n?</parameter>", re.DOTALL)
    match = re.fullmatch(r"\s*<function=([^>\n]*)>(.*)</function>\s*", inside, re.DOTALL)
    if match is None:
        raise Unreadable("it is not <function=name> … </function>")
    return [typed_call(match[1].strip(), pair.findall(match[2]), pair.sub("", match[2]), schemas)]


def llama3_pieces(text: str) -> Iterator[Piece]:
    """The text after the first ``<|python_tag|>``; without one, the whole reply."""
    head, tag, inside = text.partition("<|python_tag|>")
    if tag:
        yield Piece(len(head), len(text), inside)
    # a reply in JSON is a call only if it has a name, because an answer may also be JSON
    elif re.match(r'\s*\{\s*"(name|type)"\s*:', text):
        yield Piece(len(text) - len(text.lstrip()), len(text), text)


def read_llama3(inside: str, _: Schemas) -> list[tuple[str, str]]:
    """Read ``{"name": …, "parameters": {…}}``, which is the whole reply or follows ``<|python_tag|>``. ``;`` separates
    several calls."""
    calls, at = [], 0
    while True:
        value, at = first_json(inside, at)
        calls.append(json_call(value))
        left = inside[at:].lstrip(" \n\t;")
        if not left:
            return calls
        if not left.startswith("{"):
            raise Unreadable(f"text follows its JSON: {short(left)}")
        at = len(inside) - len(left)


def read_mistral(inside: str, _: Schemas) -> list[tuple[str, str]]:
    """Read ``[TOOL_CALLS][{…}, …]`` of Mistral. Newer models write ``[TOOL_CALLS]name[ARGS]{…}`` for each call."""
    if inside.lstrip().startswith("["):
        return [json_call(value) for value in json_value(inside)]
    head, brace, rest = inside.partition("{")
    name = re.split(r"\[(?:ARGS|CALL_ID)\]", head)[0].strip()
    if not name or not brace:
        raise Unreadable("neither a list of calls nor a name with arguments follows")
    return [(name, arguments_text(json_value(brace + rest)))]


def deepseek_pieces(text: str) -> Iterator[Piece]:
    """Yields each call. The first call includes the opening mark of the group of calls, and the last call includes the
    closing mark."""
    opening, closing = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    for piece in between("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", text):
        before, rest = text[: piece.start].rstrip(), text[piece.end :].lstrip()
        start = len(before) - len(opening) if before.endswith(opening) else piece.start
        end = len(text) - len(rest) + len(closing) if rest.startswith(closing) else piece.end
        yield piece._replace(start=start, end=end)


def read_deepseek(inside: str, _: Schemas) -> list[tuple[str, str]]:
    """Read DeepSeek's calls. V3 writes ``function<sep>name`` and a block of JSON. V3.1 writes ``name<sep>{…}``."""
    sep = "<｜tool▁sep｜>"
    head, mark, rest = inside.partition(sep)
    block = re.fullmatch(r"\s*(\S+)\s*```json\n(.*?)\n?```\s*", rest, re.DOTALL)
    name, arguments = (block[1], block[2]) if block else (head.strip(), rest)
    if not mark or not name:
        raise Unreadable(f"it is not a name, {sep} and arguments")
    return [(name, arguments_text(json_value(arguments)))]


TAGGED = partial(between, "<tool_call>", "</tool_call>")
TOOL_FORMATS = Registry[ToolFormat](
    "tool-call parser",
    "--tool-call-parser",
    [
        ToolFormat(
            "gemma4",
            partial(between, "<|tool_call>", "<tool_call|>"),
            read_gemma4,
            marks=("<|tool_call>call:",),
            begins=("<|tool_call>",),
            closes="<tool_call|>",
        ),
        ToolFormat(
            "harmony",
            channel_pieces,
            read_harmony,
            marks=("<|channel|>commentary",),
            begins=("<|start|>", "<|channel|>"),
            closes="<|call|>",
            sglang=("gpt-oss",),
        ),
        ToolFormat(
            "muse",
            channel_pieces,
            read_muse,
            marks=("<atem:function_calls>",),
            begins=("<|start|>", "<atem:function_calls>"),
            closes="</atem:function_calls>",
        ),
        ToolFormat(
            "lfm2",
            partial(between, "<|tool_call_start|>", "<|tool_call_end|>"),
            read_lfm2,
            marks=("<|tool_call_start|>", "<|tool_list_start|>"),
            begins=("<|tool_call_start|>",),
            closes=None,  # one mark closes several calls
            write=write_lfm2,
        ),
        ToolFormat("glm", TAGGED, read_glm, ("<arg_key>",), sglang=("glm45", "glm47")),
        ToolFormat("qwen3_coder", TAGGED, read_qwen3_coder, ("<function=",), ("<tool_call>", "<function=")),
        ToolFormat(
            "hermes", partial(TAGGED, holds_json=True), read_hermes, ("<tool_call>",), sglang=("qwen", "qwen25")
        ),
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
        ReasoningFormat("gemma4", "<|channel>thought", "<channel|>"),
        ReasoningFormat(
            "harmony", "<|channel|>analysis<|message|>", "<|end|>", ("gpt-oss",), "<|channel|>analysis", channels=True
        ),
        ReasoningFormat("muse", " to=self<|message|>", "<|eom|>", mark="assistant to=self", channels=True),
        ReasoningFormat("seed", "<seed:think>", "</seed:think>"),
    ],
)


def tool_format(template: str, name: str | None = None) -> ToolFormat | None:
    """The format with this ``name``. Without a name: the format whose mark occurs in the chat template. None: the model
    calls no tools.

    Raises:
        ValueError: there is no format of this name.
    """
    if name is not None:
        return TOOL_FORMATS[name]
    return next((f for f in TOOL_FORMATS.values() if any(mark in template for mark in f.marks)), None)


def reasoning_format(template: str, name: str | None = None) -> ReasoningFormat | None:
    """The format with this ``name``. Without a name: the format whose mark occurs in the chat template. None: the model
    does not think.

    Raises:
        ValueError: there is no format of this name.
    """
    if name is not None:
        return REASONING_FORMATS[name]
    return next((f for f in REASONING_FORMATS.values() if (f.mark or f.end) in template), None)


def read_reasoning(text: str, form: ReasoningFormat | None, *, opened: bool) -> tuple[str | None, str]:
    """Returns the thinking (or None) and the text after it. ``opened``: whether the prompt ends with the start of the
    thinking.

    If the thinking has no end mark, the whole text is thinking.
    """
    if form is None:
        return None, text
    if form.channels:
        return read_channels(text)
    begun = text.lstrip().startswith(form.start)
    inside = text.lstrip()[len(form.start) :] if begun else text
    if not (begun or opened or (form.end in text and form.start not in text)):
        return None, text
    thinking, ended, rest = inside.partition(form.end)
    return thinking.strip("\n") or None, rest.lstrip("\n") if ended else ""


def read_tools(
    text: str, form: ToolFormat | None, schemas: Schemas, salt: str
) -> tuple[str, tuple[ToolCall, ...], tuple[str, ...]]:
    """Returns the content, the calls, and one sentence for each call that cannot be read.

    ``salt`` identifies the reply, so that equal calls in two replies have different ids. If the ids were equal, a
    client would treat the second call as already answered. Ids are 9 letters and digits, because Mistral's templates
    require and print them.
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
            read = form.read(inside, schemas)
        except Unreadable as error:
            malformed.append(f"The tool call {short(text[start:end])} cannot be read: {error}.")
            continue
        content, at = content + text[at:start], end
        for name, arguments in read:
            key = f"{salt}/{len(calls)}/{name}/{arguments}".encode(errors="replace")
            calls.append(ToolCall(hashlib.blake2b(key).hexdigest()[:9], name, arguments))
    content += text[at:]
    if not calls and not malformed and (sign := _sign(text, form)):
        malformed.append(f"The reply has {sign}, but no tool call in the format of this model.")
    return content.strip() if calls else content, tuple(calls), tuple(malformed)


def _sign(text: str, form: ToolFormat) -> str | None:
    """A mark of a tool call of any family in ``text``, or None. A model that writes such a mark wanted to call a
    tool."""
    signs = (sign for one in (form, *TOOL_FORMATS.values()) for sign in one.signs)
    return next((sign for sign in signs if sign in text), None)
