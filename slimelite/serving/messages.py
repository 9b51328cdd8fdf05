"""What is said in a conversation: a reply as it was read, and how messages are compared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from slimelite.data.messages import Message
from slimelite.serving.calls import ToolCall


@dataclass(frozen=True)
class Reply:
    """What the model said, read from its tokens; ``malformed``: one sentence for each call that cannot be read.

    The text of such a call is part of ``content``.
    """

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()

    def message(self) -> Message:
        """The reply as an assistant's message in OpenAI's form."""
        message: Message = {"role": "assistant", "content": self.content or (None if self.tool_calls else "")}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


def content_text(content: object, name: str = "content") -> str:
    """The content of a message as one text: null is empty, parts of text are joined. ``name``: for the message.

    Raises:
        ValueError: it has something else, such as an image.
    """
    if isinstance(content, list):
        for place, part in enumerate(content):
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else part
                raise ValueError(f"{name}[{place}] is of type {kind!r:.60}, and only parts of type text are read")
        return "".join(part["text"] for part in content)
    if content is None or isinstance(content, str):
        return content or ""
    raise ValueError(f"{name} must be text or parts of type text, not {content!r:.60}")


def before_stop(text: str, stops: Sequence[str]) -> str:
    """``text`` up to the first of ``stops``, which is part of the tokens and not of the text that clients get."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places, default=len(text))]


def comparable(message: Message) -> tuple[object, ...]:
    """What two messages that mean the same have in common: role, name, text, calls with their arguments as values.

    Clients send a reply back with other ids, white space in its JSON, or null for nothing.
    """
    calls = [call.get("function", call) for call in message.get("tool_calls") or []]
    content, reply = content_text(message.get("content")), message.get("role") == "assistant"
    written = [(call.get("name"), _value(call.get("arguments"))) for call in calls]
    return message.get("role"), message.get("name"), content.strip() if reply else content, written


def _value(arguments: object) -> object:
    try:
        return json.loads(arguments, strict=False) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
