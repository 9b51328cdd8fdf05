"""A server whose engine says given texts, as fast as a test lets it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slimelite.apps.serve import chat_page
from slimelite.base.threads import LoopThread
from slimelite.engines.protocol import EngineInfo, GenerateRequest, GenerateResult, OnTokens, Scores
from slimelite.engines.sampling import engine_sampler
from slimelite.serving.format import ChatFormat
from slimelite.serving.front import Front
from slimelite.serving.sessions import Sessions
from tests.serving.chat import tokenizer

TOKENIZER = tokenizer("qwen3")
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
LOG_PROB = -0.5


@dataclass
class Scripted:
    """Says ``texts`` in turn, again and again, a token at a time; only ``allowed`` tokens, if that is set."""

    texts: list[str]
    allowed: int | None = None
    said: int = 0
    cancelled: int = 0
    prompts: list[str] = field(default_factory=list)
    requests: list[GenerateRequest] = field(default_factory=list)

    def wait_for_cancel(self) -> None:
        """Wait until a request has been cancelled; the server learns of a client that goes a little later."""
        deadline = time.monotonic() + 120
        while not self.cancelled and time.monotonic() < deadline:
            time.sleep(0.01)

    async def info(self) -> EngineInfo:
        return EngineInfo("scripted", 0, 4096, 8, seeds=True, scores=True)

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        return [await self.stream(request, lambda ids, log_probs: None) for request in requests]

    async def stream(self, request: GenerateRequest, on_tokens: OnTokens) -> GenerateResult:
        self.prompts.append(TOKENIZER.decode(request.input_ids))
        self.requests.append(request)
        text = self.texts[(len(self.requests) - 1) % len(self.texts)]
        ids = [*TOKENIZER(text)["input_ids"], END][: request.params.max_new_tokens]
        try:
            for token in ids:
                while self.allowed is not None and self.said >= self.allowed:
                    await asyncio.sleep(0.01)
                on_tokens([token], [LOG_PROB])
                self.said += 1
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        reason = "stop" if ids[-1] == END else "length"
        return GenerateResult(request.request_id, ids, [LOG_PROB] * len(ids), [0] * len(ids), reason)

    async def score(self, input_ids: Sequence[int], start: int, temperature: float = 1.0, top: int = 0) -> Scores:
        count = len(input_ids) - start
        likely = [(TOKENIZER.convert_tokens_to_ids("z"), -1.25), (END, -4.0)][:top]
        return Scores([LOG_PROB - 0.25] * count, [likely] * count)

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        pass


class Server:
    """The front with the page over an engine, on a thread of its own."""

    def __init__(self, engine: Any, key: str | None, tool_parser: str | None = None) -> None:
        self.engine, self._thread = engine, LoopThread("served")
        sessions = Sessions(ChatFormat(TOKENIZER, tool_parser=tool_parser), engine_sampler(engine), 4096)
        self._front = Front(sessions, engine, "tiny", key=key, page=chat_page())
        self.url = self._thread.run(self._front.start())
        self.stopped = False

    def stop(self) -> None:
        """Stop listening; a second time does nothing."""
        if not self.stopped:
            self._thread.run(self._front.stop())
            self._thread.close()
        self.stopped = True
