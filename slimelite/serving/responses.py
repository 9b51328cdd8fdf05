"""OpenAI's Responses API: ``/v1/responses``, with complete answers or events. Answers are stored for
``previous_response_id``.

The items of a conversation are converted to the messages of a chat. All dialects use the same sessions, so their
requests may alternate in one session. The server cannot run OpenAI's own tools (a search, a code interpreter). The
model does not see these tools, and the field ``tools`` of an answer does not list them.
"""

from __future__ import annotations

import base64
import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from itertools import count
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter

from slimelite.base.http_body import FirstError, Shape, Text, unread, with_fields
from slimelite.base.http_server import Answer, RequestError, sse
from slimelite.engines.http_front import sampled
from slimelite.serving.calls import ToolCall
from slimelite.serving.format import ChatFormat, Message
from slimelite.serving.grammars import HeldBody, ResponseFormat, named_schema
from slimelite.serving.openai import checked_messages, held_params, shown_tools
from slimelite.serving.replies import Model, Part, PlannedTurn, parts
from slimelite.serving.sessions import Session, Turn
from slimelite.serving.stored import Record

# prefix of thinking in ``encrypted_content``, which clients send back; the thinking is packed but not encrypted
PACKED = "slimelite:"
# the parameters of a custom tool: only one text
INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
# memory that an item needs in addition to its JSON [characters]
ITEM_COSTS = 1000


class TextPart(Shape):
    type: Literal["input_text", "output_text", "summary_text", "reasoning_text", "text"]
    text: str


class Refusal(Shape):
    type: Literal["refusal"]
    refusal: str


TextParts = FirstError[list[Annotated[TextPart | Refusal, Field(discriminator="type")]]]


class MessageItem(Shape):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | TextParts


class CallItem(Shape):
    type: Literal["function_call"]
    call_id: Text
    namespace: Text = ""
    name: Text
    arguments: str


class CustomCallItem(Shape):
    type: Literal["custom_tool_call"]
    call_id: Text
    namespace: Text = ""
    name: Text
    input: str


class ResultItem(Shape):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Text
    output: str | TextParts


class ReasoningItem(Shape):
    type: Literal["reasoning"]
    summary: TextParts = Field(default_factory=list)
    content: TextParts = Field(default_factory=list)
    encrypted_content: Text = ""


class Reference(Shape):
    """A reference to an item of a stored answer."""

    type: Literal["item_reference"] = "item_reference"
    id: Text


def _kind(item: Any) -> Any:
    """The type of an item. Messages and references may have no type."""
    if not isinstance(item, dict):
        return getattr(item, "type", None)
    kind = item.get("type") or ("message" if "role" in item else "item_reference")
    return "function_call_output" if kind == "custom_tool_call_output" else kind


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[ResultItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[Reference, Tag("item_reference")],
    Discriminator(_kind),
]


class FunctionTool(Shape):
    type: Literal["function"]
    name: Text
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: bool = False


class Grammar(Shape):
    definition: str = ""


class CustomTool(Shape):
    """A tool with free text as its input. The model sees the grammar of this text, but the grammar is not enforced."""

    type: Literal["custom"]
    name: Text
    description: str = ""
    format: Grammar = Grammar()


class NamespaceTool(Shape):
    type: Literal["namespace"]
    name: Text
    tools: FirstError[list[Annotated[FunctionTool | CustomTool, Field(discriminator="type")]]]


class HostedTool(Shape):
    """A tool that OpenAI's servers run, such as ``web_search``. The model does not see such a tool."""

    type: Literal[
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
        "file_search",
        "code_interpreter",
        "image_generation",
        "mcp",
        "tool_search",
    ]


Tool = Annotated[FunctionTool | CustomTool | NamespaceTool | HostedTool, Field(discriminator="type")]


class TextConfig(Shape):
    format: ResponseFormat = ResponseFormat()


class Reasoning(Shape):
    effort: Text | None = None


