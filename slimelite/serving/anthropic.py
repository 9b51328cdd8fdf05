"""Anthropic's dialect: ``/v1/messages``, with complete answers or events, and ``/v1/messages/count_tokens``.

The model's tool calls and its thinking are separate blocks of a message. A conversation is converted to OpenAI's
messages. Both dialects use the same sessions, so Anthropic's and OpenAI's requests may alternate in one session.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Literal

from pydantic import Field

from slimelite.base.http_body import Body, FirstError, Shape, Text, unread, with_fields
from slimelite.base.http_server import Answer, RequestError, sse
from slimelite.engines.http_front import TEXTS, sampled
from slimelite.engines.params import SamplingParams
from slimelite.serving.format import SWITCH_NAME, ChatFormat, Message
from slimelite.serving.grammars import HeldBody, ResponseFormat, named_schema
from slimelite.serving.openai import checked_messages, held_params, shown_tools
from slimelite.serving.replies import Model, Part, PlannedTurn, parts
from slimelite.serving.sessions import ContextFullError, Session, Turn

STOP_REASONS = {"length": "max_tokens", "abort": "abort"}
# type of a block -> (its field that is sent in pieces, the type of a piece, the name of the text in a piece)
DELTAS = {
    "thinking": ("thinking", "thinking_delta", "thinking"),
    "text": ("text", "text_delta", "text"),
    "tool_use": ("input", "input_json_delta", "partial_json"),
}


class TextBlock(Shape):
    type: Literal["text"]
    text: str


class ToolResult(Shape):
    type: Literal["tool_result"]
    tool_use_id: Any = None
    content: str | FirstError[list[TextBlock]] = ""


class ToolUse(Shape):
    type: Literal["tool_use"]
    id: Any = None
    name: str
    input: Any = Field(default_factory=dict)


class Thinking(Shape):
    type: Literal["thinking"]
    thinking: str


UserBlock = Annotated[TextBlock | ToolResult, Field(discriminator="type")]
AssistantBlock = Annotated[TextBlock | ToolUse | Thinking, Field(discriminator="type")]


class UserMessage(Shape):
    role: Literal["user", "system"]
    content: str | FirstError[list[UserBlock]] | None = None


class AssistantMessage(Shape):
    role: Literal["assistant"]
    content: str | FirstError[list[AssistantBlock]] | None = None


class Tool(Shape):
    type: Literal["custom"] = "custom"
    name: Text
    description: str = ""
    input_schema: dict[str, Any] = Field(default_factory=dict)
    strict: bool = False


class ToolChoice(Shape):
    type: Literal["auto", "any", "none", "tool"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class ThinkingSwitch(Shape):
    type: Literal["enabled", "disabled", "adaptive"] = "adaptive"


class OutputConfig(Body):
    format: ResponseFormat = ResponseFormat()
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class Threshold(Shape):
    type: str
    value: int


class ClearToolUses(Shape):
    """An edit that would remove results of tools from a long history. ``trigger`` and ``keep`` have Anthropic's
    defaults."""

    type: str = Field(pattern=r"^clear_tool_uses_\d{8}$")
    trigger: Threshold = Threshold(type="input_tokens", value=100_000)
    keep: Threshold = Threshold(type="tool_uses", value=3)
    exclude_tools: list[Any] = Field(default_factory=list)


class ClearThinking(Shape):
    type: str = Field(pattern=r"^clear_thinking_\d{8}$")


class ContextManagement(Shape):
    """The edits that a client requests for a long history. This server does not edit the history."""

    edits: FirstError[list[ClearToolUses | ClearThinking]] = Field(default_factory=list)


@with_fields(unread(mcp_servers=[]))
class CountBody(Body):
    """``/v1/messages/count_tokens``."""

    model: Text = ""
    messages: list[Annotated[UserMessage | AssistantMessage, Field(discriminator="role")]] = Field(
        min_length=1, fail_fast=True
    )
    system: str | FirstError[list[TextBlock]] = ""
    tools: FirstError[list[Tool]] = Field(default_factory=list)
    tool_choice: ToolChoice = ToolChoice(type="auto")
    thinking: ThinkingSwitch = ThinkingSwitch()
    output_config: OutputConfig = OutputConfig()
    context_management: ContextManagement = ContextManagement()
    # these fields are ignored: they concern the user, the price, and the caches of Anthropic's servers
    metadata: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    betas: TEXTS | None = None
    service_tier: Text | None = None
    inference_geo: Text | None = None
    speed: Text | None = None


@sampled("anthropic")
class MessagesBody(CountBody, HeldBody):
    """``/v1/messages``."""

    max_tokens: int = Field(ge=1)
    stream: bool = False
    thread: dict[str, Any] | None = None

    def response_schema(self) -> str | None:
        """See `HeldBody.response_schema`."""
        return named_schema(self.output_config.format, "output_config.format")


async def messages(model: Model, session: Session, body: MessagesBody) -> Answer:
    """``/v1/messages``."""
    # the tool runner of Anthropic's SDK requests a thread, and continues without a thread after this error
    if body.thread is not None:
        raise RequestError(
            "thread: this server does not keep conversations between requests; send the whole history without a thread",
            param="thread",
            details={"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
        )
    one = body.tool_choice.disable_parallel_tool_use
    conversation = _conversation(body)
    turn = session.turn(*conversation, _template_kwargs(body, session.format), one_call=one)
    _check_clears(body, conversation[0], len(turn.prompt_ids))
    planned = turn, await held_params(model, session, body, conversation[2])
    head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": body.model or model.name}
    if body.stream:
        return _stream(head, session, planned)
    (part,) = [part async for part in parts(session, [planned], stream=False)]
    return {**head, "content": _blocks(part), **_end(*planned), "usage": _usage(turn)}


async def count_tokens(model: Model, session: Session, body: CountBody) -> Answer:  # noqa: ARG001
    """``/v1/messages/count_tokens``."""
    messages, tools, _ = _conversation(body)
    count = len(session.format.prompt(messages, tools, **_template_kwargs(body, session.format)))
    _check_clears(body, messages, count)
    return {"input_tokens": count}


def error_body(error: Exception, status: int) -> dict[str, object]:
    """Anthropic's JSON for an error."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
    kinds |= {429: "rate_limit_error", 503: "overloaded_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "api_error")
    message = str(error)
    # clients look for these words; the maximum is one less than the context, because the reply needs a token
    if isinstance(error, ContextFullError):
        message = f"prompt is too long: {error.tokens} tokens > {error.most - 1} maximum"
    details = error.details if isinstance(error, RequestError) else None
    return {"type": "error", "error": {"type": kind, "message": message, **({"details": details} if details else {})}}


def _conversation(body: CountBody) -> tuple[list[Message], list[dict[str, Any]] | None, list[str]]:
    """Messages and tools in OpenAI's form, and the names of the tools from which a reply that must call a tool can
    choose."""
    conversation: list[Message] = [{"role": "system", "content": _text(body.system)}] if body.system else []
    for index, message in enumerate(body.messages):
        conversation += checked_messages(_messages(message), f"messages[{index}]")
    # Anthropic's newer models refuse this too; here the reply would become a separate message
    if conversation[-1]["role"] == "assistant":
        what = "the last message is an assistant message, but the model cannot continue it; end with a user message"
        raise RequestError(f"messages[{index}]: {what}", param="messages")
    functions = [
        {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
        | ({"strict": True} if tool.strict else {})
        for tool in body.tools
    ]
    choice = body.tool_choice
    named = {"type": "function", "function": {"name": choice.name}}
    wanted = {"tool": named, "any": "required"}.get(choice.type, choice.type)
    return conversation, *shown_tools([{"type": "function", "function": function} for function in functions], wanted)


def _check_clears(body: CountBody, messages: list[Message], tokens: int) -> None:
    """Refuse an edit that would clear results of tools, because this server would still show the results to the model.

    ``tokens``: the number of tokens in the conversation's prompt.
    """
    calls = [call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()]
    for index, edit in enumerate(body.context_management.edits):
        if isinstance(edit, ClearThinking):
            continue
        cleared = len([name for name in calls if name not in edit.exclude_tools]) - edit.keep.value
        size = len(calls) if edit.trigger.type == "tool_uses" else tokens
        if cleared > 0 and size > edit.trigger.value:
            where = f"context_management.edits[{index}]"
            raise RequestError(
                f"{where} would clear the results of {cleared} tool uses, but this server does not edit the history; "
                "leave the edit out, or send a shorter history",
                param=where,
            )


def _template_kwargs(body: CountBody, chat_format: ChatFormat) -> dict[str, Any]:
    """Variables for the chat template, from the request's effort and ``thinking``. Variables that the template does not
    have are left out. A thinking budget is not enforced."""
    kind, effort = body.thinking.type, chat_format.effort_kwargs(body.output_config.effort)
    if kind == "adaptive" or SWITCH_NAME not in str(chat_format.tokenizer.chat_template):
        return effort
    return {**effort, SWITCH_NAME: kind == "enabled"}


def _messages(message: UserMessage | AssistantMessage) -> list[Message]:
    """Convert a message of Anthropic to OpenAI's messages. Each result of a tool becomes one message. The user's text
    after the results becomes another message."""
    role, content = message.role, message.content
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    messages: list[Message] = []
    own: Message = {"role": role, "content": None}
    for block in content:
        if isinstance(block, ToolResult):
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)})
        elif isinstance(block, ToolUse):
            function = {"name": block.name, "arguments": json.dumps(block.input)}
            own.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, Thinking):
            own["reasoning_content"] = block.thinking
    texts = [block for block in content if isinstance(block, TextBlock)]
    if texts or role == "assistant" or not content:
        messages.append({**own, "content": _text(texts)})
    return messages


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _blocks(part: Part) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if part.thinking:
        blocks.append({"type": "thinking", "thinking": part.thinking, "signature": ""})
    if part.content:
        blocks.append({"type": "text", "text": part.content})
    for call in part.calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)})
    return blocks


