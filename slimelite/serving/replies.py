"""Handles replies while they are generated. The module samples several responses of a request at the same time. For
streams, the module finds the part of an unfinished reply that later tokens cannot change."""

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

# (a turn with its prompt, the sampling parameters of its response)
PlannedTurn = tuple[Turn, SamplingParams]


@dataclass(frozen=True)
class Model:
    """The model that an HTTP front serves. ``name``: the model's name in answers. ``created``: the start time [s since
    1970]. ``stored``: the stored answers."""

    name: str
    sessions: Sessions
    engine: Generating
    created: int
    stored: Stored = field(default_factory=Stored)


@dataclass(frozen=True)
class Part:
    """The new part of response number ``index``: its text, and its tokens with their log-probs.

    ``first``: whether this is the first part. ``ended``: whether this is the last part; ``turn`` then has the whole
    response. A response that is not streamed has only one part.
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
        """The tool calls of the reply. Only the last part contains these calls."""
        return self.turn.reply.tool_calls if self.ended else ()


async def parts(session: Session, planned: Sequence[PlannedTurn], *, stream: bool) -> AsyncGenerator[Part]:
    """Sample the ``planned`` turns at the same time. With ``stream``, yields the parts of a response while they are
    generated. Without ``stream``, yields each response when it ends.

    A turn that has a finish reason already is not sampled. All turns are cancelled at the first error, and also when
    the generator is closed.
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
    """The part of a reply's text that can be shown while the tokens arrive. Tool calls, stop strings and incomplete
    characters are left out.

    A reply to raw tokens is shown unchanged, with special tokens.

    Args:
        turn: the turn that is sampled. The prompt of the turn is known already.
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
        # tokens [0, _known) are decoded. Tokens from _context on are decoded again with the next tokens, which may
        # change their text
        self.ids: list[int] = []
        self._context = self._known = 0
        self._text = self._reasoning = self._content = ""
        self.add(turn.given_ids)

    def add(self, ids: Sequence[int]) -> tuple[str, str]:
        """Returns the next texts of the thinking and of the content. Later tokens cannot change them."""
        self.ids += ids
        self._decode()
        reasoning, content = self._certain()
        new = reasoning[len(self._reasoning) :], content[len(self._content) :]
        self._reasoning, self._content = self._reasoning + new[0], self._content + new[1]
        return new

    def end(self) -> tuple[str, str]:
        """Returns the rest of the thinking and of the content, after the reply has ended."""
        reply = self._turn.reply
        thinking, content = reply.reasoning or "", reply.content
        # if the thinking has no opening mark, it was shown as content before its end mark arrived. If the thinking is
        # also empty, its end mark was shown
        other = bool(thinking) or not content.lstrip().startswith(self._content.lstrip())
        unopened = other and bool(self._content) and not self._reasoning and not self._channels
        if self._raw or unopened:
            content = self._format.decode(self._format.without_end(self._turn.reply_ids))
        content = before_stop(content, self._marks if unopened and reply.tool_calls else self._stops)
        return "" if unopened else _rest(thinking, self._reasoning), _rest(content, self._content)

    def _decode(self) -> None:
        """Decode the new tokens, except an incomplete character or an end token at the end."""
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
    """``text`` without a last part that may be the beginning of one of ``marks``, and without trailing white space."""
    text = before_stop(text, marks)
    for length in range(min(len(text), max(map(len, marks), default=0)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return text[:-length].rstrip()
    return text.rstrip()


def _rest(whole: str, shown: str) -> str:
    """The part of ``whole`` after ``shown``, even if ``whole`` lacks the leading white space of ``shown``."""
    for begin in (shown, shown.lstrip()):
        if whole.startswith(begin):
            return whole[len(begin) :]
    return ""
