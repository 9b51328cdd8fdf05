"""OpenAI's dialect: ``/v1/chat/completions``, ``/v1/completions`` and ``/v1/models``.

What OpenAI's documentation leaves open: the log-probs of sampled tokens, and their alternatives, are of the
distribution that was sampled from, with temperature 1 in place of 0; those of a prompt (``echo``) are at temperature 1.
Any name of a model is answered. Beyond OpenAI's parameters there are ``top_k``, ``min_tokens``, ``stop_token_ids``,
``ignore_eos``, ``chat_template_kwargs`` and ``return_token_ids``.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from slimelite.base.http_server import Answer, RequestError, sse
from slimelite.base.text import is_text
from slimelite.data.messages import BadCell, read_messages
from slimelite.engines.protocol import SamplingParams
from slimelite.serving.choices import ChatChoices, Choices, TextChoices, usage
from slimelite.serving.format import ChatFormat, Message
from slimelite.serving.messages import content_text
from slimelite.serving.replies import Asked, Model, parts
from slimelite.serving.requests import (
    ALTERNATIVES,
    ANYTHING,
    CHOICES,
    OBJECT,
    OBJECTS,
    SAMPLING,
    SWITCH,
    TEXT,
    WHOLE,
    Anything,
    check_fields,
    sampling,
)
from slimelite.serving.sessions import Session, Turn

COMMON = {name: kind for name, (kind, _) in SAMPLING.items() if name != "stop_sequences"}
COMMON |= {"model": TEXT, "n": CHOICES, "stream": SWITCH, "stream_options": OBJECT, "return_token_ids": SWITCH}
CHAT = COMMON | {"messages": OBJECTS, "tools": OBJECTS, "tool_choice": ANYTHING, "response_format": OBJECT}
CHAT |= {"logprobs": SWITCH, "top_logprobs": ALTERNATIVES, "chat_template_kwargs": OBJECT}
CHAT |= {"parallel_tool_calls": SWITCH}
COMPLETION = COMMON | {"prompt": ANYTHING, "echo": SWITCH, "logprobs": ALTERNATIVES, "max_tokens": WHOLE}
ROLES = ("system", "developer", "user", "assistant", "tool")


# fields that are not read, and the values that ask for nothing
NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_p"), (0,)),
    "repetition_penalty": (1,),
    "best_of": (1,),
    "logit_bias": ({},),
    "suffix": ("",),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
    **dict.fromkeys(("user", "metadata", "store", "service_tier", "safety_identifier"), Anything()),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention"), Anything()),
}
COMPLETION_TOKENS = 16  # OpenAI's default
# most responses to one request, to all of its prompts together
MOST_RESPONSES = 4096
# most log-probs in one answer, those of alternatives included: about 100 MB of memory
MOST_LOG_PROBS = 1 << 19


async def chat(model: Model, session: Session, body: Mapping[str, Any]) -> Answer:
    """``/v1/chat/completions``."""
    check_fields(body, CHAT, NEUTRAL)
    messages = checked_messages(body.get("messages"))
    tools, forced = shown_tools(body.get("tools"), body.get("tool_choice"))
    top = body.get("top_logprobs") or 0
    if top and not body.get("logprobs"):
        raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
    schema = _schema(body.get("response_format"))
    if schema is not None and not (info := await model.engine.info()).schemas:
        raise RequestError(f"the {info.name} engine holds no reply to a JSON schema", param="response_format")
    # a call that is asked for is no answer that has the form
    params = replace(sampling(body, session.defaults), json_schema=None if forced else schema)
    kwargs = body.get("chat_template_kwargs") or {}
    if "chat_template" in kwargs:  # a template is a program, which could stop the server, or a run, for everybody
        raise RequestError("a request cannot bring a chat_template of its own", param="chat_template_kwargs")
    one = body.get("parallel_tool_calls") is False
    asked = [
        (session.turn(messages, tools, forced, kwargs, one_call=one), _seeded(params, copy))
        for copy in range(body.get("n") or 1)
    ]
    choices = ChatChoices(model.engine, session.format, body, params, top if body.get("logprobs") else None)
    return await _answer(model, session, body, asked, choices)


async def complete(model: Model, session: Session, body: Mapping[str, Any]) -> Answer:
    """``/v1/completions``."""
    check_fields(body, COMPLETION, NEUTRAL)
    prompts, copies = _prompts(body.get("prompt"), session.format), body.get("n") or 1
    wanted = body.get("max_tokens")
    wanted = COMPLETION_TOKENS if wanted is None else wanted
    if wanted < 0 or (wanted == 0 and not body.get("echo")):
        raise RequestError("max_tokens must be at least 1, or 0 with echo", param="max_tokens")
    if len(prompts) * copies > MOST_RESPONSES:
        raise RequestError(f"a request may ask for {MOST_RESPONSES} responses; send several", param="prompt")
    if (top := body.get("logprobs")) is not None:
        tokens = sum(wanted + len(prompt) * bool(body.get("echo")) for prompt in prompts)
        entries = tokens * copies * (1 + top)
        if entries > MOST_LOG_PROBS:
            message = f"this asks for {entries} log-probs; a request may ask for {MOST_LOG_PROBS}; send several"
            raise RequestError(message, param="logprobs")
    params = sampling({**body, "max_tokens": wanted or None}, session.defaults)
    asked = [
        # nothing is sampled after a prompt that is only scored
        (session.raw_turn(prompt) if wanted else Turn(0, None, (), "", prompt, finish_reason="length"), given)
        for prompt in prompts
        for given in (_seeded(params, copy) for copy in range(copies))
    ]
    choices = TextChoices(model.engine, session.format, body, params, body.get("logprobs"))
    return await _answer(model, session, body, asked, choices)


async def models(model: Model) -> dict[str, Any]:
    """Answers ``/v1/models``: the one model that is served. ``max_model_len``, a name of vLLM's, is the length of its
    context in tokens.
    """
    info = await model.engine.info()
    own = {"id": model.name, "object": "model", "created": model.created, "owned_by": "slimelite"}
    return {"object": "list", "data": [{**own, "max_model_len": info.max_context_len}]}


def error_body(error: Exception, status: int) -> dict[str, object]:
    """OpenAI's JSON for an error."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}