def _end(turn: Turn, params: SamplingParams) -> dict[str, object]:
    """The reason why the turn ended. If a stop sequence ended the turn, the fields include this sequence."""
    if turn.finish_reason != "stop":
        return {"stop_reason": STOP_REASONS[turn.finish_reason], "stop_sequence": None}
    if turn.reply.tool_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    text = f"{turn.reply.reasoning or ''}{turn.reply.content}"
    hit = next((stop for stop in params.stop if stop in text), None)
    return {"stop_reason": "stop_sequence" if hit else "end_turn", "stop_sequence": hit}


def _usage(turn: Turn) -> dict[str, int]:
    cached = turn.cached_tokens
    counts = {"input_tokens": len(turn.prompt_ids) - cached, "output_tokens": len(turn.output_ids)}
    return {**counts, "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}


async def _stream(head: dict[str, Any], session: Session, planned: PlannedTurn) -> AsyncGenerator[bytes]:
    """Anthropic's events. A block stays open until a block of another kind begins. Each tool call is a separate
    block."""
    kind, index = "", -1
    fresh = {"input_tokens": len(planned[0].prompt_ids), "output_tokens": 0}
    start = {**head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": fresh}

    def event(name: str, **rest: object) -> bytes:
        return sse({"type": name, **rest}, name)

    async with aclosing(parts(session, [planned], stream=True)) as coming:
        async for part in coming:
            if part.first:
                yield event("message_start", message=start)
            for block in _blocks(part):
                new = block["type"]
                field, delta, key = DELTAS[new]
                if new != kind or new == "tool_use":
                    if kind:
                        yield event("content_block_stop", index=index)
                    kind, index = new, index + 1
                    empty = {**block, field: type(block[field])()}
                    yield event("content_block_start", index=index, content_block=empty)
                piece = json.dumps(block[field], ensure_ascii=False) if new == "tool_use" else block[field]
                yield event("content_block_delta", index=index, delta={"type": delta, key: piece})
    if kind:
        yield event("content_block_stop", index=index)
    yield event("message_delta", delta=_end(*planned), usage=_usage(planned[0]))
    yield event("message_stop")
