"""Fronts on a free port, over scripted replies or a tiny model, and a client that speaks raw HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from slimelite.engines.embedded.engine import EmbeddedEngine
from slimelite.engines.protocol import EngineInfo, GenerateRequest, GenerateResult, OnTokens
from slimelite.engines.sampling import engine_sampler
from slimelite.serving.format import ChatFormat
from slimelite.serving.front import Front
from slimelite.serving.sessions import Sessions
from tests.data.tokenizers import begin_with
from tests.serving.chat import Scripted, tokenizer

T = TypeVar("T")


def run(work: Awaitable[T]) -> T:
    """The result of ``work``, which has a minute."""

    async def limited() -> T:
        return await asyncio.wait_for(work, 600)

    return asyncio.run(limited())


class Speaking(Scripted):
    """A `Scripted` engine, which tells of one token after the other; a front asks it as it asks an engine."""

    async def info(self) -> EngineInfo:
        return EngineInfo("scripted", 3, 8192, 64, seeds=False)

    async def stream(self, request: GenerateRequest, on_tokens: OnTokens) -> GenerateResult:
        result = await self(request, None)
        for token, log_prob in zip(result.output_ids, result.log_probs, strict=True):
            on_tokens([token], [log_prob])
        return result

    async def generate(self, requests: list[GenerateRequest]) -> list[GenerateResult]:
        return [await self(request, None) for request in requests]


class Asking:
    """Asks the ``front`` at ``url``, with ``key`` if it is given."""

    front: Front

    def __init__(self, http: aiohttp.ClientSession, url: str, key: str | None = None) -> None:
        self.http, self.url, self.key = http, url, key

    async def __call__(self, path: str, body: Any = None, method: str = "POST") -> tuple[int, Any]:
        """(status, what the answer says): an object, or the events of a stream as (name, object) pairs."""
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        async with self.http.request(method, self.url + path, json=body, headers=headers) as answer:
            text = await answer.text()
            if answer.content_type == "application/json":
                return answer.status, json.loads(text)
            if answer.content_type == "text/event-stream":
                return answer.status, [event(block) for block in text.removesuffix("\n\n").split("\n\n")]
            return answer.status, text

    async def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The objects of OpenAI's events, after a check that the last event says that it is the last."""
        status, events = await self(path, {**body, "stream": True})
        assert status == 200, events
        assert events.pop() == (None, "[DONE]")
        return [data for _, data in events]


def event(block: str) -> tuple[str | None, Any]:
    fields = dict(line.split(": ", 1) for line in block.split("\n"))
    data = fields["data"]
    return fields.get("event"), data if data == "[DONE]" else json.loads(data)


@asynccontextmanager
async def front_over(
    sessions: Sessions, engine: Any, *, origins: Sequence[str] = (), logs: bool = False, **settings: Any
) -> AsyncIterator[Asking]:
    front = Front(sessions, engine, "tiny", **settings)
    front.origins, front.logs = frozenset(origins), logs
    url = await front.start()
    try:
        async with aiohttp.ClientSession() as http:
            asking = Asking(http, url, settings.get("key"))
            asking.front = front
            yield asking
    finally:
        await front.stop()


@asynccontextmanager
async def scripted_front(family: str, *replies: str, **settings: Any) -> AsyncIterator[tuple[Asking, Speaking]]:
    chat_format = ChatFormat(tokenizer(family))
    engine = Speaking(chat_format, *replies)
    async with front_over(Sessions(chat_format, engine_sampler(engine), 8192), engine, **settings) as ask:
        yield ask, engine


@asynccontextmanager
async def engine_front(
    folder: Path, *, begin: str | None = None, **settings: Any
) -> AsyncIterator[tuple[Asking, EmbeddedEngine]]:
    """``begin``: a token that the tokenizer puts before every text."""
    chat_format = ChatFormat(tokenizer())
    if begin:
        begin_with(chat_format.tokenizer, begin)
    codec = {"decode": chat_format.decode, "encode": chat_format.encode_text, "tokenizer": chat_format.tokenizer}
    engine = EmbeddedEngine(str(folder), max_running_requests=8, max_context_len=2000, **codec)
    try:
        async with front_over(Sessions(chat_format, engine_sampler(engine), 2000), engine, **settings) as ask:
            yield ask, engine
    finally:
        await engine.close()
