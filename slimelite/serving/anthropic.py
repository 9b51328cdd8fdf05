"""Anthropic's dialect: ``/v1/messages``, whole or as events, and ``/v1/messages/count_tokens``.

Tools and thinking of the model are blocks of their own. A conversation is turned into OpenAI's messages and goes
through the same session, so that both dialects may take turns in one.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from slimelite.base.http_server import Answer, RequestError, sse
from slimelite.engines.protocol import SamplingParams
from slimelite.serving.format import ChatFormat, Message
from slimelite.serving.messages import content_text
from slimelite.serving.openai import checked_messages, shown_tools
from slimelite.serving.replies import Asked, Model, Part, parts
from slimelite.serving.requests import (
    ANYTHING,
    COUNT,
    NUMBER,
    OBJECT,
    OBJECTS,
    SWITCH,
    TEXT,
    TEXTS,
    WHOLE,
    check_fields,
    sampling,
)
from slimelite.serving.sessions import Session, Turn

CONVERSATION = {"model": TEXT, "messages": OBJECTS, "system": ANYTHING, "tools": OBJECTS, "tool_choice": OBJECT}
CONVERSATION |= {"thinking": OBJECT, "output_config": OBJECT, "context_management": OBJECT}
# who asks, what it may cost, and what Anthropic's servers keep between requests: nobody reads them
CONVERSATION |= {"metadata": OBJECT, "cache_control": OBJECT, "betas": TEXTS}
CONVERSATION |= dict.fromkeys(("service_tier", "inference_geo", "speed"), TEXT)
FIELDS = CONVERSATION | {"max_tokens": COUNT, "temperature": NUMBER, "top_p": NUMBER, "top_k": WHOLE}
FIELDS |= {"stop_sequences": TEXTS, "stream": SWITCH}
# values that ask for nothing; of ``output_config`` the effort, which no chat template knows, but no format, which would
# be another answer
NEUTRAL: dict[str, Any] = {
    "mcp_servers": ([],),
    "output_config.effort": ("low", "medium", "high", "xhigh", "max"),
    "output_config.format": (),
}
# edits of ``context_management`` that take thinking, or results of tools, out of a long history; here all of it stays
CLEARS = re.compile(r"clear_(thinking|tool_uses)_\d{8}")
# what Anthropic takes for the trigger and for ``keep`` of an edit that clears results of tools and does not say them
CLEARING = {"trigger": {"type": "input_tokens", "value": 100_000}, "keep": {"type": "tool_uses", "value": 3}}
# the variable by which Qwen3's, GLM's and others' templates let a model think
SWITCH_NAME = "enable_thinking"
# value of ``thinking.type`` -> whether the model is to think; None: as its template has it
THINKING = {"enabled": True, "disabled": False, "adaptive": None}
STOP_REASONS = {"length": "max_tokens", "abort": "abort"}
# type of a block -> its field that comes in pieces; the type of a piece, and what its text is called there
DELTAS = {
    "thinking": ("thinking", "thinking_delta", "thinking"),
    "text": ("text", "text_delta", "text"),
    "tool_use": ("input", "input_json_delta", "partial_json"),
}


async def messages(model: Model, session: Session, body: Mapping[str, Any]) -> Answer:
    """``/v1/messages``."""
    check_fields(body, FIELDS, NEUTRAL)
    if body.get("max_tokens") is None:
        raise RequestError("max_tokens is required", param="max_tokens")
    one = (body.get("tool_choice") or {}).get("disable_parallel_tool_use") or False
    if not isinstance(one, bool):
        raise RequestError(f"disable_parallel_tool_use is true or false, not {one!r:.60}", param="tool_choice")
    said = _conversation(body)
    turn = session.turn(*said, _template_kwargs(body, session.format), one_call=one)
    _check_clears(body, said[0], len(turn.prompt_ids))
    asked = turn, sampling(body, session.defaults)
    head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model.name}
    if body.get("stream"):
        return _stream(head, session, asked)
    (part,) = [part async for part in parts(session, [asked], stream=False)]
    return {**head, "content": _blocks(part), **_end(*asked), "usage": _usage(turn)}


async def count_tokens(model: Model, session: Session, body: Mapping[str, object]) -> Answer:  # noqa: ARG001
    """``/v1/messages/count_tokens``."""
    check_fields(body, CONVERSATION, NEUTRAL)
    messages, tools, _ = _conversation(body)
    count = len(session.format.prompt(messages, tools, **_template_kwargs(body, session.format)))
    _check_clears(body, messages, count)
    return {"input_tokens": count}


def error_body(error: Exception, status: int) -> dict[str, object]:
    """Anthropic's JSON for an error."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
    kinds |= {429: "rate_limit_error", 529: "overloaded_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


def _conversation(body: Mapping[str, Any]) -> tuple[list[Message], list[dict[str, Any]] | None, list[str]]:
    """Messages and tools in OpenAI's form, and of which tools one must be called."""
    output = body.get("output_config") or {}
    check_fields({f"output_config.{name}": value for name, value in output.items()}, {}, NEUTRAL)
    for index, edit in enumerate(_edits(body)):
        kind = edit.get("type") if isinstance(edit, dict) else None
        if not CLEARS.fullmatch(str(kind)):
            raise RequestError(
                f"context_management.edits[{index}] of type {kind!r:.60} is not supported", param="context_management"
            )
    said: list[Message] = []
    if body.get("system"):
        said.append({"role": "system", "content": content_text(body["system"], "system")})
    if not body.get("messages"):
        raise RequestError("send messages: a list of at least one", param="messages")
    for index, message in enumerate(body["messages"]):
        said += checked_messages(_messages(message, f"messages[{index}]"), index)
    if said[-1]["role"] == "assistant":  # as newer models of theirs do; it would be a message of its own here
        raise RequestError(f"messages[{index}]: the assistant's reply cannot be begun for it", param="messages")
    tools = []
    for index, tool in enumerate(body.get("tools") or ()):
        if tool.get("type", "custom") != "custom":
            raise RequestError(f"tools[{index}]: tools of type {tool['type']!r:.60} are not supported", param="tools")
        function = {"name": tool.get("name"), "description": tool.get("description") or ""}
        function["parameters"] = tool.get("input_schema") or {}
        tools.append({"type": "function", "function": function})
    choice = body.get("tool_choice") or {"type": "auto"}
    kind = str(choice.get("type"))
    named = {"type": "function", "function": choice} if kind == "tool" else "required" if kind == "any" else kind
    return said, *shown_tools(tools, named)


def _check_clears(body: Mapping[str, Any], said: list[Message], tokens: int) -> None:
    """Refuse an edit that would clear results of tools, since the model would see them here.

    ``tokens``: those of the prompt of the conversation ``said``.
    """
    for index, edit in enumerate(_edits(body)):
        if not edit["type"].startswith("clear_tool_uses_"):
            continue
        where = f"context_management.edits[{index}]"
        trigger, keep = (_threshold(edit.get(name) or usual, f"{where}.{name}") for name, usual in CLEARING.items())
        calls = [call["function"]["name"] for message in said for call in message.get("tool_calls") or ()]
        excluded = edit["exclude_tools"] if isinstance(edit.get("exclude_tools"), list) else []
        cleared = len([name for name in calls if name not in excluded]) - keep["value"]
        size = len(calls) if trigger["type"] == "tool_uses" else tokens
        if cleared > 0 and size > trigger["value"]:
            raise RequestError(
                f"{where} would clear the results of {cleared} tool uses, and here a history stays as it is sent: "
                "leave the edit out, or send a shorter history",
                param=where,
            )


def _threshold(given: object, where: str) -> dict[str, Any]:
    if not isinstance(given, dict) or "type" not in given or not WHOLE.holds(given.get("value")):
        raise RequestError(f"{where} needs a type and a whole number as value", param=where)
    return given


def _edits(body: Mapping[str, Any]) -> list[Any]:
    """What ``context_management`` asks for."""
    edits = (body.get("context_management") or {}).get("edits")
    return edits if isinstance(edits, list) else []


def _template_kwargs(body: Mapping[str, Any], chat_format: ChatFormat) -> dict[str, Any]:
    """What ``thinking`` sets in the chat template, where that has a switch; nothing holds the model to a budget."""
    kind = (body.get("thinking") or {}).get("type", "adaptive")
    if kind not in list(THINKING):  # it may be anything that JSON has
        raise RequestError(f"thinking.type is one of {', '.join(THINKING)}, not {kind!r:.60}", param="thinking")
    wanted, template = THINKING[kind], str(chat_format.tokenizer.chat_template)
    return {} if wanted is None or SWITCH_NAME not in template else {SWITCH_NAME: wanted}


def _messages(message: Message, name: str) -> list[Message]:
    """A message of Anthropic's as OpenAI's: each result of a tool is one, and what the user says after them is one."""
    content, role = message.get("content"), message.get("role")
    if role not in ("user", "assistant", "system"):
        raise RequestError(f"{name} needs the role user or assistant, not {role!r:.60}", param=name)
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    found: list[Message] = []
    own: Message = {"role": role, "content": None}
    texts: list[str] = []
    for place, block in enumerate(content):
        where = f"{name}.content[{place}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            texts.append(content_text([block], where))
        elif kind == "tool_result" and role == "user":
            result = {"role": "tool", "tool_call_id": block.get("tool_use_id")}
            found.append({**result, "content": content_text(block.get("content"), where)})
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            own.setdefault("tool_calls", []).append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking" and role == "assistant":
            own["reasoning_content"] = block.get("thinking")
        else:
            raise RequestError(
                f"{where} is of type {kind!r:.60}, which a message of the {role} cannot have", param=name
            )
    if texts or role == "assistant" or not content:
        found.append({**own, "content": "".join(texts)})
    return found


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
    """Why the turn ended; a stop sequence is named."""
    if turn.finish_reason != "stop":
        return {"stop_reason": STOP_REASONS[turn.finish_reason], "stop_sequence": None}
    if turn.reply.tool_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    said = f"{turn.reply.reasoning or ''}{turn.reply.content}"
    hit = next((stop for stop in params.stop if stop in said), None)
    return {"stop_reason": "stop_sequence" if hit else "end_turn", "stop_sequence": hit}


def _usage(turn: Turn) -> dict[str, int]:
    cached = turn.cached_tokens
    counts = {"input_tokens": len(turn.prompt_ids) - cached, "output_tokens": len(turn.output_ids)}
    return {**counts, "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}


async def _stream(head: dict[str, Any], session: Session, asked: Asked) -> AsyncGenerator[bytes]:
    """Anthropic's events. A block is open until one of another kind begins; each call is one of its own."""
    kind, index = "", -1
    fresh = {"input_tokens": len(asked[0].prompt_ids), "output_tokens": 0}
    start = {**head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": fresh}

    def event(name: str, **rest: object) -> bytes:
        return sse({"type": name, **rest}, name)

    async with aclosing(parts(session, [asked], stream=True)) as coming:
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
    yield event("message_delta", delta=_end(*asked), usage=_usage(asked[0]))
    yield event("message_stop")
