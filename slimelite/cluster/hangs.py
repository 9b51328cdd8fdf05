"""Implements ``--hang-timeout``. The monitor finds workers that are stopped or make no progress, names them in a
message, and ends them.

A thread of the driver checks the processes of the run. On other nodes, an actor checks the processes for the driver.
The kernel reports whether a process is stopped or idle. A worker hangs if its process is stopped, or if all training
ranks are idle although they have work. A worker that computes, reads a disk or holds Python's global lock never counts
as hanging, even if this takes very long.
"""

from __future__ import annotations

import logging
import re
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from slimelite.base.processes import Machine, MemoryKills, Sight, Stopped

logger = logging.getLogger(__name__)
# fractions of --hang-timeout: the time between two checks, and the time until a worker is ended; the sum stays below 1
LOOK, END = 0.05, 0.85
# if a node's daemons do not answer for about half a minute, Ray drops the node; so stopped daemons are continued after
# this time [s]
DAEMON_S = 10.0
# processes that are continued, because nobody would restart them: Ray's daemons, the run's watchdog, wandb's process
DAEMONS = re.compile(r"/ray/core/src/|/ray/_private/|^ray::\w*Agent|slimelite/base/lifecycle\.py|wandb-core")
# processes that are ended, because this process would restart them; also Ray workers that have no log yet
OURS = re.compile(r"slimelite\.(environments|rewards)|^ray::")
PROGRESS, PUSH = "progress", "push_weights"
# source files of the code in which a rank waits for the other ranks
COLLECTIVES = re.compile(r"distributed/|_functional_collectives")


@dataclass(slots=True)
class Calls:
    """The calls that a worker has not answered yet. ``open``: number of the call -> (method, start time)."""

    open: dict[int, tuple[str, float]] = field(default_factory=dict)
    _next: int = 0

    def begin(self, method: str, answer: Future[Any]) -> None:
        """Record a call. The record is removed when ``answer`` is done."""
        number, self._next = self._next, self._next + 1
        self.open[number] = method, time.monotonic()
        answer.add_done_callback(lambda _: self.open.pop(number, None))

    def oldest(self) -> tuple[str, float] | None:
        """The method and the age [s] of the oldest open call. Returns None if there is no open call."""
        method, since = min(list(self.open.values()), key=lambda call: call[1], default=("", 0.0))
        return (method, time.monotonic() - since) if method else None


class Worker(Protocol):
    """The attributes of a worker that the monitor needs. ``verdict``: why the monitor ended the worker, for error
    messages."""

    name: str
    log: Any
    host: str
    calls: Calls
    verdict: str | None


class Place(Protocol):
    """A `Machine` in this process or on another node."""

    def look(self, logs: Sequence[str]) -> Sight: ...
    def stack(self, pid: int, log: str) -> str: ...
    def send(self, pid: int, number: int) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """The state of a worker at one check. ``place``, ``pid``: the worker's machine and process. ``still``: how long the
    worker has been idle [s]."""

    worker: Worker
    place: Place
    pid: int
    still: float

    def __str__(self) -> str:
        return f"{self.worker.name} (process {self.pid} on {_host(self.place, self.worker)})"

    @property
    def is_rank(self) -> bool:
        """Whether the worker is a training rank."""
        return self.worker.name.startswith("trainer")

    def waits(self) -> float:
        """How long the worker's oldest call has waited for an answer [s]; 0 if the worker has no open call."""
        oldest = self.worker.calls.oldest()
        return oldest[1] if oldest else 0.0

    def method(self) -> str:
        """The method of the oldest call."""
        oldest = self.worker.calls.oldest()
        return oldest[0] if oldest else ""

    def stack(self) -> str:
        """The stack of the worker's process."""
        return self.place.stack(self.pid, str(self.worker.log))


def _host(place: Place, worker: Worker | None) -> str:
    """The name of this machine, or the address of another machine."""
    return socket.gethostname() if worker is None or isinstance(place, Machine) else worker.host


