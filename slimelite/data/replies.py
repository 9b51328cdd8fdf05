"""Detects where the assistant's replies are in the rendered text of a conversation, with any chat template. The
`Finder` replaces a reply by a probe text, renders the conversation again, and compares the two rendered texts.

A reply extends from the end of the generation prompt to the end of the assistant's turn. Text from a user, a system
prompt or a tool is not part of a reply. Gemma 4's chat template writes tools' answers inside the assistant's turn. With
this template, a reply ends before the tools' answers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from typing import Any

from jinja2 import TemplateError

from slimelite.data.messages import Message, Messages

# replaces an assistant's reply; has private-use characters, because templates do not trim, split or escape them
PROBE = "\ue0f0\ue0f1\ue0f2"
# characters [start, end)
Span = tuple[int, int]


@dataclass(frozen=True)
class Finder:
    """Detects where the replies are in the rendered text of one conversation.

    Args:
        messages: the conversation. ``text``: the rendered text of the conversation.
        template: function (messages, whether to add the generation prompt) -> text.
        special: a regular expression that matches special tokens, such as ``<|im_end|>``, which plain text never
            contains.
    """

    messages: Messages
    text: str
    template: Callable[[Messages, bool], str]
    special: re.Pattern[str]
    _rendered: dict[tuple[str, bool], str] = field(default_factory=dict)

    def spans(self, i: int) -> list[Span]:
        """The spans (start, end) of the reply ``messages[i]`` in the rendered text.

        Usually there is one span. But Gemma 4's chat template writes the tools' answers between the tool calls and the
        words of a reply. Then the words are a second span.

        Raises:
            ValueError: the rendered text does not contain the reply, or the reply does not begin where the generation
                prompt ends.
        """
        self._rendered.clear()
        reply, start = self.messages[i], self._start(i)
        follower = self.messages[i + 1]["role"] if i + 1 < len(self.messages) else ""
        end = self._end_of_calls(i, follower) if reply.get("tool_calls") else None
        if end is not None:
            probe = {**_words(reply), "tool_calls": reply["tool_calls"]}
            words = self._around(i, probe) if reply.get("content") else None
            late = [(len(words[0]), self._end_of_words(i, words[1], ""))] if words and len(words[0]) >= end else []
            return [(start, end), *late]
        words = self._around(i, _words(reply))
        if words is None:
            raise _hidden(i)
        return [(start, max(start, self._end_of_words(i, words[1], follower)))]

    def _start(self, i: int) -> int:
        """Where the reply begins.

        If a probe replaces the reply, the text before the probe ends with the header of the turn. Some templates write
        more text between the header and the reply, such as an empty thinking block. To separate this text from the
        header, the messages before the reply are rendered twice: once with the probe as the reply, and once with the
        generation prompt.
        """
        context = self.messages[:i]
        while context and context[-1]["role"] == "assistant":
            context = context[:-1]
        for probe in _probes(self.messages[i]):
            around = self._around(i, probe, again=True)
            if around is None:
                continue
            before, start = around[0], len(around[0])
            shared = _common(before, self.text)
            if not context:
                return min(start, shared)
            answered = self._render([*context, probe], False).partition(PROBE)[0]
            plain, prompt = self._render(context, False), self._render(context, True)
            header_end = _common(answered, prompt)
            if header_end >= _common(plain, prompt):
                opening = answered[header_end:]
                if before.endswith(opening):
                    start -= len(opening)
                    # the generation prompt may contain the beginning of this reply, such as the line after an opened
                    # <think>
                    prefill = prompt[header_end:]
                    if prefill and self.text.startswith(prefill, start):
                        start += len(prefill)
                    elif opening.startswith(self._header):
                        start += len(self._header)
            elif probe.keys() == {"role", "content"}:
                # a reply changes the text before it, so search for the header before the words of the reply
                header = prompt.removeprefix(plain)
                start = before.rfind(header) + len(header)
            else:
                continue
            if start <= shared:
                return start
        raise _hidden(i)

    def _render(self, messages: Messages, prompt: bool) -> str:
        """The rendered text of messages. Texts are cached while one reply is located."""
        key = (repr(messages), prompt)
        if key not in self._rendered:
            self._rendered[key] = self.template(messages, prompt)
        return self._rendered[key]

    @cached_property
    def _header(self) -> str:
        """The header of a turn. After a tool's answer, Gemma's generation prompt has no header, but its template writes
        a header before the reply."""
        question = [{**_words(self.messages[0]), "role": "user"}]
        try:
            return self._render(question, True).removeprefix(self._render(question, False))
        except TemplateError:
            return ""

    def _end_of_words(self, i: int, after: str, follower: str) -> int:
        """The end of a reply that has words. ``after``: the text that follows a probe in the reply's place."""
        if not self.text.endswith(after):
            raise _hidden(i)
        end = len(self.text) - len(after)
        return end + self._turn_end(self.text[end:], self._last(i, _words(self.messages[i])), follower)

    def _end_of_calls(self, i: int, follower: str) -> int | None:
        """The end of a reply that calls tools. None: the template does not show the calls, or changes them.

        The text after the first call's name is compared with the same calls at the end of a conversation.
        """
        reply = self.messages[i]
        named = {**reply, "tool_calls": renamed(reply["tool_calls"])}
        around = self._around(i, named, again=True)
        name = str(reply["tool_calls"][0].get("function", reply["tool_calls"][0])["name"])
        if around is None or not self.text.startswith(around[0] + name):
            return None
        last = self._last(i, {**named, "content": type(reply.get("content", ""))()}).replace(PROBE, name)
        end = len(around[0] + name)
        length = self._turn_end(self.text[end:], last, follower)
        if self.special.sub("", last[length:]).strip():
            raise _hidden(i)
        return end + length

    def next_mark(self) -> str:
        """Returns "" if the template ends the last reply with a special token. Otherwise returns the special token with
        which the next speaker's turn would begin, or "" if there is none."""
        reply = self.messages[-1]
        if any(not self.text[mark.end() :].strip() for mark in self.special.finditer(self.text, len(self.text) - 100)):
            return ""
        follower = {**_words(reply), "role": "tool" if reply.get("tool_calls") else "user"}
        try:
            longer = self._render([*self.messages, follower], False)
        except TemplateError:
            return ""
        mark = self.special.match(longer, len(self.text)) if longer.startswith(self.text) else None
        return mark[0] if mark else ""

    def _last(self, i: int, probe: Message) -> str:
        """The text after the probe if the probe is the last message."""
        return self._render([*self.messages[:i], probe], False).partition(PROBE)[2]

    def _turn_end(self, text: str, last: str, follower: str) -> int:
        """The length of a turn's end, if ``text`` starts with the turn's end. ``last``: the end of the same turn if no
        turn follows.

        Special tokens are compared as a whole, so ``<|end|>`` and ``<|endoftext|>`` have no common prefix. If a turn
        has no end token and another speaker follows, the end of the next turn counts as the end of both. In the middle
        of a conversation, GPT-OSS writes a different end token. GLM writes no end token, so the model stops with the
        header of the next speaker. A space after the end is left out, because tokenizers join it to the next word.
        """
        length, closed = 0, False
        for one, other in zip_longest(self._split(text[: len(last) + 100]), self._split(last)):
            if one is None or one != other:
                plain = one and other and not self.special.match(one)
                length += _common(one, other) if plain else 0
                break
            length += len(one)
            closed = closed or self.special.match(one) is not None
        if closed:
            return len(text[:length].rstrip(" "))
        mark = self.special.match(text, length) if follower not in ("", "assistant") else None
        return mark.end() if mark else length

    def _split(self, text: str) -> Iterator[str]:
        """Split ``text`` into special tokens and the texts between them."""
        at = 0
        for mark in self.special.finditer(text):
            yield from filter(None, (text[at : mark.start()], mark[0]))
            at = mark.end()
        yield from filter(None, (text[at:],))

    def _around(self, i: int, probe: Message, *, again: bool = False) -> tuple[str, str] | None:
        """The texts before and after ``probe`` at the reply's place. None: the template does not show the probe.

        ``again``: the probe may appear more than once. For example, a tool's name appears again before the tool's
        answer.
        """
        try:
            text = self._render([*self.messages[:i], probe, *self.messages[i + 1 :]], False)
        except TemplateError:  # some templates require a call before a tool's answer
            return None
        before, mark, after = text.partition(PROBE)
        return (before, after) if mark and (again or PROBE not in after) else None


