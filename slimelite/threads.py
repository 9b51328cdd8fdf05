"""An event loop on a thread of its own: what runs there goes on whatever loop, or none, its callers have."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)


class LoopThread:
    """A daemon thread, called ``name``, with an event loop, until `close` or `abandon`."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start ``work`` there; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    async def result(self, work: Coroutine[Any, Any, T]) -> T:
        """What ``work`` gives, for a caller on another event loop."""
        return await asyncio.wrap_future(self.submit(work))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What ``work`` gives, for a caller that waits; an exception in the wait, such as Ctrl-C, cancels it."""
        assert threading.current_thread() is not self._thread, f"the thread {self._thread.name} cannot wait for itself"
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def abandon(self) -> None:
        """Have the loop end when it next can, and wait for nothing: what blocks it may never end."""
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
            except SystemExit:  # of a task that a plugin started: asyncio hands it to who awaits the task, and here
                logger.warning("a plugin called sys.exit in a task of its own")