@sampled("responses")
@with_fields(
    unread(
        *("user", "safety_identifier", "client_metadata", "service_tier", "stream_options", "max_tool_calls"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
        background=False,
        context_management=[],
        conversation=None,
        prompt=None,
        top_logprobs=0,
    )
)
class ResponsesBody(HeldBody):
    """``/v1/responses``."""

    model: Text = ""
    input: str | Annotated[list[Item], Field(min_length=1, fail_fast=True)]
    instructions: Text = ""
    previous_response_id: Text = ""
    tools: FirstError[list[Tool]] = Field(default_factory=list)
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    reasoning: Reasoning = Reasoning()
    text: TextConfig = TextConfig()
    # a client may request results of hosted tools, but this server has no such results
    include: FirstError[
        list[
            Literal[
                "reasoning.encrypted_content",
                "web_search_call.action.sources",
                "web_search_call.results",
                "code_interpreter_call.outputs",
                "computer_call_output.output.image_url",
                "file_search_call.results",
                "message.input_image.image_url",
            ]
        ]
    ] = Field(default_factory=list)
    # "auto" permits cutting a history that is too long for the context; this server always returns an error instead
    truncation: Literal["auto", "disabled"] = "disabled"
    metadata: dict[str, Any] = Field(default_factory=dict)
    store: bool = True
    stream: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    def response_schema(self) -> str | None:
        """See `HeldBody.response_schema`."""
        return named_schema(self.text.format, "text.format")


ITEM: TypeAdapter[Any] = TypeAdapter(Item)


async def respond(model: Model, session: Session, body: ResponsesBody) -> Answer:
    """``/v1/responses``."""
    owner = session.id if session in model.sessions else ""
    before = model.stored.items(owner, body.previous_response_id) if body.previous_response_id else []
    sent = [MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    sent = [model.stored.item(owner, item.id) if isinstance(item, Reference) else item for item in sent]
    tools = Tools(body.tools)
    shown, forced = shown_tools(tools.functions, tools.choice(body.tool_choice))
    kwargs = {**session.format.effort_kwargs(body.reasoning.effort), **body.chat_template_kwargs}
    messages = _messages(body.instructions, before, sent)
    turn = session.turn(messages, shown, forced, kwargs, one_call=not body.parallel_tool_calls)
    output = Output(tools, packs="reasoning.encrypted_content" in body.include)
    head = _head(model, body, tools)

    def done() -> dict[str, Any]:
        answer = {**head, **_end(turn), "output": output.items, "usage": _usage(turn, session.format)}
        if body.store:
            kept = {item["id"]: ITEM.validate_python(item) for item in output.items}
            size = len(json.dumps(answer)) + sum(len(item.model_dump_json()) + ITEM_COSTS for item in sent)
            model.stored.keep(Record(owner, body.previous_response_id, sent, kept, answer, size))
        return answer

    planned = turn, await held_params(model, session, body, forced)
    if body.stream:
        return _stream(session, planned, output, head, done)
    (part,) = [part async for part in parts(session, [planned], stream=False)]
    for _ in (*output.add(part), *output.end(turn)):
        pass
    return done()


def failed(error: dict[str, Any], written: int) -> bytes:
    """The event that ends a stream with an error of `slimelite.serving.openai`. ``written``: the number of events that
    were sent before."""
    code = error["code"] or error["type"]
    event = {"type": "error", "code": code, "message": error["message"], "param": error["param"]}
    return sse({**event, "sequence_number": written}, "error")


class Tools:
    """The tools of a request, both in the form of functions for the model and in the client's form.

    The model sees a tool of a namespace under the name ``namespace__name``. A tool with free text as its input is shown
    to the model as a function with one parameter.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.functions: list[dict[str, Any]] = []
        self.echo: list[dict[str, Any]] = []  # the tools that are not left out
        self._known: dict[str, tuple[str, FunctionTool | CustomTool]] = {}
        for tool in tools:
            if isinstance(tool, HostedTool):
                continue
            self.echo.append(tool.model_dump())
            if isinstance(tool, NamespaceTool):
                for one in tool.tools:
                    self._add(tool.name, one)
            else:
                self._add("", tool)

    def choice(self, choice: Any) -> Any:
        """``tool_choice`` in the form of chat completions."""
        if not isinstance(choice, dict) or choice.get("type") not in ("function", "custom"):
            return choice
        name = _shown_name(str(choice.get("namespace") or ""), str(choice.get("name")))
        return {"type": "function", "function": {"name": name}}

    def item(self, call: ToolCall) -> dict[str, Any]:
        """A tool call of the model, converted to an item."""
        namespace, tool = self._known.get(call.name, ("", None))
        own = {"name": tool.name, "namespace": namespace} if tool and namespace else {"name": call.name}
        if isinstance(tool, CustomTool):
            value = json.loads(call.arguments).get("input")
            text = value if isinstance(value, str) else call.arguments
            return {"type": "custom_tool_call", "id": _id("ctc"), "call_id": call.id, **own, "input": text}
        return {"type": "function_call", "id": _id("fc"), "call_id": call.id, **own, "arguments": call.arguments}

    def _add(self, namespace: str, tool: FunctionTool | CustomTool) -> None:
        name = _shown_name(namespace, tool.name)
        if name in self._known:
            raise RequestError(f"two tools are shown to the model as {name!r}; rename one of them", param="tools")
        self._known[name] = namespace, tool
        description, parameters = tool.description, INPUT
        if isinstance(tool, FunctionTool):
            parameters = tool.parameters
        elif tool.format.definition:
            description = f"{description}\nThe input has this grammar:\n{tool.format.definition}"
        function: dict[str, Any] = {"name": name, "description": description, "parameters": parameters}
        function |= {"strict": True} if isinstance(tool, FunctionTool) and tool.strict else {}
        self.functions.append({"type": "function", "function": function})


class Output:
    """The items of an answer, and the events that announce them. A text item is open until another item begins.

    ``packs``: whether items with thinking get the field ``encrypted_content``. Clients that store the whole
    conversation send this field back.
    """

    def __init__(self, tools: Tools, *, packs: bool) -> None:
        self.items: list[dict[str, Any]] = []
        self._tools, self._packs = tools, packs
        self._open = ""  # type of the open item

    def add(self, part: Part) -> Iterator[dict[str, Any]]:
        """The events for a new part of the reply."""
        for kind, text in (("reasoning", part.thinking), ("message", part.content)):
            if text:
                yield from self._text(kind, text)
        for call in part.calls:
            yield from self._call(call)

    def end(self, turn: Turn) -> Iterator[dict[str, Any]]:
        """The events for the end of the reply. A reply without content has an empty message."""
        if not any(item["type"] != "reasoning" for item in self.items):
            yield from self._text("message", "")
        yield from self._close("completed" if turn.finish_reason == "stop" else "incomplete")

    def _text(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        name = "output_text" if kind == "message" else "reasoning_text"
        if self._open != kind:
            yield from self._close("completed")
            self._open = kind
            item: dict[str, Any] = {"type": kind, "id": _id("rs"), "summary": [], "content": []}
            part: dict[str, Any] = {"type": name, "text": ""}
            if kind == "message":
                item = {"type": kind, "id": _id("msg"), "role": "assistant", "content": []}
                part |= {"annotations": [], "logprobs": []}
            self.items.append({**item, "status": "in_progress"})
            yield self._event("output_item.added", item=dict(self.items[-1]))
            self.items[-1]["content"] = [part]
            yield self._part_event("content_part.added", part=dict(part))
        if text:
            self.items[-1]["content"][0]["text"] += text
            yield self._part_event(f"{name}.delta", delta=text, **({"logprobs": []} if kind == "message" else {}))

    def _call(self, call: ToolCall) -> Iterator[dict[str, Any]]:
        yield from self._close("completed")
        item = self._tools.item(call)
        field, name = "arguments", "function_call_arguments"
        if item["type"] == "custom_tool_call":
            field, name = "input", "custom_tool_call_input"
        self.items.append({**item, "status": "completed"})
        yield self._event("output_item.added", item={**item, field: "", "status": "in_progress"})
        yield self._event(f"{name}.delta", item_id=item["id"], delta=item[field])
        yield self._event(f"{name}.done", item_id=item["id"], **{field: item[field]})
        yield self._event("output_item.done", item=self.items[-1])

    def _close(self, status: str) -> Iterator[dict[str, Any]]:
        if not self._open:
            return
        item, self._open = self.items[-1], ""
        (part,) = item["content"]
        rest: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
        yield self._part_event(f"{part['type']}.done", text=part["text"], **rest)
        yield self._part_event("content_part.done", part=dict(part))
        item["status"] = status
        if item["type"] == "reasoning" and self._packs:
            item["encrypted_content"] = PACKED + base64.b64encode(part["text"].encode(errors="replace")).decode()
        yield self._event("output_item.done", item=item)

    def _event(self, name: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"response.{name}", "output_index": len(self.items) - 1, **fields}

    def _part_event(self, name: str, **fields: Any) -> dict[str, Any]:
        return self._event(name, item_id=self.items[-1]["id"], content_index=0, **fields)


async def _stream(
    session: Session, planned: PlannedTurn, output: Output, head: dict[str, Any], done: Callable[[], dict[str, Any]]
) -> AsyncGenerator[bytes]:
    number = count()

    def event(name: str, **fields: Any) -> bytes:
        return sse({"type": name, **fields, "sequence_number": next(number)}, name)

    async with aclosing(parts(session, [planned], stream=True)) as coming:
        async for part in coming:
            if part.first:
                for state in ("created", "in_progress"):
                    yield event(f"response.{state}", response=head)
            for fields in output.add(part):
                yield event(fields.pop("type"), **fields)
    for fields in output.end(planned[0]):
        yield event(fields.pop("type"), **fields)
    answer = done()
    yield event(f"response.{answer['status']}", response=answer)


def _head(model: Model, body: ResponsesBody, tools: Tools) -> dict[str, Any]:
    """The fields of the answer before the reply begins."""
    head: dict[str, Any] = {"id": _id("resp"), "object": "response", "created_at": int(time.time())}
    head |= {"status": "in_progress", "model": body.model or model.name, "output": [], "usage": None}
    head |= dict.fromkeys(("error", "incomplete_details"))
    same = ("metadata", "parallel_tool_calls", "store", "tool_choice", "truncation")
    head |= {name: getattr(body, name) for name in same} | {"tools": tools.echo}
    head |= {name: getattr(body, name) or None for name in ("instructions", "previous_response_id")}
    head |= {name: getattr(body, name) for name in ("max_output_tokens", "temperature", "top_p")}
    return {
        **head,
        "reasoning": body.reasoning.model_dump(),
        "text": body.text.model_dump(by_alias=True, exclude_none=True),
    }


def _end(turn: Turn) -> dict[str, Any]:
    """The fields that describe how the reply ended."""
    if turn.finish_reason == "stop":
        return {"status": "completed"}
    reason = {"length": "max_output_tokens"}.get(turn.finish_reason, turn.finish_reason)
    return {"status": "incomplete", "incomplete_details": {"reason": reason}}


def _usage(turn: Turn, chat_format: ChatFormat) -> dict[str, Any]:
    """OpenAI's count of tokens. Thinking tokens are counted by encoding the text of the thinking."""
    read, written = len(turn.prompt_ids), len(turn.output_ids)
    thought = len(chat_format.encode(turn.reply.reasoning or ""))
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": turn.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": min(thought, written)},
        "total_tokens": read + written,
    }


