"""Replies as they come: the responses of a request side by side, and the text that is certain before one has ended."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

from slimelite.engines.protocol import OnTokens, SamplingParams
from slimelite.engines.sampling import Generating, news
from slimelite.serving.calls import ToolCall
from slimelite.serving.format import ChatFormat, before_stop
from slimelite.serving.sessions import Session, Sessions, Turn
from slimelite.serving.stored import Stored
from slimelite.serving.tools import certain_channels

# a turn, which has its prompt, and how its response is sampled
PlannedTurn = tuple[Turn, SamplingParams]


@dataclass(frozen=True)
class Model:
    """What a front serves; ``name``: in its answers; ``created``: when it began [s since 1970]; ``stored``: answers."""

    name: str
    sessions: Sessions
    engine: Generating
    created: int
    stored: Stored = field(default_factory=Stored)


@dataclass(frozen=True)
class Part:
    """What is new of response number ``index``: its text, and its tokens with their log-probs.

    ``first``: nothing of the response came before; ``ended``: nothing comes after it, and ``turn`` has all of it. A
    response that does not stream is one part.
    """

    index: int
    turn: Turn
    thinking: str
    content: str
    ids: Sequence[int]
    log_probs: Sequence[float]
    first: bool
    ended: bool

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The tool calls, which come with the end."""
        return self.turn.reply.tool_calls if self.ended else ()


async def parts(session: Session, planned: Sequence[PlannedTurn], *, stream: bool) -> AsyncGenerator[Part]:
    """Sample what is ``asked`` side by side; yields the responses as they come if they ``stream``, else as they end.

    A turn that has a finish reason already is not sampled. Closing the generator, and the first error, cancel all.
    """

    async def sample(turn: Turn, params: SamplingParams, on_tokens: OnTokens | None) -> Turn:
        return turn if turn.finish_reason else await session.sample(turn, params, on_tokens)

    texts = [TextStream(session.format, turn, params.stop) for turn, params in planned]
    silent = set(range(len(planned)))
    async with aclosing(news([partial(sample, *one) for one in planned], stream=stream)) as coming:
        async for new in coming:
            turn, text, ended = planned[new.index][0], texts[new.index], new.result is not None
            shown = len(text.ids) - len(turn.given_ids)
            ids, log_probs = (turn.output_ids[shown:], turn.log_probs[shown:]) if ended else (new.ids, new.log_probs)
            thinking, content = text.end() if ended else text.add(ids)
            yield Part(new.index, turn, thinking, content, ids, log_probs, new.index in silent, ended)
            silent.discard(new.index)


class TextStream:
    """What of a reply can be shown while its tokens come: nothing of a tool call, a stop string, or half a character.

    The reply to raw tokens is shown as it is, special tokens included.

    Args:
        turn: what is sampled; it has its prompt.
        stops: stop strings.
    """

    def __init__(self, chat_format: ChatFormat, turn: Turn, stops: Sequence[str]) -> None:
        self._format, self._turn, self._stops = chat_format, turn, stops
        self._raw = not turn.messages
        self._thinking = None if self._raw else chat_format.reasoning
        self._channels = self._thinking is not None and self._thinking.channels
        self._opened = chat_format.opens_thinking(turn.rendered)
        tools = None if self._raw else chat_format.calls(turn.tools)
        self._marks = (*stops, *(tools.begins if tools else ()))
        # tokens [0, _known) have text; those from _context on are decoded with the next ones, which may change it
        self.ids: list[int] = []
        self._context = self._known = 0
        self._text = self._reasoning = self._content = ""
        self.add(turn.given_ids)

    def add(self, ids: Sequence[int]) -> tuple[str, str]:
        """(more of the thinking, more of the content) that the reply certainly has after these tokens."""
        self.ids += ids
        self._decode()
        reasoning, content = self._certain()
        new = reasoning[len(self._reasoning) :], content[len(self._content) :]
        self._reasoning, self._content = self._reasoning + new[0], self._content + new[1]
        return new

    def end(self) -> tuple[str, str]:
        """What is left to show of the reply, which has ended."""
        reply = self._turn.reply
        thinking, content = reply.reasoning or "", reply.content
        # thinking that nothing opened has been shown as content before its end came; of empty thinking, its end has
        other = bool(thinking) or not content.lstrip().startswith(self._content.lstrip())
        unopened = other and bool(self._content) and not self._reasoning and not self._channels
        if self._raw or unopened:
            content = self._format.decode(self._format.without_end(self._turn.reply_ids))
        content = before_stop(content, self._marks if unopened and reply.tool_calls else self._stops)
        return "" if unopened else _rest(thinking, self._reasoning), _rest(content, self._content)

    def _decode(self) -> None:
        """Decode the new tokens, but not an end that is an unfinished character or a token that ends replies."""
        end = len(self.ids)
        if end and self.ids[-1] in self._format.end_ids:
            end -= 1
        whole = self._format.decode(self.ids[self._context : end])
        if end > self._known and not whole.endswith("�"):
            self._text += whole[len(self._format.decode(self.ids[self._context : self._known])) :]
            self._context, self._known = self._known, end

    def _certain(self) -> tuple[str, str]:
        form, text = self._thinking, self._text
        if form is None:
            return "", _certain_text(text, self._marks)
        if form.channels:
            thinking, content = certain_channels(text)
            return _certain_text(thinking, self._stops), _certain_text(content, self._marks)
        lead = text.lstrip()
        begun = lead.startswith(form.start)
        if not begun and form.start.startswith(lead):
            return "", ""
        if not begun and not self._opened:
            return "", _certain_text(text, self._marks)
        thinking, ended, rest = (lead[len(form.start) :] if begun else text).partition(form.end)
        if not ended:
            return _certain_text(thinking, (*self._stops, form.end)).lstrip("\n"), ""
        return thinking.strip("\n"), _certain_text(rest.lstrip("\n"), self._marks)


def _certain_text(text: str, marks: Sequence[str]) -> str:
    """``text`` without what may be the beginning of one of ``marks``, and without white space at its end."""
    text = before_stop(text, marks)
    for length in range(min(len(text), max(map(len, marks), default=0)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return text[:-length].rstrip()
    return text.rstrip()


def _rest(whole: str, shown: str) -> str:
    """What follows ``shown`` in ``whole``, whose white space in front may be gone."""
    for begin in (shown, shown.lstrip()):
        if whole.startswith(begin):
            return whole[len(begin) :]
    return ""
