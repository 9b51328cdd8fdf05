"""slime's loss masks, token for token: ``qwen``, ``qwen3``, ``qwen3_5`` and ``distill_qwen``.

They suit the ChatML templates of those models. ``qwen`` and ``qwen3`` render each message by itself, so what a template
does across messages (history without thinking, tool answers in one turn) is not what a rollout sees; ``auto`` of
`masks` has no such limits.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

Message = dict[str, Any]
# characters [start, end)
Span = tuple[int, int]


class Piece(NamedTuple):
    """A stretch of text that is tokenized by itself, and the spans of it that are trained on."""

    text: str
    trained: list[Span]


class Renderer(NamedTuple):
    """A tokenizer's chat template with the template's own settings."""

    tokenizer: PreTrainedTokenizerBase
    settings: dict[str, Any]

    def __call__(
        self, messages: list[Message], tools: list[Any] | None = None, *, generation_prompt: bool = False
    ) -> str:
        settings = {**self.settings, "add_generation_prompt": generation_prompt}
        return self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **settings)


def is_trained(message: Message) -> bool:
    """False for a message that ``step_loss_mask`` switches off."""
    return message.get("step_loss_mask", 1) == 1


def _unit(render: Renderer, text: str, message: Message) -> Piece:
    """A message's own rendering; a reply is trained on from the end of the generation prompt."""
    if message["role"] != "assistant" or not is_trained(message):
        return Piece(text, [])
    user = {"role": "user", "content": "x"}
    header = len(render([user], generation_prompt=True)) - len(render([user]))
    return Piece(text, [(header, len(text))])


def _qwen(render: Renderer, messages: list[Message], tools: list[Any] | None) -> list[Piece]:
    """A message is rendered alone; the system prompt that the template adds to it is cut off."""
    user = {"role": "user", "content": "x"}
    added = 2 * len(render([user])) - len(render([user, user]))
    pieces = [_unit(render, render(messages[:1], tools), messages[0])]
    for message in messages[1:]:
        text = render([message])
        pieces.append(_unit(render, text if message["role"] == "system" else text[added:], message))
    return pieces


def _qwen3(render: Renderer, messages: list[Message], tools: list[Any] | None) -> list[Piece]:
    """A message is rendered after a user's question, so that each reply counts as the last one and keeps its thinking.

    Answers of several tools in a row are one unit, as the template writes them.
    """
    question = {"role": "user", "content": "x"}
    length = len(render([question]))
    pieces = [_unit(render, render([messages[0], question], tools)[:-length], messages[0])]
    tool_runs = groupby(enumerate(messages[1:]), key=lambda item: -1 if item[1]["role"] == "tool" else item[0])
    for _, run in tool_runs:
        unit = [message for _, message in run]
        pieces.append(_unit(render, render([question, *unit])[length:], unit[0]))
    return pieces


def _qwen3_5(render: Renderer, messages: list[Message], tools: list[Any] | None) -> list[Piece]:
    """The whole rendering; a reply starts after its header and the ``<think>`` that the generation prompt opens."""
    text = render(messages, tools)
    replies = re.finditer(r"<\|im_start\|>assistant\n(?:<think>\n)?(.*?<\|im_end\|>\n?)", text, re.DOTALL)
    flags = [is_trained(m) for m in messages if m["role"] == "assistant"]
    spans = [reply.span(1) for reply in replies]
    if len(spans) != len(flags):
        raise ValueError(
            f"--loss-mask-type qwen3_5 found {len(spans)} replies in a conversation of {len(flags)}; "
            "use --loss-mask-type auto"
        )
    return [Piece(text, [span for span, flag in zip(spans, flags, strict=True) if flag])]


def _distill_qwen(render: Renderer, messages: list[Message], tools: list[Any] | None) -> list[Piece]:
    """The first message as the prompt and the last one's bare content as the response; nothing in between."""
    reply = messages[-1]["content"] or ""
    trained = [(0, len(reply))] if is_trained(messages[-1]) else []
    return [Piece(render(messages[:1], tools, generation_prompt=True), []), Piece(reply, trained)]


SLIME_MASKS: dict[str, Callable[[Renderer, list[Message], list[Any] | None], list[Piece]]] = {
    "qwen": _qwen,
    "qwen3": _qwen3,
    "qwen3_5": _qwen3_5,
    "distill_qwen": _distill_qwen,
}
