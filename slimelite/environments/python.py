"""The environment ``python``, with a tool that runs Python code in the sandbox of the reward ``code``. Each call has
its own process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from slimelite.environments.tools import ToolEnvironment
from slimelite.rewards.code import run_code
from slimelite.rewards.rules import Failure
from slimelite.rewards.workers import WorkerPool, serve
from slimelite.sandbox.registry import NO_WISHES, SandboxSettings

# default time limit of one call [s], and its memory limit [MiB]
SECONDS = 10.0
MEMORY_MB = 1024
# errors are part of the output, because the model learns from them; the traceback has only frames of the program
PROGRAM = """
import sys, traceback
try:
    exec(compile({code!r}, "tool.py", "exec"), {{"__name__": "__main__"}})
except BaseException as error:
    trace = error.__traceback__
    traceback.print_exception(type(error), error, trace and trace.tb_next, file=sys.stdout)
"""


class Python(ToolEnvironment):
    """The environment. The run's reward (``--rm-type``) scores the episode."""

    def __init__(self, pool: WorkerPool, seconds: float) -> None:
        self._pool, self._seconds = pool, seconds

    async def python(self, code: str) -> str:
        """Run Python code and return what it prints. Nothing is kept between calls; there is no network."""
        (result,) = await self._pool.run([(code, self._seconds)])  # type: ignore[list-item]
        if isinstance(result, Failure):
            return f"Error: {result.message}"
        assert isinstance(result, dict)
        if not result["finished"]:
            return (
                f"{result['output']}\nError: the code did not end within {self._seconds:g} s, or used too much memory"
            )
        return str(result["output"]) or "(no output; print what you want to see)"

    def tools(self) -> Sequence[Callable[..., Any]]:
        """The Python interpreter."""
        return [self.python]


def make(spec: str, sandbox: SandboxSettings = NO_WISHES) -> Callable[[], Python]:
    """The factory of the environment. ``spec``: the time limit of a call [s].

    Raises:
        ValueError: the spec is not a number.
    """
    try:
        seconds = float(spec) if spec else SECONDS
    except ValueError:
        raise ValueError(
            f"--environment python:{spec}: give the time limit of a call in seconds after the colon, as in python:5"
        ) from None
    pool = WorkerPool(os.cpu_count() or 1, seconds + 5, program=(__name__, sandbox.name or "process"), chunk=1)
    return partial(Python, pool, seconds)


def _results(sandbox: str, tasks: Iterable[tuple[str, float]]) -> Iterator[dict[str, object]]:
    for code, seconds in tasks:
        run = run_code(PROGRAM.format(code=code), None, "", seconds=seconds, memory_mb=MEMORY_MB, sandbox=sandbox)
        yield {"finished": run.finished, "output": run.output}


if __name__ == "__main__":
    serve(int(sys.argv[2]), float(sys.argv[3]), partial(_results, sys.argv[1]))
