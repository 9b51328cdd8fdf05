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
from slimelite.rewards.rule import Answer, Failure, Reward

MEMORY_BYTES = 4 << 30
# how often an idle worker looks whether its parent lives; a fork of the parent may hold the connection open [s]
LOOK_SECONDS = 10.0


def main(descriptor: int, seconds: float) -> None:
    """Serve until the parent closes its end."""
    import slimelite.rewards.symbolic  # noqa: F401  sympy is loaded before the first answer's time runs

    logging.disable(logging.CRITICAL)  # math-verify warns of every answer it cannot read
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))

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
    slow = RULES[name].slow
    assert slow is not None, f"{name} has no second step"
    try:
        return slow(answer)
    except Exception as error:
        return Failure("exception", f"{type(error).__name__}: {error}", traceback.format_exc())


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
