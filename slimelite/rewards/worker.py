"""A grading process: ``python -m slimelite.rewards.worker FD SECONDS``.

It takes lists of (rule name, answer) from the connection on file descriptor FD, and answers each with a reward or a
`Failure`, one by one, so that its parent knows which answer it is on. It ends when the connection does.
"""

from __future__ import annotations

import logging
import math
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from slimelite.rewards.registry import RULES
from slimelite.rewards.rule import Answer, Failure, Reward, TooCostly

MEMORY_BYTES = 4 << 30
# how often an idle worker looks whether its parent lives; a fork of the parent may hold the connection open [s]
LOOK_SECONDS = 10.0
# processor time that an answer of a bounded rule may take [s]: in all, until an exception is raised, which waits for a
# call into C to end; in user mode, until the process ends, which does not wait
SOFT_SECONDS, HARD_SECONDS = 1.0, 1.5


def main(descriptor: int, seconds: float) -> None:
    """Serve until the parent closes its end."""
    from slimelite.rewards import symbolic  # sympy is loaded, and its grammar read, before the first answer's time runs

    logging.disable(logging.CRITICAL)  # math-verify warns of every answer it cannot read
    symbolic.equivalent("1+x", "x+1")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGPROF, _out_of_time)

    def verdicts(tasks: list[tuple[str, Answer]]) -> Iterator[Reward | Failure]:
        return (graded(name, answer) for name, answer in tasks)

    serve(descriptor, seconds, verdicts)


def serve(descriptor: int, seconds: float, verdicts: Callable[[list[Any]], Iterable[Any]]) -> None:
    """Answer lists of tasks with their ``verdicts``, one by one, until the parent closes its end of the connection.

    ``seconds``: the parent's limit for one verdict.
    """
    # the parent kills a worker that takes too long; one that lost its parent is ended by its own alarm
    alarm = math.ceil(seconds) + 5
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
    """The slow verdict of a rule; what it raises is a failure of this answer alone."""
    rule = RULES[name]
    assert rule.slow is not None, f"{name} has no second step"
    try:
        try:
            limit_processor_time(SOFT_SECONDS if rule.bounded else 0.0, HARD_SECONDS if rule.bounded else 0.0)
            return rule.slow(answer)
        finally:
            limit_processor_time(0.0, 0.0)
    except TooCostly as cost:
        limit_processor_time(0.0, 0.0)  # the exception may have come out of the call above
        return Failure("costly", str(cost))
    except Exception as error:
        return Failure("exception", f"{type(error).__name__}: {error}", traceback.format_exc())


def limit_processor_time(soft: float, hard: float) -> None:
    """From now on: `TooCostly` after ``soft`` seconds, the end of this process after ``hard`` in user mode; 0: never.

    It is processor time, so that no other load of the machine changes a verdict. The exception comes again and again,
    for a bare ``except`` may swallow it.
    """
    signal.setitimer(signal.ITIMER_PROF, soft, 0.1 if soft else 0.0)
    signal.setitimer(signal.ITIMER_VIRTUAL, hard)


def _out_of_time(*_: object) -> None:
    raise TooCostly(f"no verdict within {SOFT_SECONDS:g} s of processor time")


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
