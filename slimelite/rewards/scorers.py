"""Rewards that are no rule's: functions of the user, a server's (``remote_rm``) and a reward model's.

Reward code that we do not know runs in a thread of its own: whatever it does, generation goes on. Async functions share
one event loop there (so they may share a session), plain functions get a thread each.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from threading import Thread
from typing import Any

from slimelite.arguments import RewardArgs
from slimelite.http_client import Client, Retry
from slimelite.plugins import own_traceback
from slimelite.rewards.rules import Exchange, Failure, Outcome
from slimelite.rewards.workers import WorkerPool
from slimelite.sample import Sample
from slimelite.threads import LoopThread

# how long a loop may take to answer before it counts as blocked [s]
ANSWER_SECONDS = 1.0
CONNECTIONS = 64
ATTEMPTS = 10
# a reward model of many gigabytes may come from a network disk
LOAD_SECONDS = 1800.0
REQUEST_SECONDS = 120.0


class RewardLoop:
    """Runs functions of the user on an event loop of its own; one that they block is left behind for a new one."""

    def __init__(self) -> None:
        self._thread: LoopThread | None = None

    async def call(self, function: Callable[..., Any], *args: Any, timeout: float) -> Any:
        """What ``function`` returns within ``timeout`` seconds, or the `Failure` that it ends in.

        One that takes longer is cancelled; it is left behind where it does not await.
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


async def call(function: Callable[..., Any], *args: Any) -> Any:
    """The result of an async function, or of a plain one in a daemon thread (a hung one does not stop the exit).

    Raises:
        RuntimeError: it raised what would end a program or its event loop, such as KeyboardInterrupt.
    """
    try:
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
            return await function(*args)
        future: Future[Any] = Future()
        Thread(target=_fill, args=(future, function, args), daemon=True).start()
        result = await asyncio.wrap_future(future)
        return await result if isinstance(result, Awaitable) else result
    except Exception:
        raise
    except BaseException as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # it is we who cancel it
        raise RuntimeError(repr(error)) from error


def failure_of(error: BaseException) -> Failure:
    """An exception, with its traceback from the user's first line on."""
    return Failure("exception", f"{type(error).__name__}: {error}", own_traceback(error))


def _fill(future: Future[Any], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function(*args))
    except Exception as error:
        future.set_exception(error)
    except BaseException as error:  # set as it is, it would end the loop that waits for it
        future.set_exception(RuntimeError(repr(error)))


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
        """The server's answers; an exception where there was none. It has its own limits: attempts, seconds of each.

        The waits between attempts are 1, 2, 4, ... seconds, at most 30; a client error (4xx) is not tried again.
        """
        pairs = zip(samples, texts, strict=True)
        payloads = [{"prompt": s.prompt, "response": text, "label": s.label} for s, text in pairs]
        retry = Retry(self._attempts, first_s=1.0, refused=True)
        async with Client(retry, REQUEST_SECONDS, CONNECTIONS) as client:
            return await asyncio.gather(*(client.post(self._url, p) for p in payloads), return_exceptions=True)

    def close(self) -> None:
        """It holds nothing."""


class ModelReward:
    """``reward_model``: the score of the model of --reward-model-path, in a process that its first batch starts."""

    def __init__(self, args: RewardArgs, trial: bool) -> None:  # noqa: ARG002  a trial is no different
        """Loads nothing yet."""
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
    """What a reward model sees of ``sample``; `load_prompts` keeps the messages for it."""
    if not isinstance(sample.prompt, str):
        return Exchange("", response, sample.prompt)
    return Exchange(sample.prompt, response, (sample.metadata or {}).get("messages"))