class Monitor:
    """Checks all workers periodically.

    Args:
        timeout: within this time [s], the monitor ends a worker that hangs. 0: the monitor never ends a worker.
        workers: the workers of the run. More workers may be added later.
        places: address of another host -> its machine.

    ``memory_kills``: the processes that the kernel of this machine has killed because memory was full.
    """

    def __init__(
        self, timeout: float, workers: Sequence[Worker] = (), places: Mapping[str, Place] = MappingProxyType({})
    ) -> None:
        self._pause, self._limit = LOOK * timeout, END * timeout
        self._workers, self._places = workers, places
        self._here: Place = Machine(self._limit)
        self.memory_kills = MemoryKills()
        # when a process was last ended; the other processes may have waited for it, so they get the full time limit
        # again
        self._ended = -self._limit
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="hangs", daemon=True)

    def __enter__(self) -> Monitor:
        if self._limit:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _work(self) -> None:
        while not self._over.wait(self._pause):
            try:
                self._look()
            except Exception:  # for example, a node is gone; callers that wait for its workers get this error
                logger.info("checking the workers failed", exc_info=True)

    def _look(self) -> None:
        self.memory_kills.look()
        hosts: dict[str, list[Worker]] = {"": []}
        for worker in list(self._workers):
            hosts.setdefault(worker.host if worker.host in self._places else "", []).append(worker)
        seen, paused = list[Seen](), False
        for host, members in hosts.items():
            place, logs = self._places.get(host, self._here), {str(worker.log): worker for worker in members}
            sight = place.look(list(logs))
            for stopped in sight.stopped:
                self._stopped(stopped, place, logs)
                paused = paused or stopped.is_worker
            seen += [Seen(logs[log], place, pid, sight.still[log]) for log, pid in sight.pids.items()]
        # otherwise the idle workers may wait for the stopped or ended process
        if not paused and time.monotonic() - self._ended > self._limit:
            self._still(seen)

    def _stopped(self, stopped: Stopped, place: Place, workers: Mapping[str, Worker]) -> None:
        owner = workers.get(stopped.log or "")
        what = f"process {stopped.pid} on {_host(place, owner)} ({stopped.command[:80]})"
        if DAEMONS.search(stopped.command):
            if stopped.seconds >= min(self._limit / 2, DAEMON_S):
                logger.warning("%s was stopped for %.0f s (SIGSTOP) and runs again", what, stopped.seconds)
                place.send(stopped.pid, signal.SIGCONT)
        elif stopped.seconds < self._limit:
            return
        elif owner is not None and stopped.is_worker:
            seen = Seen(owner, place, stopped.pid, stopped.seconds)
            self._end(seen, f"was stopped for {stopped.seconds:.1f} s (SIGSTOP)", seen.stack())
        elif owner is not None or OURS.search(stopped.command):
            stack = place.stack(stopped.pid, str(owner.log)) if owner else ""
            where = f"; its stack: {stack}" * bool(stack)
            whose = f"; it was started by {owner.name} (log: {owner.log})" if owner else ""
            logger.error("%s was stopped for %.1f s (SIGSTOP), so it is ended%s%s", what, stopped.seconds, where, whose)
            self._kill(place, stopped.pid)

    def _still(self, seen: Sequence[Seen]) -> None:
        """End the rollout manager if it does not answer. Also end a rank if all other ranks wait for this rank."""
        long = [each for each in seen if each.waits() >= self._limit <= each.still]
        for each in long:
            if each.worker.name == "rollout" and each.method() == PROGRESS:
                self._end(each, f"has been idle and answered no call for {each.waits():.1f} s", each.stack())
        busy = [each for each in seen if each.worker.calls.open and each.is_rank and each not in long]
        ranks = [each for each in long if each.is_rank]
        sends = any(each.method() == PUSH for each in ranks)
        if busy or not ranks or (sends and not self._engines_still(seen)):
            return
        stacks = {each: each.stack() for each in ranks}
        if not all(each.worker.calls.open for each in ranks):  # meanwhile, a rank has answered or has died
            return
        culprits = [each for each in ranks if not COLLECTIVES.search(stacks[each].partition(" in ")[0])]
        if culprits:
            for each in culprits:
                why = f"has done nothing for {each.still:.1f} s in {each.method()}"
                self._end(each, why + ", and the other ranks wait for it" * (len(ranks) > 1), stacks[each])
        else:
            others = "; ".join(f"{each}, stack: {stacks[each]}" for each in ranks[1:])
            self._end(ranks[0], f"and the other ranks wait for each other ({others})", stacks[ranks[0]])

    def _engines_still(self, seen: Sequence[Seen]) -> bool:
        """Whether this run's engines are idle too. If not, the engines may be the reason for the wait, for example
        because they load weights. Returns False for external engines, because their processes cannot be checked."""
        engines = [each for each in seen if each.worker.name.startswith("engine")]
        return bool(engines) and all(each.still >= self._limit for each in engines)

    def _end(self, seen: Seen, why: str, stack: str) -> None:
        seen.worker.verdict = f"{seen} {why}" + f"; its stack: {stack}" * bool(stack)
        logger.error("%s; its log is %s", seen.worker.verdict, seen.worker.log)
        self._kill(seen.place, seen.pid)

    def _kill(self, place: Place, pid: int) -> None:
        place.send(pid, signal.SIGKILL)
        self._ended = time.monotonic()
