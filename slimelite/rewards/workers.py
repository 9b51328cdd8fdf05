"""Worker processes for rules that may take arbitrarily long. If a worker process hangs, it is killed and replaced, and
the response that it was grading gets a `Failure`.

A worker is a separate program, ``python -m slimelite.rewards.workers FD SECONDS``. It is not started with
``multiprocessing``, which would import ``train.py``, and with it torch. A worker receives lists of pairs (rule name,
`Answer`) over the connection on file descriptor FD. For each pair in turn, it sends back a reward or a `Failure`, so
the parent process knows which pair is being graded. A worker ends when the connection is closed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import LifoQueue
from typing import TypeVar

from slimelite.base.lifecycle import start_module
from slimelite.base.processes import is_stopped, show_stacks
from slimelite.base.registry import function
from slimelite.rewards.rules import GRADER_MEMORY_MB, RULES, Answer, Exchange, Failure, Reward, TooCostly
from slimelite.slime.plugins import files_run, run_file

Task = tuple[str, Answer] | Exchange
T = TypeVar("T", bound=Task)

# number of tasks in one message to a worker; a round trip takes 0.2 ms, an answer that needs algebra takes 10 ms
CHUNK = 8
START_SECONDS = 120.0
RULES_PROGRAM = ("slimelite.rewards.workers",)
# time between two checks of an idle worker that its parent is alive [s]; needed because a fork of the parent may keep
# the connection open
LOOK_SECONDS = 10.0
# limits of processor time for one answer of a bounded rule [s]. SOFT counts user and system time: an exception is
# raised, but only after a running C call has returned. HARD counts only user time: the process ends immediately
SOFT_SECONDS, HARD_SECONDS = 1.0, 1.5


class WorkerPool:
    """A pool of at most ``size`` worker processes, which are started when they are needed. ``timeout``: the time limit
    for grading one response [s]."""

    def __init__(
        self,
        size: int,
        timeout: float,
        *,
        program: Sequence[str] = RULES_PROGRAM,
        chunk: int = CHUNK,
        start_seconds: float = START_SECONDS,
    ) -> None:
        """``program``: module and arguments of a worker. ``chunk``: the number of tasks that a worker gets in one
        message."""
        self._chunk = chunk
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="grading")
        self._workers = [_Worker(timeout, program, start_seconds) for _ in range(size)]
        # last in, first out, so a light load uses only workers that are already started
        self._idle: LifoQueue[_Worker] = LifoQueue()
        for worker in self._workers:
            self._idle.put(worker)

    async def run(self, tasks: Sequence[Task]) -> list[Reward | Failure]:
        """The result for each task, in order. For a task (rule name, `Answer`), the result is what the rule's function
        ``slow`` returns. For an `Exchange`, it is the score of the reward model.

        Raises:
            RuntimeError: a worker process cannot be started.
            ValueError: a worker reports an error at its start, such as a model that cannot be loaded. The exception
                contains the worker's message.
        """
        loop = asyncio.get_running_loop()
        chunks = [tasks[i : i + self._chunk] for i in range(0, len(tasks), self._chunk)]
        results = await asyncio.gather(*(loop.run_in_executor(self._threads, self._grade, chunk) for chunk in chunks))
        return [reward for part in results for reward in part]

    def start(self) -> None:
        """Start the first worker now, so the first task need not wait for the worker's imports. This method raises the
        same errors as `run`."""
        self._workers[-1]._start()

    def _grade(self, chunk: Sequence[Task]) -> list[Reward | Failure]:
        worker = self._idle.get()  # never waits, because there is one worker for each thread
        try:
            return worker.grade(chunk)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End all workers. Tasks that are in progress fail."""
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
        """Grade ``tasks``, and return the results in order. If the process hangs or crashes, its current task gets a
        `Failure`, and a new process gets the remaining tasks.

        But if another program has stopped or killed the process, the new process first repeats the current task. A task
        is repeated only once.
        """
        results: list[Reward | Failure] = []
        again = -1
        while len(results) < len(tasks):
            if self._process is None or self._process.poll() is not None:
                self._start()
            assert self._connection is not None
            try:
                self._connection.send(tasks[len(results) :])
                while len(results) < len(tasks):
                    if not self._connection.poll(self._timeout):
                        stopped, here = self._process is not None and is_stopped(self._process.pid), len(results)
                        self._kill()
                        if stopped and again != here:
                            again = here
                            break
                        results.append(Failure("timeout", f"no result within {self._timeout:g} s (--reward-timeout)"))
                        break
                    results.append(self._connection.recv())
            except (EOFError, OSError):
                code = self._kill()
                if code == -signal.SIGKILL and again != len(results):
                    again = len(results)
                    continue
                kind = "costly" if code == -signal.SIGVTALRM else "crash"
                results.append(Failure(kind, f"the grading process ended with exit code {code}"))
        return results

    def close(self) -> None:
        """End the process, and do not start it again."""
        self._closed = True
        self._kill()

    def _start(self) -> None:
        if self._closed:
            raise RuntimeError("the grader is closed")
        self._kill()
        self._connection, theirs = Pipe()
        words = [*self._program, str(theirs.fileno()), str(self._timeout), *files_run]
        self._process = start_module(*words, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        try:
            ready = self._connection.poll(self._start_seconds) and self._connection.recv()
        except EOFError:
            ready = False
        if not ready:
            code = self._kill()
            raise RuntimeError(
                f"the grading process did not start within {self._start_seconds:g} s (exit code {code}); see stderr "
                "for the reason"
            )
        if ready != "ready":
            self._kill()
            raise ValueError(ready)

    def _kill(self) -> int | None:
        """End the process now, and return its exit code."""
        if self._process is None or self._connection is None:
            return None
        self._process.kill()
        code = self._process.wait()
        self._connection.close()
        self._process = self._connection = None
        return code


def main(descriptor: int, seconds: float, files: Sequence[str]) -> None:
    """Grade the tasks that arrive, until the parent process closes its end of the connection. ``files``: the files of
    ``--import-file``, which may define rules."""
    for file in files:
        run_file(file, "--import-file")
    # loads sympy and the grammar before the time limit of the first answer starts
    from slimelite.rewards import symbolic

    logging.disable(logging.CRITICAL)  # math-verify logs a warning for every answer that it cannot read
    symbolic.equivalent("1+x", "x+1")
    resource.setrlimit(resource.RLIMIT_AS, (GRADER_MEMORY_MB << 20,) * 2)
    signal.signal(signal.SIGPROF, out_of_time)

    def verdicts(tasks: list[tuple[str, Answer]]) -> Iterator[Reward | Failure]:
        return (graded(name, answer) for name, answer in tasks)

    serve(descriptor, seconds, verdicts)


def serve(descriptor: int, seconds: float, verdicts: Callable[[list[T]], Iterable[Reward | Failure]]) -> None:
    """Receive lists of tasks, call ``verdicts`` with each list, and send back the results one by one, until the parent
    process closes its end of the connection.

    ``seconds``: the time for which the parent process waits for one result.
    """
    # the parent kills a worker that takes too long; if the parent is gone, the alarm ends the worker
    alarm = math.ceil(seconds) + 5
    show_stacks()
    with Connection(descriptor) as connection:
        parent = os.getppid()
        connection.send("ready")
        while True:
            if not connection.poll(LOOK_SECONDS):
                if os.getppid() != parent:
                    return
                continue
            try:
                tasks = connection.recv()
            except EOFError:
                return
            signal.alarm(alarm)
            for verdict in verdicts(tasks):
                connection.send(verdict)
                signal.alarm(alarm)
            signal.alarm(0)


def graded(name: str, answer: Answer) -> Reward | Failure:
    """The result of the function ``slow`` of the rule ``name`` for one answer. If the function raises an exception, the
    result is a `Failure`."""
    rule = RULES[name]
    assert rule.slow is not None, f"{name} has no second step"
    slow: Callable[[Answer], Reward] = function(rule.slow)
    try:
        try:
            limit_processor_time(SOFT_SECONDS if rule.bounded else 0.0, HARD_SECONDS if rule.bounded else 0.0)
            return slow(answer)
        finally:
            limit_processor_time(0.0, 0.0)
    except TooCostly as cost:
        limit_processor_time(0.0, 0.0)  # the exception may have interrupted the call above
        return Failure("costly", str(cost))
    except Exception as error:
        return Failure("exception", f"{type(error).__name__}: {error}", traceback.format_exc())


def limit_processor_time(soft: float, hard: float) -> None:
    """Set two time limits for this process. After ``soft`` seconds of processor time, `TooCostly` is raised. After
    ``hard`` seconds of processor time in user mode, the process ends. A value of 0 means no limit.

    The limits are on processor time, so results do not depend on how busy the machine is. `TooCostly` is raised
    repeatedly, because a bare ``except`` in the running code may catch it.
    """
    signal.setitimer(signal.ITIMER_PROF, soft, 0.1 if soft else 0.0)
    signal.setitimer(signal.ITIMER_VIRTUAL, hard)


def out_of_time(*_: object) -> None:
    raise TooCostly(f"no verdict within {SOFT_SECONDS:g} s of processor time")


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
