"""Replies of several messages, each with a head that says to whom it goes: GPT-OSS's (harmony) and Muse Glimmer's.

``<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
<|message|>{…}<|call|>`` thinks and calls ``f``; `` to=self<|message|>…<|eom|><|start|>assistant to=user<|message|>…``
thinks and answers. The prompt ends with the first ``<|start|>assistant``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from slimelite.serving.calls import Piece, Schemas, Unreadable, arguments_text, json_value, typed_call

START, BODY = "<|start|>assistant", "<|message|>"
HEAD = re.compile(
    r"(?:(?:\A|<\|start\|>assistant)(?:\s*to=[^\s<]+)?\s*|(?=<\|channel\|>))"
    r"(?:<\|channel\|>[^<]*)?(?:<\|constrain\|>[^<]*)?<\|message\|>"
)
END = re.compile(r"<\|(?:end|call|return|eom|eot)\|>")
# at the end of a text that goes on: half a mark, or the beginning of the first head
HALF = re.compile(r"<(?:\|(?:\w*\|?)?)?\Z|\A\s*(?:t|to|to=[^<]*)?\Z")
# the head of a call that never comes to its body
UNFINISHED = re.compile(r"(?:\A\s*|<\|(?:start|channel)\|>[^<]*)to=(?!self|user)")
RECIPIENT = re.compile(r"to=([^\s<]+)")
ANALYSIS = re.compile(r"<\|channel\|>\s*analysis")


class Part(NamedTuple):
    """Characters [start, end) of a reply: a message, its end mark included, or what stands between two (no head)."""

    start: int
    end: int
    head: str
    body: str

    @property
    def recipient(self) -> str | None:
        """To whom it goes, if the head names a tool."""
        match = RECIPIENT.search(self.head)
        return match[1] if match and match[1] not in ("self", "user") else None

    @property
    def thinks(self) -> bool:
        """Whether it is thinking."""
        match = RECIPIENT.search(self.head)
        return match[1] == "self" if match else bool(ANALYSIS.search(self.head))


def parts(text: str) -> Iterator[Part]:
    """Yields the parts of a reply in order; together they are all of it."""
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
    """(the thinking or None, the rest): what the user is told without its heads, and calls with theirs."""
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
    """What `read_channels` finds in the beginning of a reply, as far as no longer text changes it."""
    half = HALF.search(text)
    text = text[: half.start()] if half else text
    body = text.rfind(BODY)
    begun = [place for mark in ("<|start|>", "<|channel|>") if (place := text.find(mark, max(body, 0))) >= 0]
    thinking, rest = read_channels(text[: min(begun, default=len(text))])
    return thinking or "", rest


def channel_pieces(text: str) -> Iterator[Piece]:
    """The messages to tools; the end mark may be missing, as it ends a reply."""
    for part in parts(text):
        if part.recipient is not None:
            yield Piece(part.start, part.end, part.head + part.body)
        elif not part.head and (cut := UNFINISHED.search(part.body)):
            yield Piece(part.start + cut.start(), part.end, part.body[cut.start() :], BODY)


def read_harmony(inside: str, _: Schemas) -> list[tuple[str, str]]:
    """``<|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}`` of GPT-OSS."""
    recipient, body = RECIPIENT.search(inside), inside.partition(BODY)[2]
    assert recipient is not None
    return [(recipient[1].removeprefix("functions."), arguments_text(json_value(body)))]


def read_muse(inside: str, schemas: Schemas) -> list[tuple[str, str]]:
    """``to=name<|message|><atem:function_calls><atem:invoke name="name"><atem:parameter name="key">value…`` of Muse."""
    body = inside.partition(BODY)[2]
    block = re.fullmatch(r"\s*<atem:function_calls>(.*)</atem:function_calls>\s*", body, re.DOTALL)
    invoke = re.compile(r'<atem:invoke name="([^"\n]*)">(.*?)</atem:invoke>', re.DOTALL)
    pair = re.compile(r'<atem:parameter name="([^"\n]*)">(.*?)</atem:parameter>', re.DOTALL)
    if block is None or invoke.sub("", block[1]).strip() or not invoke.search(block[1]):
        raise Unreadable("it is not <atem:function_calls> with an <atem:invoke name=…>")
    return [
        typed_call(name, pair.findall(text), pair.sub("", text), schemas) for name, text in invoke.findall(block[1])
    ]
