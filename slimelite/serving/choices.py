"""Responses as OpenAI writes them: the choices of an answer that comes whole and of a stream, with their log-probs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from slimelite.base.http_server import RequestError
from slimelite.engines.protocol import SamplingParams, Scores
from slimelite.engines.sampling import Generating
from slimelite.serving.format import ChatFormat
from slimelite.serving.replies import Part
from slimelite.serving.sessions import Turn

# the likeliest tokens at one place, as (token, log-prob)
Top = Sequence[tuple[int, float]]


class Choices(ABC):
    """The choices of one request.

    ``kind``, ``chunk``, ``prefix``: what an answer and the parts of a stream are called, and what their id begins with.
    ``alternatives``: so many are wanted of each token; None: no log-probs are. ``ids``: token ids are wanted. ``echo``:
    so is the prompt.
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
        self._offsets: dict[int, int] = {}  # index of a response -> characters of its tokens so far

    @property
    def wait(self) -> bool:
        """Whether they need the whole response before they can tell of a token: alternatives are computed after it."""
        return bool(self._alternatives) or (self._alternatives is not None and self._echo)

    @abstractmethod
    async def whole(self, part: Part) -> dict[str, object]:
        """The choice of a response that comes whole."""

    @abstractmethod
    async def chunks(self, part: Part) -> list[dict[str, object]]:
        """The choices of the next chunks of a stream."""

    def _end(self, part: Part) -> dict[str, object]:
        """The last fields of a response: why it ended, and its token ids if they are wanted."""
        ids = {"token_ids": part.turn.output_ids, "prompt_token_ids": part.turn.prompt_ids}
        return {"finish_reason": finish_reason(part.turn), **(ids if self._ids else {})}

    async def _score(self, ids: Sequence[int], start: int, temperature: float) -> Scores:
        """The engine's scores, if it has any."""
        info = await self._engine.info()
        if not info.scores:
            raise RequestError(f"the {info.name} engine gives log-probs of sampled tokens alone", param="logprobs")
        return await self._engine.score(ids, start, temperature, self._alternatives or 0)

    async def _alternatives_of(self, turn: Turn) -> list[list[tuple[int, float]]]:
        """The likeliest tokens in place of each that was sampled, if any are wanted."""
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
        """Those of all tokens of the part, also of those that are no content."""
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
        # a token may be part of a character, and then it is no text
        return {"token": text, "logprob": log_prob, "bytes": None if "�" in text else list(text.encode())}


class TextChoices(Choices):
    kind, chunk, prefix = "text_completion", "text_completion", "cmpl"

    async def whole(self, part: Part) -> dict[str, object]:
        """See `Choices.whole`; a part of a response has the same form."""
        text = self._format.decode(part.turn.prompt_ids) + part.content if self._echo and part.first else part.content
        log_probs = await self._log_probs(part) if self._alternatives is not None and (part.ids or part.first) else None
        end = self._end(part) if part.ended else {"finish_reason": None}
        return {"index": part.index, "text": text, "logprobs": log_probs, **end}

    async def chunks(self, part: Part) -> list[dict[str, object]]:
        """See `Choices.chunks`."""
        return [await self.whole(part)]

    async def _log_probs(self, part: Part) -> dict[str, object]:
        """Of the prompt at temperature 1 (``echo``), and of the output as it was sampled."""
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
                # two tokens may have one text: then the likelier one counts
                likely = {self._format.decode([token]): value for token, value in reversed(top or ())}
                named.append(None if log_prob is None else {text: log_prob, **likely})
        return {"tokens": texts, "token_logprobs": list(log_probs), "top_logprobs": named, "text_offset": offsets[:-1]}


def finish_reason(turn: Turn) -> str:
    """OpenAI's name for why a turn ended; "abort" if somebody ended it."""
    return "tool_calls" if turn.reply.tool_calls and turn.finish_reason == "stop" else turn.finish_reason


def usage(turns: Sequence[Turn]) -> dict[str, object]:
    """OpenAI's count of tokens; the prompt of several responses counts once."""
    cached: dict[tuple[int, ...], int] = {}
    for turn in turns:
        prompt = tuple(turn.prompt_ids)
        cached[prompt] = min(cached.get(prompt, len(prompt)), turn.cached_tokens)
    read, written = sum(map(len, cached)), sum(len(turn.output_ids) for turn in turns)
    counts = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    return {**counts, "prompt_tokens_details": {"cached_tokens": sum(cached.values())}}