def _messages(instructions: str, before: Sequence[Any], sent: Sequence[Any]) -> list[Message]:
    """The messages of a chat. System messages at the beginning are joined into one, because many templates show only
    the first.

    Thinking, text and calls of the assistant form one message if no other message is between them.
    """
    system = [instructions] if instructions else []
    messages: list[Message] = []
    own: Message = {}  # the last message, if the next item may extend it
    for place, item in enumerate((*before, *sent), -len(before)):
        new = _message(item, f"input[{place}]")
        if new["role"] in ("system", "developer") and not messages:
            system.append(new["content"])
        elif new["role"] == "assistant" and own and not own.keys() & _later(new):
            calls = own.setdefault("tool_calls", [])
            calls += new.pop("tool_calls", ())
            own |= new
        else:
            messages.append(new)
            own = new if new["role"] == "assistant" else {}
    messages = [{"role": "system", "content": "\n\n".join(system)}, *messages] if system else messages
    return [{"content": None, **message} for message in messages]


def _later(new: Message) -> set[str]:
    """The parts that an assistant's message must not have yet if ``new`` extends the message. Thinking comes first, and
    calls come last."""
    if "reasoning_content" in new:
        return {"reasoning_content", "content", "tool_calls"}
    return {"content"} if "content" in new else set()


