"""An event loop on its own thread, a collector of the items of one turn of a loop, and calls of functions that may
block."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, TypeVar

from slimelite.base.guard import ending

T = TypeVar("T")
logger = logging.getLogger(__name__)


class LoopThread:
    """A daemon thread called ``name`` with an event loop. The loop runs until `close` or `abandon` is called."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start ``work`` on the thread's event loop. To cancel ``work``, cancel the future."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def result(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the thread's event loop, and await its result on the caller's event loop."""
        return await asyncio.wrap_future(self.submit(work))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the thread's event loop, and block until it is done. An exception during the wait, such as
        Ctrl-C, cancels ``work``."""
        assert threading.current_thread() is not self._thread, f"the thread {self._thread.name} cannot wait for itself"
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def abandon(self) -> None:
        """Ask the loop to stop, but do not wait for it, because a task that blocks the loop may never end."""
        self.loop.call_soon_threadsafe(self.loop.stop)

    def close(self) -> None:
        """End the loop and the thread."""
        self.abandon()
        self._thread.join()
        self.loop.close()

    def _work(self) -> None:
        stopped = False
        while not stopped:
            try:
                self.loop.run_forever()
                stopped = True
            except SystemExit as error:
                # from a plugin's task; asyncio raises it here and in the code that awaits the task
                logger.warning("a plugin's own asyncio task called %s", ending(error))


class Gathered(Generic[T]):
    """Collects the items that are added in one turn of an event loop. At the end of the turn, ``take`` is called with
    the list of items."""

    def __init__(self, take: Callable[[list[T]], object]) -> None:
        self._take = take
        self._waiting: dict[asyncio.AbstractEventLoop, list[T]] = {}

    def add(self, item: T) -> None:
        """Add ``item`` from the running event loop. ``take`` is called in the same loop."""
        loop = asyncio.get_running_loop()
        waiting = self._waiting.setdefault(loop, [])
        waiting.append(item)
        if len(waiting) == 1:
            loop.call_soon(lambda: self._take(self._waiting.pop(loop)))


async def call(function: Callable[..., Any], *args: object, **named: object) -> Any:
    """The result of an async or plain function. A plain function runs in a daemon thread. If the function hangs, the
    program can still exit.

    Raises:
        RuntimeError: the function raised an exception that would end the program or its event loop, such as
            KeyboardInterrupt.
    """
    own = _task()
    try:
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
            return await function(*args, **named)
        future: Future[object] = Future()
        threading.Thread(target=_fill, args=(future, partial(function, *args, **named)), daemon=True).start()
        result = await asyncio.wrap_future(future)
        return await result if isinstance(result, Awaitable) else result
    except Exception:
        raise
    except BaseException as error:
        # the caller cancelled the call; or the caller does not wait any more, and the event loop may be gone
        if own is None or _task() is not own or own.cancelling():
            raise
        raise RuntimeError(repr(error)) from error


def _task() -> asyncio.Task[Any] | None:
    """The task that is running, or None."""
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs
        return None


def _fill(future: Future[object], work: Callable[[], object]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as error:
        # wrap both: SystemExit would end the loop that awaits this future, and StopIteration would never reach the loop
        kept = isinstance(error, Exception) and not isinstance(error, StopIteration)
        future.set_exception(error if kept else RuntimeError(repr(error)).with_traceback(error.__traceback__))
