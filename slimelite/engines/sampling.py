"""Sampling for callers that show tokens as they arrive: one response from one engine, or several responses together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from slimelite.engines.protocol import EngineInfo, GenerateRequest, GenerateResult, OnTokens, Scores, Streaming

T = TypeVar("T")
# samples from one engine or from the engines of a run; the second argument is set if the caller shows tokens as they
# arrive
Sampler = Callable[[GenerateRequest, OnTokens | None], Awaitable[GenerateResult]]


class Generating(Protocol):
    """The part of `Engine` that clients' requests need."""

    async def info(self) -> EngineInfo: ...

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]: ...

    async def score(self, input_ids: Sequence[int], start: int, temperature: float = 1.0, top: int = 0) -> Scores: ...

    async def abort(self, request_ids: Sequence[str] | None = None) -> None: ...


def engine_sampler(engine: Generating) -> Sampler:
    """One engine as a sampler. The sampler streams if the engine can stream."""

    async def sample(request: GenerateRequest, on_tokens: OnTokens | None) -> GenerateResult:
        if on_tokens is not None and isinstance(engine, Streaming):
            return await engine.stream(request, on_tokens)
        (result,) = await engine.generate([request])
        return result

    return sample


@dataclass(frozen=True)
class News(Generic[T]):
    """The next tokens of response number ``index`` with their log-probs, or the ``result`` of this response."""

    index: int
    ids: Sequence[int] = ()
    log_probs: Sequence[float] = ()
    result: T | None = None


async def news(calls: Sequence[Callable[[OnTokens | None], Awaitable[T]]], *, stream: bool) -> AsyncGenerator[News[T]]:
    """Make ``calls`` at the same time. Yields the tokens of the calls (only with ``stream``), and the result of
    each call when it ends.

    All calls are cancelled when one of them fails, or when the generator is closed.
    """
    queue: asyncio.Queue[News[asyncio.Future[T]]] = asyncio.Queue()

    def begun(index: int, call: Callable[[OnTokens | None], Awaitable[T]]) -> asyncio.Future[T]:
        hear = lambda ids, log_probs: queue.put_nowait(News(index, ids, log_probs))  # noqa: E731
        task = asyncio.ensure_future(call(hear if stream else None))
        task.add_done_callback(lambda task: queue.put_nowait(News(index, result=task)))
        return task

    tasks = [begun(index, call) for index, call in enumerate(calls)]
    left = len(tasks)
    try:
        while left:
            new = await queue.get()
            if new.result is None:
                yield News(new.index, new.ids, new.log_probs)
            else:
                left -= 1
                yield News(new.index, result=new.result.result())
    finally:
        for task in tasks:
            task.cancel()
