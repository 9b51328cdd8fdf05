"""OpenAI's dialect: ``/v1/chat/completions``, ``/v1/completions`` and ``/v1/models``.

OpenAI's documentation does not define the temperature of log-probs. For sampled tokens and their alternatives, this
server reports log-probs of the distribution that was sampled from. If the temperature is 0, it reports log-probs at
temperature 1. Log-probs of a prompt (``echo``) are always at temperature 1. Any model name is accepted. These
parameters are additions to OpenAI's: ``top_k``, ``min_tokens``, ``stop_token_ids``, ``ignore_eos``,
``repetition_penalty``, ``chat_template_kwargs``, ``continue_final_message``, ``return_token_ids`` and the grammars of
`HeldBody`.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from slimelite.base.http_body import Ids, Like, Shape, Text, unread, with_fields
from slimelite.base.http_server import Answer, RequestError, sse
from slimelite.data.messages import BadCell, read_messages
from slimelite.engines.http_front import sampled
from slimelite.engines.params import GRAMMARS
from slimelite.engines.protocol import SamplingParams, Scores
from slimelite.engines.sampling import Generating
from slimelite.serving.format import ChatFormat, Message, content_text
from slimelite.serving.grammars import HeldBody, ResponseFormat, named_schema
from slimelite.serving.replies import Model, Part, PlannedTurn, parts
from slimelite.serving.sessions import Session, Turn

# the most choices for one prompt (``n``)
MOST_CHOICES = 128
# the most alternatives per token that a request may ask for
MOST_ALTERNATIVES = 20
COMPLETION_TOKENS = 16  # OpenAI's default
# the most responses to one request, summed over all its prompts
MOST_RESPONSES = 4096
# the most log-probs in one answer, including the log-probs of alternatives; this number takes about 100 MB of memory
MOST_LOG_PROBS = 1 << 19


class Function(Shape):
    name: Text


class Tool(Shape):
    type: Literal["function"]
    function: Function


class Call(Shape):
    function: Function


class ChatMessage(Shape):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: list[Call] = Field(default_factory=list, fail_fast=True)


class StreamOptions(Shape):
    include_usage: bool = False


@sampled("openai")
@with_fields(
    unread(
        *("user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention"),
        best_of=1,
        suffix="",
        modalities=["text"],
        skip_special_tokens=True,
    )
)
class CommonBody(HeldBody):
    model: Text = ""
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False


class ChatBody(CommonBody):
    """``/v1/chat/completions``."""

    messages: list[Annotated[dict[str, Any], Like(ChatMessage)]] = Field(min_length=1, fail_fast=True)
    tools: list[Annotated[dict[str, Any], Like(Tool)]] = Field(default_factory=list, fail_fast=True)
    tool_choice: Any = None
    response_format: ResponseFormat = ResponseFormat()
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_ALTERNATIVES)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    parallel_tool_calls: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool = True

    def response_schema(self) -> str | None:
        """See `HeldBody.response_schema`."""
        return named_schema(self.response_format, "response_format")


class CompletionBody(CommonBody):
    """``/v1/completions``. ``prompt`` is one text, several texts, token ids, or several lists of token ids."""

    prompt: str | Annotated[Ids | list[Ids | str], Field(min_length=1)]
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MOST_ALTERNATIVES)
    max_tokens: int | None = Field(None, ge=0)
    max_completion_tokens: int | None = Field(None, ge=0)

    def prompts(self, chat_format: ChatFormat) -> list[list[int]]:
        """Each prompt as token ids."""
        prompts: Any = self.prompt
        if isinstance(prompts, str) or isinstance(prompts[0], int):
            prompts = [prompts]
        encoded = [chat_format.encode_text(one) if isinstance(one, str) else one for one in prompts]
        if not all(encoded):
            raise RequestError("a prompt must not be empty", param="prompt")
        return encoded


async def chat(model: Model, session: Session, body: ChatBody) -> Answer:
    """``/v1/chat/completions``."""
    messages = checked_messages(body.messages)
    tools, forced = shown_tools(body.tools, body.tool_choice)
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
    params = await held_params(model, session, body, forced)
    kwargs = {**session.format.effort_kwargs(body.reasoning_effort), **body.chat_template_kwargs}
    if not (body.add_generation_prompt or body.continue_final_message):
        raise RequestError(
            "add_generation_prompt=false needs continue_final_message=true", param="add_generation_prompt"
        )
    if "chat_template" in kwargs:  # a template is a program that could block the server, or a run, for all clients
        raise RequestError("a request cannot contain its own chat_template", param="chat_template_kwargs")
    how = {"one_call": not body.parallel_tool_calls, "goes_on": body.continue_final_message}
    planned = [(session.turn(messages, tools, forced, kwargs, **how), _seeded(params, copy)) for copy in range(body.n)]
    top = body.top_logprobs if body.logprobs else None
    choices = ChatChoices(model.engine, session.format, params, top, ids=body.return_token_ids)
    return await _answer(model, session, body, planned, choices)


async def held_params(model: Model, session: Session, body: HeldBody, forced: Sequence[str] = ()) -> SamplingParams:
    """The sampling parameters of a body. ``forced``: names of tools; if given, the reply must call one of them.

    Raises:
        RequestError: the engine cannot enforce a grammar.
    """
    params = body.params(session.defaults)
    if params.guided and not (info := await model.engine.info()).schemas:
        raise RequestError(f"the {info.name} engine cannot enforce schemas or other grammars")
    # a forced call is not an answer, so the grammar for answers does not apply to the call
    none: dict[str, Any] = dict.fromkeys(GRAMMARS)
    return replace(params, **none) if forced else params


async def complete(model: Model, session: Session, body: CompletionBody) -> Answer:
    """``/v1/completions``."""
    prompts = body.prompts(session.format)
    limits = (body.max_completion_tokens, body.max_tokens, COMPLETION_TOKENS)
    wanted = next(limit for limit in limits if limit is not None)
    if wanted == 0 and not body.echo:
        raise RequestError("max_tokens must be at least 1, or 0 with echo", param="max_tokens")
    if len(prompts) * body.n > MOST_RESPONSES:
        raise RequestError(f"the limit is {MOST_RESPONSES} responses; send several requests", param="prompt")
    if body.logprobs is not None:
        tokens = sum(wanted + len(prompt) * body.echo for prompt in prompts)
        entries = tokens * body.n * (1 + body.logprobs)
        if entries > MOST_LOG_PROBS:
            message = f"{entries} log-probs are too many: the limit is {MOST_LOG_PROBS}; send several requests"
            raise RequestError(message, param="logprobs")
    params = await held_params(model, session, body)
    params = replace(params, max_new_tokens=wanted or session.defaults.max_new_tokens)
    planned = [
        # if a prompt is only scored, nothing is sampled after it
        (session.raw_turn(prompt) if wanted else Turn(0, None, (), "", prompt, finish_reason="length"), seeded)
        for prompt in prompts
        for seeded in (_seeded(params, copy) for copy in range(body.n))
    ]
    choices = TextChoices(
        model.engine, session.format, params, body.logprobs, ids=body.return_token_ids, echo=body.echo
    )
    return await _answer(model, session, body, planned, choices)


async def models(model: Model) -> dict[str, Any]:
    """The answer to ``/v1/models``, with the one model that is served. ``max_model_len`` (vLLM's name) is the length of
    the model's context in tokens. slimelite adds the fields ``chats`` and ``sampling``. ``chats``: whether the model
    has a chat template; without a template, the model only continues texts. ``sampling``: the default sampling
    parameters of a request.
    """
    info = await model.engine.info()
    own = {"id": model.name, "object": "model", "created": model.created, "owned_by": "slimelite"}
    chats = bool(model.sessions.format.tokenizer.chat_template)
    defaults = model.sessions.defaults
    sampling = {name: getattr(defaults, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    return {
        "object": "list",
        "data": [{**own, "max_model_len": info.max_context_len, "chats": chats, "sampling": sampling}],
    }


def error_body(error: Exception, status: int) -> dict[str, object]:
    """OpenAI's JSON for an error."""
    kinds = {403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    codes = {429: "rate_limit_exceeded", 503: "service_unavailable"}
    param, code = getattr(error, "param", None), getattr(error, "code", None) or codes.get(status)
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}


def checked_messages(messages: Sequence[Message], place: str = "") -> list[Message]:
    """The messages of a request, after a check that a chat template can show them.

    ``place``: the field of the request that all messages come from; errors name this field.

    Raises:
        RequestError: a message has no content that can be shown, or the arguments of a call are not JSON.
    """
    for number, message in enumerate(messages):
        name = place or f"messages[{number}]"
        try:
            content_text(message.get("content"), f"{name}.content")
            read_messages([message])
        except BadCell as error:  # the error names the column of a file
            problem = error.problem.removeprefix("message 0").removeprefix(":").strip()
            raise RequestError(f"{name} {problem}", param=name) from error
        except ValueError as error:
            raise RequestError(str(error), param=f"{name}.content") from error
    return list(messages)


def shown_tools(tools: list[dict[str, Any]], choice: object) -> tuple[list[dict[str, Any]] | None, list[str]]:
    """Returns the tools that the model sees, and a list of names. The reply must call one of the tools in this list.
    The list is empty if the reply need not call a tool. If ``tool_choice`` is "none", the model sees no tools.

    Raises:
        RequestError: ``choice`` is not one of OpenAI's values of ``tool_choice``, or names an unknown tool.
    """
    names = [tool["function"]["name"] for tool in tools]
    if choice in (None, "auto", "none"):
        return None if choice == "none" else tools or None, []
    one = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    forced = names if choice == "required" else [n for n in names if isinstance(one, dict) and n == one.get("name")]
    if not forced:
        raise RequestError(
            "tool_choice must be none, auto, required (Anthropic: any), or one of the request's tools "
            f"({', '.join(names) or 'it has none'})",
            param="tool_choice",
        )
    return tools, forced


def _seeded(params: SamplingParams, copy: int) -> SamplingParams:
    """The parameters of response number ``copy``. If ``params`` has a seed, each response gets a different seed."""
    return params if params.seed is None else replace(params, seed=params.seed + copy)


async def _answer(
    model: Model, session: Session, body: CommonBody, planned: Sequence[PlannedTurn], choices: Choices
) -> Answer:
    """Sample the planned turns. The answer has one choice for each turn. The answer is complete or a stream."""
    head = {"id": f"{choices.prefix}-{uuid.uuid4().hex}", "created": int(time.time())}
    head["model"] = body.model or model.name
    if body.stream:
        return _stream(head, session, body, planned, choices)
    async with aclosing(parts(session, planned, stream=False)) as coming:
        written = {part.index: await choices.whole(part) async for part in coming}
    counts = usage([turn for turn, _ in planned])
    return {**head, "object": choices.kind, "choices": [written[i] for i in range(len(planned))], "usage": counts}


async def _stream(
    head: dict[str, Any], session: Session, body: CommonBody, planned: Sequence[PlannedTurn], choices: Choices
) -> AsyncGenerator[bytes]:
    counts = body.stream_options.include_usage
    rest: dict[str, Any] = {"usage": None} if counts else {}
    head = {**head, "object": choices.chunk}
    async with aclosing(parts(session, planned, stream=not choices.wait)) as coming:
        async for part in coming:
            for chunk in await choices.chunks(part):
                yield sse({**head, "choices": [chunk], **rest})
    if counts:
        yield sse({**head, "choices": [], "usage": usage([turn for turn, _ in planned])})
    yield sse("[DONE]")


# the likeliest tokens at one position, as (token, log-prob)
Top = Sequence[tuple[int, float]]


class Choices(ABC):
    """The choices of one request.

    ``kind``: the type name of a complete answer. ``chunk``: the type name of a part of a stream. ``prefix``: the
    beginning of the ids of answers. ``alternatives``: the number of alternatives for each token; None: no log-probs are
    requested. ``ids``: whether token ids are requested. ``echo``: whether the prompt is requested.
    """

    kind: str
    chunk: str
    prefix: str

    def __init__(
        self,
        engine: Generating,
        chat_format: ChatFormat,
        params: SamplingParams,
        alternatives: int | None,
        *,
        ids: bool,
        echo: bool = False,
    ) -> None:
        self._engine, self._format = engine, chat_format
        self._temperature = params.temperature or 1.0
        self._alternatives = alternatives
        self._ids, self._echo = ids, echo
        self._offsets: dict[int, int] = {}  # index of a response -> number of characters of its tokens so far

    @property
    def wait(self) -> bool:
        """Whether tokens are sent only after the response has ended. Their alternatives are computed at that time."""
        return bool(self._alternatives) or (self._alternatives is not None and self._echo)

    @abstractmethod
    async def whole(self, part: Part) -> dict[str, object]:
        """The choice for a complete response."""

    @abstractmethod
    async def chunks(self, part: Part) -> list[dict[str, object]]:
        """The choices for the next chunks of a stream."""

    def _end(self, part: Part) -> dict[str, object]:
        """The last fields of a response: the finish reason, and the token ids if requested."""
        ids = {"token_ids": part.turn.output_ids, "prompt_token_ids": part.turn.prompt_ids}
        return {"finish_reason": finish_reason(part.turn), **(ids if self._ids else {})}

    async def _score(self, ids: Sequence[int], start: int, temperature: float) -> Scores:
        """The engine's scores, if it supports them."""
        info = await self._engine.info()
        if not info.scores:
            raise RequestError(f"the {info.name} engine returns log-probs only for sampled tokens", param="logprobs")
        return await self._engine.score(ids, start, temperature, self._alternatives or 0)

    async def _alternatives_of(self, turn: Turn) -> list[list[tuple[int, float]]]:
        """For each sampled token, the likeliest tokens at its position, if requested."""
        if not self._alternatives or not turn.output_ids:
            return []
        return (await self._score(turn.token_ids, len(turn.prompt_ids), self._temperature)).top


class ChatChoices(Choices):
    kind, chunk, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    async def whole(self, part: Part) -> dict[str, object]:
        """See `Choices.whole`."""
        message = {"refusal": None, **part.turn.reply.message()}
        if message["content"]:
            message["content"] = part.content  # without its stop string
        return {"index": part.index, "message": message, "logprobs": await self._log_probs(part), **self._end(part)}

    async def chunks(self, part: Part) -> list[dict[str, object]]:
        """See `Choices.chunks`."""
        chunks: list[dict[str, object]] = []
        if part.first:
            chunks.append({"delta": {"role": "assistant", "content": ""}})
        text = {"reasoning_content": part.thinking, "content": part.content}
        text = {name: new for name, new in text.items() if new}
        log_probs = await self._log_probs(part) if part.ids else None
        if text or log_probs:
            chunks.append({"delta": text, "logprobs": log_probs})
        if part.calls:
            calls = part.turn.reply.message()["tool_calls"]
            chunks.append({"delta": {"tool_calls": [{"index": index, **call} for index, call in enumerate(calls)]}})
        if part.ended:
            chunks.append({"delta": {}, "logprobs": None, **self._end(part)})
        return [{"index": part.index, "finish_reason": None, **chunk} for chunk in chunks]

    async def _log_probs(self, part: Part) -> dict[str, object] | None:
        """Log-probs of all tokens of the part, including the tokens outside the content."""
        if self._alternatives is None:
            return None
        tops: Sequence[Top] = await self._alternatives_of(part.turn) or [()] * len(part.ids)
        named = zip(part.ids, part.log_probs, tops, strict=True)
        entries = [
            {**self._named(token, log_prob), "top_logprobs": [self._named(*one) for one in top]}
            for token, log_prob, top in named
        ]
        return {"content": entries, "refusal": None}

    def _named(self, token: int, log_prob: float) -> dict[str, object]:
        text = self._format.decode([token])
        # a token may be only a part of a character, and then it has no text
        return {"token": text, "logprob": log_prob, "bytes": None if "�" in text else list(text.encode())}


class TextChoices(Choices):
    kind, chunk, prefix = "text_completion", "text_completion", "cmpl"

    async def whole(self, part: Part) -> dict[str, object]:
        """See `Choices.whole`. Each part of a streamed response has the same form as a whole response."""
        text = self._format.decode(part.turn.prompt_ids) + part.content if self._echo and part.first else part.content
        log_probs = await self._log_probs(part) if self._alternatives is not None and (part.ids or part.first) else None
        end = self._end(part) if part.ended else {"finish_reason": None}
        return {"index": part.index, "text": text, "logprobs": log_probs, **end}

    async def chunks(self, part: Part) -> list[dict[str, object]]:
        """See `Choices.chunks`."""
        return [await self.whole(part)]

    async def _log_probs(self, part: Part) -> dict[str, object]:
        """Log-probs of the prompt at temperature 1 (``echo``), and of the output as it was sampled."""
        tops: list[Top | None] = []
        if not self._echo:
            tops += await self._alternatives_of(part.turn)
            return self._columns(part.index, part.ids, part.log_probs, tops)
        whole, start = part.turn.token_ids, len(part.turn.prompt_ids)
        at_one = await self._score(whole, 1, 1.0) if len(whole) > 1 else Scores([], [])
        if self._alternatives:
            sampled = at_one.top[start - 1 :] if self._temperature == 1 else await self._alternatives_of(part.turn)
            tops = [None, *at_one.top[: start - 1], *sampled]
        return self._columns(part.index, whole, [None, *at_one.log_probs[: start - 1], *part.log_probs], tops)

    def _columns(
        self, index: int, ids: Sequence[int], log_probs: Sequence[float | None], tops: Sequence[Top | None]
    ) -> dict[str, object]:
        texts = [self._format.decode([token]) for token in ids]
        offsets = [self._offsets.get(index, 0)]
        for text in texts:
            offsets.append(offsets[-1] + len(text))
        self._offsets[index] = offsets[-1]
        named: list[dict[str, float] | None] | None = None
        if self._alternatives:
            named = []
            for text, log_prob, top in zip(texts, log_probs, tops, strict=True):
                # if two tokens have the same text, the likelier token counts
                likely = {self._format.decode([token]): value for token, value in reversed(top or ())}
                named.append(None if log_prob is None else {text: log_prob, **likely})
        return {"tokens": texts, "token_logprobs": list(log_probs), "top_logprobs": named, "text_offset": offsets[:-1]}


def finish_reason(turn: Turn) -> str:
    """OpenAI's name for the reason why a turn ended; "abort" if a client ended it."""
    return "tool_calls" if turn.reply.tool_calls and turn.finish_reason == "stop" else turn.finish_reason


def usage(turns: Sequence[Turn]) -> dict[str, object]:
    """OpenAI's count of tokens. If several responses share a prompt, the prompt counts once."""
    cached: dict[tuple[int, ...], int] = {}
    for turn in turns:
        prompt = tuple(turn.prompt_ids)
        cached[prompt] = min(cached.get(prompt, len(prompt)), turn.cached_tokens)
    read, written = sum(map(len, cached)), sum(len(turn.output_ids) for turn in turns)
    counts = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    return {**counts, "prompt_tokens_details": {"cached_tokens": sum(cached.values())}}
