"""An event loop on a thread of its own: its tasks run independently of the callers' threads and event loops."""

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
        """Run ``work`` there and await its result on the caller's event loop."""
        return await asyncio.wrap_future(self.submit(work))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` there and block until it is done; an exception in the wait, such as Ctrl-C, cancels it."""
        assert threading.current_thread() is not self._thread, f"the thread {self._thread.name} cannot wait for itself"
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def abandon(self) -> None:
        """Ask the loop to stop, without waiting for it, since a task that blocks it may never end."""
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
            except SystemExit:  # of a plugin's task: asyncio raises it in whoever awaits the task, and here too
                logger.warning("a plugin called sys.exit in a task of its own")
