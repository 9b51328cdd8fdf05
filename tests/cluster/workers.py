"""Workers that the tests of the cluster are made of."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

from slimelite.cluster.remote import LocalRemote, Remote


class Worker(LocalRemote[Any]):
    """Runs its own methods at once, as a worker of one process does."""

    def __init__(self) -> None:
        super().__init__(self, type(self).__name__)


class Noting(Remote[Any]):
    """Notes what it is asked in a list that all share; what ``waits`` names is answered when a test says so.

    ``answers``: what somebody reads.
    """

    def __init__(self, name: str, calls: list[str], answers: dict[str, Any] | None = None, waits: str = "") -> None:
        self.name, self.calls, self.answers, self.waits = name, calls, answers or {}, waits
        self.open: list[Future[Any]] = []
        self.host, self.log = "here", Path("none.log")

    def start(self, method: str, /, *args: Any, **_: Any) -> Future[Any]:
        tags = args[0] if method == "resume_memory" else ()
        self.calls.append(" ".join([self.name, method, *tags]))
        future: Future[Any] = Future()
        if method == self.waits:
            self.open.append(future)
        else:
            future.set_result(self.answers.get(method))
        return future

    def cpu_seconds(self) -> Future[float]:
        return self.start("cpu_seconds")

    def make(self, make: str, *_: Any) -> Future[None]:
        return self.start(make.rpartition(":")[2])

    def rendezvous(self) -> Future[str]:
        return self.start("rendezvous")