def checked_messages(messages: Any, index: int | None = None) -> list[Message]:
    """The messages of a request, if they are what a chat template can be shown.

    ``index``: the place in the request of the message that all of them come from.

    Raises:
        RequestError: there are none, or one has no role, nothing to show, or calls that are none.
    """
    if not messages:
        raise RequestError("send messages: a list of at least one", param="messages")
    for number, message in enumerate(messages):
        name = f"messages[{number if index is None else index}]"
        calls = message.get("tool_calls") or []
        named = isinstance(calls, list) and all(_is_call(call) for call in calls)
        if message.get("role") not in ROLES or not named:
            raise RequestError(
                f"{name} needs a role, one of {', '.join(ROLES)}; its tool_calls are functions with a name "
                "and arguments, if it has any",
                param=name,
            )
        try:
            content_text(message.get("content"), f"{name}.content")
            read_messages([message])
        except BadCell as error:  # it speaks of the column of a file
            problem = error.problem.removeprefix("message 0").removeprefix(":").strip()
            raise RequestError(f"{name} {problem}", param=name) from error
        except ValueError as error:
            raise RequestError(str(error), param=f"{name}.content") from error
    return list(messages)


def shown_tools(tools: list[dict[str, Any]] | None, choice: object) -> tuple[list[dict[str, Any]] | None, list[str]]:
    """The tools that the model is shown, none with ``tool_choice`` "none", and of which it must call one.

    Raises:
        RequestError: a tool is no function, or the choice is none of OpenAI's or of no tool.
    """
    names = []
    for index, tool in enumerate(tools or ()):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict) or not is_text(function.get("name")):
            raise RequestError(f"tools[{index}] must be a function with a name", param=f"tools[{index}]")
        names.append(function["name"])
    if choice in (None, "auto", "none"):
        return None if choice == "none" else tools or None, []
    one = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    forced = names if choice == "required" else [n for n in names if isinstance(one, dict) and n == one.get("name")]
    if not forced:
        raise RequestError(
            "tool_choice must be none, auto, required (Anthropic: any), or one of the tools, which are "
            f"{', '.join(names) or 'missing'}",
            param="tool_choice",
        )
    return tools, forced


def _is_call(call: object) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _schema(response_format: dict[str, object] | None) -> str | None:
    kind = (response_format or {}).get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return json.dumps({"type": "object"})
    found = (response_format or {}).get("json_schema")
    if kind != "json_schema" or not isinstance(found, dict) or not isinstance(found.get("schema"), dict):
        raise RequestError("response_format is text, json_object or json_schema with a schema", param="response_format")
    return json.dumps(found["schema"])


def _seeded(params: SamplingParams, copy: int) -> SamplingParams:
    """Several responses to one seed get one each."""
    return params if params.seed is None else replace(params, seed=params.seed + copy)


def _prompts(prompt: object, chat_format: ChatFormat) -> list[list[int]]:
    """Each prompt of ``/v1/completions`` as token ids: a text, several, token ids, or several lists of them."""
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and type(prompt[0]) is int):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise RequestError("prompt must be a text, token ids, or a list of either", param="prompt")
    found = [chat_format.encode_text(one) if isinstance(one, str) else one for one in prompt]
    if not all(isinstance(ids, list) and ids and all(type(token) is int for token in ids) for ids in found):
        raise RequestError("each prompt must be a text or a list of token ids, not empty", param="prompt")
    return found


async def _answer(
    model: Model, session: Session, body: Mapping[str, object], asked: Sequence[Asked], choices: Choices
) -> Answer:
    """Sample what is asked, and answer with one choice each, whole or as a stream."""
    head = {"id": f"{choices.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model.name}
    if body.get("stream"):
        return _stream(head, session, body, asked, choices)
    async with aclosing(parts(session, asked, stream=False)) as coming:
        said = {part.index: await choices.whole(part) async for part in coming}
    counts = usage([turn for turn, _ in asked])
    return {**head, "object": choices.kind, "choices": [said[i] for i in range(len(asked))], "usage": counts}


async def _stream(
    head: dict[str, Any], session: Session, body: Mapping[str, Any], asked: Sequence[Asked], choices: Choices
) -> AsyncGenerator[bytes]:
    counts = (body.get("stream_options") or {}).get("include_usage")
    rest: dict[str, Any] = {"usage": None} if counts else {}
    head = {**head, "object": choices.chunk}
    async with aclosing(parts(session, asked, stream=not choices.wait)) as coming:
        async for part in coming:
            for chunk in await choices.chunks(part):
                yield sse({**head, "choices": [chunk], **rest})
    if counts:
        yield sse({**head, "choices": [], "usage": usage([turn for turn, _ in asked])})
    yield sse("[DONE]")
