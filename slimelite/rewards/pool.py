"""Worker processes for rules that may compute without bound: a hung one is killed and replaced, its answer is an error.

Workers are started as programs of their own, not by ``multiprocessing``, which would import ``train.py``, and torch
with it, into each.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import LifoQueue

import slimelite
from slimelite.rewards.rule import Answer, Exchange, Failure, Reward

Task = tuple[str, Answer] | Exchange

# one hop carries this many: a hop costs 0.2 ms, an answer that needs algebra ten
CHUNK = 8
START_SECONDS = 120.0
RULES_PROGRAM = ("slimelite.rewards.worker",)


class WorkerPool:
    """At most ``size`` workers, started when they are needed. ``timeout``: for one answer [s]."""

    def __init__(
        self,
        size: int,
        timeout: float,
        *,
        program: Sequence[str] = RULES_PROGRAM,
        chunk: int = CHUNK,
        start_seconds: float = START_SECONDS,
    ) -> None:
        """``program``: module and arguments of a worker; ``chunk``: tasks it gets at once."""
        self._chunk = chunk
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="grading")
        self._workers = [_Worker(timeout, program, start_seconds) for _ in range(size)]
        # last in, first out: a light load keeps to the workers that are already started
        self._idle: LifoQueue[_Worker] = LifoQueue()
        for worker in self._workers:
            self._idle.put(worker)

    async def run(self, tasks: Sequence[Task]) -> list[Reward | Failure]:
        """The verdict on each task, in order: the slow one of a (rule name, answer), the score of an exchange.

        Raises:
            RuntimeError: workers cannot be started.
            ValueError: a worker says why it cannot work.
        """
        loop = asyncio.get_running_loop()
        chunks = [tasks[i : i + self._chunk] for i in range(0, len(tasks), self._chunk)]
        results = await asyncio.gather(*(loop.run_in_executor(self._threads, self._grade, chunk) for chunk in chunks))
        return [reward for part in results for reward in part]

    def _grade(self, chunk: Sequence[Task]) -> list[Reward | Failure]:
        worker = self._idle.get()  # as many threads as workers: never waits
        try:
            return worker.grade(chunk)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End the workers; answers they are on become errors."""
        for worker in self._workers:
            worker.close()
        self._threads.shutdown(cancel_futures=True)


class _Worker:
    """One worker process and the connection to it."""

    def __init__(self, timeout: float, program: Sequence[str], start_seconds: float) -> None:
        self._timeout = timeout
        self._program = program
        self._start_seconds = start_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._closed = False

    def grade(self, tasks: Sequence[Task]) -> list[Reward | Failure]:
        """Results in order; after a hang or a crash the rest goes to a new process."""
        results: list[Reward | Failure] = []
        while len(results) < len(tasks):
            if self._process is None or self._process.poll() is not None:
                self._start()
            assert self._connection is not None
            try:
                self._connection.send(tasks[len(results) :])
                while len(results) < len(tasks):
                    if not self._connection.poll(self._timeout):
                        self._kill()
                        results.append(Failure("timeout", f"no verdict within {self._timeout:g} s (--reward-timeout)"))
                        break
                    results.append(self._connection.recv())
            except (EOFError, OSError):
                code = self._kill()
                kind = "costly" if code == -signal.SIGVTALRM else "crash"
                results.append(Failure(kind, f"the grading process ended with exit code {code}"))
        return results

    def close(self) -> None:
        """End the process for good."""
        self._closed = True
        self._kill()

    def _start(self) -> None:
        if self._closed:
            raise RuntimeError("the grader is closed")
        self._kill()
        self._connection, theirs = Pipe()
        search_path = [str(Path(slimelite.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            # -P: the current folder is not searched for modules
            [sys.executable, "-P", "-m", *self._program, str(theirs.fileno()), str(self._timeout)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, search_path))},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl+C is for the parent; workers end when it does
        )
        theirs.close()
        try:
            ready = self._connection.poll(self._start_seconds) and self._connection.recv()
        except EOFError:
            ready = False
        if not ready:
            code = self._kill()
            raise RuntimeError(
                f"no grading process within {self._start_seconds:g} s (exit code {code}); stderr says why"
            )
        if ready != "ready":
            self._kill()
            raise ValueError(ready)

    def _kill(self) -> int | None:
        """End the process now; its exit code."""
        if self._process is None or self._connection is None:
            return None
        self._process.kill()
        code = self._process.wait()
        self._connection.close()
        self._process = self._connection = None
        return code
