"""Workers that the tests of the cluster are made of."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any


class Worker:
    """Runs its own methods at once, as a worker of one process does."""

    def submit(self, method: str, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(getattr(self, method)(*args))
        except Exception as error:
            future.set_exception(error)
        return future
