"""Rewards not computed by rules: user functions, a reward server (``remote_rm``) and a reward model.

User functions run in threads of their own, so that they cannot block generation. Async functions share one event loop
in one thread (so they may share a session), plain functions get a thread each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from slimelite.arguments import RewardArgs
from slimelite.base.guard import own_traceback
from slimelite.base.http_client import Client, Retry
from slimelite.base.threads import LoopThread, call
from slimelite.rewards.rules import Exchange, Failure, Outcome
from slimelite.rewards.workers import WorkerPool
from slimelite.samples.sample import Sample

# time that an event loop may take to respond before it counts as blocked [s]
ANSWER_SECONDS = 1.0
CONNECTIONS = 64
ATTEMPTS = 10
# loading many gigabytes of reward model from a network disk takes long
LOAD_SECONDS = 1800.0
REQUEST_SECONDS = 120.0


class RewardLoop:
    """Runs user functions on an event loop of its own; if one of them blocks the loop, a new loop replaces it."""

    def __init__(self) -> None:
        self._thread: LoopThread | None = None

    async def call(self, function: Callable[..., Any], *args: object, timeout: float) -> Any:
        """What ``function`` returns, or a `Failure` if it raises or takes longer than ``timeout`` seconds.

        A function that takes longer is cancelled; if it never awaits, it keeps running in its abandoned loop.
        """
        thread = self._thread = self._thread or LoopThread("rewards")
        future = asyncio.wrap_future(thread.submit(call(function, *args)))
        try:
            done, _ = await asyncio.wait({future}, timeout=timeout)
        finally:
            future.cancel()  # a no-op when it is done
        if done:
            try:
                return future.result()
            except Exception as error:
                return failure_of(error)
        alive: Future[None] = Future()
        thread.loop.call_soon_threadsafe(alive.set_result, None)
        answered, _ = await asyncio.wait({asyncio.wrap_future(alive)}, timeout=ANSWER_SECONDS)
        if not answered and self._thread is thread:
            self.close()
        blocked = "" if answered else "; it blocks its event loop: let it await, or be a plain def, which gets a thread"
        return Failure("timeout", f"no reward within {timeout:g} s (--reward-timeout){blocked}")

    def close(self) -> None:
        """Let the thread end."""
        if self._thread is not None:
            self._thread.abandon()
            self._thread = None


def failure_of(error: BaseException) -> Failure:
    """The `Failure` for an exception, with its traceback from the user's first line on."""
    return Failure("exception", f"{type(error).__name__}: {error}", own_traceback(error))


class RemoteReward:
    """``remote_rm``: POST ``{"prompt", "response", "label"}`` to --rm-url; the JSON answer is the reward."""

    def __init__(self, args: RewardArgs, trial: bool) -> None:
        """``trial``: give up after two attempts.

        Raises:
            ValueError: the address has no scheme.
        """
        assert args.rm_url is not None
        if not args.rm_url.startswith(("http://", "https://")):
            raise ValueError(f"--rm-url {args.rm_url}: an address starts with http:// or https://")
        self._url = args.rm_url
        self._attempts = 2 if trial else ATTEMPTS

    async def score(self, samples: Sequence[Sample], texts: Sequence[str]) -> Sequence[Outcome]:
        """The server's answers, or the exception where a request failed; ``--reward-timeout`` does not apply.

        The waits between attempts are 1, 2, 4, ... seconds, at most 30. A 4xx error is not tried again, except for 408,
        425 and 429.
        """
        pairs = zip(samples, texts, strict=True)
        payloads = [{"prompt": s.prompt, "response": text, "label": s.label} for s, text in pairs]
        retry = Retry(self._attempts, first_s=1.0, refused=True)
        async with Client(retry, REQUEST_SECONDS, CONNECTIONS) as client:
            return await asyncio.gather(*(client.post(self._url, p) for p in payloads), return_exceptions=True)

    def close(self) -> None:
        """Do nothing: no connection outlives `score`."""


class ModelReward:
    """``reward_model``: scores by the model at --reward-model-path, in a process that starts with the first batch."""

    def __init__(self, args: RewardArgs, trial: bool) -> None:  # noqa: ARG002  a trial is no different
        """Set up the worker pool; the model is loaded with the first batch."""
        assert args.reward_model_path is not None
        program = ("slimelite.rewards.reward_model", args.reward_model_path, args.reward_model_device)
        size = args.reward_model_batch_size
        self._pool = WorkerPool(1, args.reward_timeout, program=program, chunk=size, start_seconds=LOAD_SECONDS)

    async def score(self, samples: Sequence[Sample], texts: Sequence[str]) -> Sequence[Outcome]:
        """The model's scores."""
        return await self._pool.run([exchange_of(s, text) for s, text in zip(samples, texts, strict=True)])

    def close(self) -> None:
        """End the process."""
        self._pool.close()


def exchange_of(sample: Sample, response: str) -> Exchange:
    """The part of ``sample`` that a reward model sees; `load_prompts` keeps the messages in the metadata for it."""
    if not isinstance(sample.prompt, str):
        return Exchange("", response, sample.prompt)
    return Exchange(sample.prompt, response, (sample.metadata or {}).get("messages"))