def _message(item: Any, name: str) -> Message:
    """Convert an item to a message. ``name``: the name of the item in errors."""
    if isinstance(item, ReasoningItem):
        thinking = _thinking(item, name)
        return {"role": "assistant", **({"reasoning_content": thinking} if thinking else {})}
    if isinstance(item, ResultItem):
        message: Message = {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
    elif isinstance(item, MessageItem):
        message = {"role": item.role, "content": _text(item.content)}
    else:
        arguments = item.arguments if isinstance(item, CallItem) else json.dumps({"input": item.input})
        function = {"name": _shown_name(item.namespace, item.name), "arguments": arguments}
        message = {"role": "assistant", "tool_calls": [{"id": item.call_id, "type": "function", "function": function}]}
    checked_messages([message], name)
    return message


def _thinking(item: ReasoningItem, name: str) -> str:
    """The text of the thinking. Thinking that this server packed is unpacked."""
    if item.encrypted_content.startswith(PACKED):
        with suppress(ValueError):
            return base64.b64decode(item.encrypted_content.removeprefix(PACKED), validate=True).decode()
    else:
        text = _text(item.content) or _text(item.summary)
        if text or not item.encrypted_content:
            return text
    raise RequestError(
        f"{name}.encrypted_content was not packed by this server; leave it out, or send the thinking as content",
        param=f"{name}.encrypted_content",
        code="invalid_encrypted_content",
    )


def _text(content: str | Sequence[TextPart | Refusal]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)


def _shown_name(namespace: str, name: str) -> str:
    return f"{namespace}__{name}" if namespace else name


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
