"""Reward code that we do not know runs in a thread of its own: whatever it does, generation goes on.

Async functions share one event loop there (so they may share a session), plain functions get a thread each.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from threading import Thread
from typing import Any

# how long a loop may take to answer before it counts as blocked [s]
ANSWER_SECONDS = 1.0


class RewardTimeout(Exception):
    """A reward took longer than --reward-timeout."""


class RewardLoop:
    """An event loop in a daemon thread; one that a reward function blocks is left behind, and a new one started."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, work: Coroutine[Any, Any, Any], timeout: float | None) -> Any:
        """The result of ``work``; ``timeout`` in seconds.

        Raises:
            RewardTimeout: it took longer, and was cancelled (one that does not await is left behind).
        """
        loop = self._loop = self._loop or _start_loop()
        future = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))
        try:
            done, _ = await asyncio.wait({future}, timeout=timeout)
        finally:
            future.cancel()  # a no-op when it is done
        if done:
            return future.result()
        alive: Future[None] = Future()
        loop.call_soon_threadsafe(alive.set_result, None)
        answered, _ = await asyncio.wait({asyncio.wrap_future(alive)}, timeout=ANSWER_SECONDS)
        if not answered and self._loop is loop:
            loop.call_soon_threadsafe(loop.stop)
            self._loop = None
        blocked = "" if answered else "; it blocks its event loop: let it await, or be a plain def, which gets a thread"
        raise RewardTimeout(f"no reward within {timeout:g} s (--reward-timeout){blocked}")

    def close(self) -> None:
        """Let the thread end."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None


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


def _fill(future: Future[Any], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function(*args))
    except Exception as error:
        future.set_exception(error)
    except BaseException as error:  # set as it is, it would end the loop that waits for it
        future.set_exception(RuntimeError(repr(error)))


def _start_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    Thread(target=loop.run_forever, name="rewards", daemon=True).start()
    return loop
