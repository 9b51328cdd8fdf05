"""An engine whose timing the test decides: real requests in, made-up but checkable tokens out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence

from slimelite.engines.protocol import EngineInfo, GenerateRequest, GenerateResult, WeightBucket
from slimelite.samples.sample import Kept

EOS = 2  # <|im_end|> of the test tokenizer
FIRST_NUMBER = 13  # id of "0"


def token(request: GenerateRequest, position: int) -> int:
    """The token at ``position`` of a response depends on seed and position alone."""
    return FIRST_NUMBER + (7 * (request.params.seed or 0) + 31 * position) % 100


def log_prob(token_id: int, version: int) -> float:
    """Tells token and weight version of whoever sees it."""
    return -(token_id + 1000 * version) / 4096  # exact in fp32


def kept_ids(token_id: int) -> list[int]:
    """What a token was drawn from, if the request limits that: 1 to 4 tokens."""
    return [token_id, *range(token_id % 4)]


class ScriptedEngine:
    """Gives every response ``length(request)`` tokens (the last one ends it), under weights ``version``.

    ``holds(request)``: whether a request waits to be aborted; it has ``partial`` tokens by then.
    ``breaks(request)``: raised instead of an answer, if not None. ``delay(requests)``: seconds a call takes.
    """

    def __init__(
        self,
        *,
        length: Callable[[GenerateRequest], int] = lambda request: 5,
        holds: Callable[[GenerateRequest], bool] = lambda request: False,
        breaks: Callable[[GenerateRequest], Exception | None] = lambda request: None,
        delay: Callable[[Sequence[GenerateRequest]], float] = lambda requests: 0.0,
        partial: int = 3,
        max_context_len: int = 128,
    ) -> None:
        self.length, self.holds, self.breaks, self.delay, self.partial = length, holds, breaks, delay, partial
        self.max_context_len = max_context_len
        self.version = 0
        self.calls: list[list[GenerateRequest]] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self._aborted = asyncio.Event()

    async def info(self) -> EngineInfo:
        return EngineInfo("scripted", self.version, self.max_context_len, 64, seeds=True)

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        self.calls.append(list(requests))
        for request in requests:
            if (error := self.breaks(request)) is not None:
                raise error
        self.in_flight += len(requests)
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(self.delay(requests))
            results = [self._result(r) for r in requests]
            if any(r.finish_reason == "abort" for r in results):
                await self._aborted.wait()
        finally:  # a call that is cancelled is over too
            self.in_flight -= len(requests)
        return results

    def _result(self, request: GenerateRequest) -> GenerateResult:
        held = self.holds(request)
        wanted = self.length(request) - request.position
        number = min(self.partial if held else wanted, request.params.max_new_tokens)
        ids = [token(request, request.position + i) for i in range(number)]
        reason = "abort" if held else "length" if number < wanted else "stop"
        if reason == "stop":
            ids[-1] = EOS
        log_probs = [log_prob(t, self.version) for t in ids]
        kept = Kept.of([kept_ids(t) for t in ids]) if request.params.tells else None
        return GenerateResult(request.request_id, ids, log_probs, [self.version] * number, reason, 0, kept)

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        self._aborted.set()
        self._aborted = asyncio.Event()

    async def begin_weight_update(self, version: int, changed: Collection[str] | None = None) -> bool:
        self.version = version
        return False

    async def load_weights(self, bucket: WeightBucket) -> None: ...

    async def end_weight_update(self) -> None: ...

    async def release_memory(self, tags: Sequence[str]) -> None: ...

    async def resume_memory(self, tags: Sequence[str]) -> None: ...

    async def start_http(self) -> str:
        return "http://127.0.0.1:1"

    async def close(self) -> None: ...

    @property
    def requests(self) -> list[GenerateRequest]:
        return [r for call in self.calls for r in call]