def _words(reply: Message) -> Message:
    """A copy of ``reply`` with the content `PROBE`. The content is a text. If the content of ``reply`` is a list, the
    new content is a list with one text."""
    parts = isinstance(reply.get("content"), list)
    return {"role": "assistant", "content": [{"type": "text", "text": PROBE}] if parts else PROBE}


def _probes(reply: Message) -> Iterator[Message]:
    """Yield probe replies that a template may show at the place of ``reply``."""
    yield _words(reply)
    if reply.get("tool_calls"):
        yield {**_words(reply), "tool_calls": reply["tool_calls"]}
        named = {**reply, "tool_calls": renamed(reply["tool_calls"])}
        # GPT-OSS's template removes the thinking before a call as soon as the model has answered
        yield {key: value for key, value in named.items() if key != "reasoning_content"}
        yield named
    if reply.get("reasoning_content"):
        yield {**reply, "reasoning_content": PROBE}


def renamed(called: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A copy of ``called``, a list of tool calls or tools. In the copy, the probe text replaces the name of the first
    entry."""
    first, *others = called
    changed = {**first.get("function", first), "name": PROBE}
    return [{**first, "function": changed} if "function" in first else changed, *others]


def _hidden(i: int) -> ValueError:
    return ValueError(
        f"the chat template does not show assistant message {i} as a reply to the prompt before it, so the "
        "tokens of the reply cannot be found; mark replies with {% generation %} … {% endgeneration %} in the "
        "template"
    )


def _common(a: str, b: str) -> int:
    """The length of the longest common prefix. Bisection compares slices, which is faster than comparing characters."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
