"""Runs programs as agents. Each sample has its own process group. Run time, number of programs and output are
limited."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path

from slimelite.sandbox.registry import Launch, Sandbox

# length of the end of stdout and stderr that is kept, and length of the end that is written to the log [bytes]
KEPT, LOGGED = 1 << 16, 4000
# size at which a new log is begun; the previous log is kept as programs.log.1 [bytes]
LOG_BYTES = 8 << 20
# time between SIGTERM and SIGKILL for a program that took too long, and time to wait for output after the program's end
# [s]
GRACE_SECONDS = 2.0
# time between two checks whether a program has ended [s]; needed because a child may keep the program's output open
LOOK_SECONDS = 0.5
ON_LOOPBACK = "127.0.0.1,localhost"


@dataclass(frozen=True)
class Ended:
    """The result of a program. ``status``: the program's exit status. The status is negative for a signal, and None if
    the program took too long. ``output``, ``errors``: the ends of stdout and stderr. ``seconds``: the run time, without
    the time for which the program was paused.
    """

    status: int | None
    output: str
    errors: str
    seconds: float

    @property
    def reward(self) -> float | None:
        """The value of ``reward`` in the last output line that is a JSON object. Returns None if there is no such line
        or no such value.

        Raises:
            ValueError: the value is not a finite number.
        """
        for line in reversed(self.output.splitlines()):
            try:
                content = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(content, dict):
                reward = content.get("reward")
                # an integer with 400 digits is not a valid reward either
                number = isinstance(reward, int | float) and abs(reward) <= sys.float_info.max
                if reward is not None and not number:
                    raise ValueError(f"the program's reward is not a finite number: {reward!r:.100}")
                return None if reward is None else float(reward)
        return None


class Programs:
    """Runs ``command`` once for each sample. All calls use one event loop.

    Args:
        command: the program and its arguments. The command is not run by a shell.
        at_once: the maximum number of programs that run at the same time. Other programs wait.
        seconds: the time limit of one program, without the time for which it is paused.
        folder: the folder for ``programs.log``.
        sandbox: the sandbox for each program. If ``sandbox`` is None, the program runs as the current user, with the
            environment variables of this process.
    """

    def __init__(
        self, command: str, at_once: int, seconds: float, folder: Path, sandbox: Sandbox | None = None
    ) -> None:
        self._words, self._seconds, self._sandbox = shlex.split(command), seconds, sandbox
        # a sandbox itself ends all processes that its program started
        self._end = signal.SIGKILL if sandbox is None else signal.SIGINT
        self._room = asyncio.Semaphore(at_once)
        folder.mkdir(parents=True, exist_ok=True)
        self._log = RotatingFileHandler(folder / "programs.log", maxBytes=LOG_BYTES, backupCount=1, delay=True)

    async def run(
        self, row: Mapping[str, object], variables: Mapping[str, str], endpoint: str, pause: Callable[[], float]
    ) -> Ended:
        """Run the program with ``row`` as a line of JSON on stdin. Before this method returns, it ends the program's
        process group.

        ``variables``: environment variables for the program. ``endpoint``: the URL of the model. ``pause``: function
        that returns the time for which the program was paused so far [s].

        Raises:
            OSError: the program cannot be started.
        """
        async with self._room:
            more = {} if self._sandbox else os.environ
            proxies = {name: f"{ON_LOOPBACK},{more.get(name, '')}" for name in ("NO_PROXY", "no_proxy")}
            variables = {**proxies, **variables}
            if self._sandbox is None:
                launch = Launch(self._words, {**os.environ, **variables})
            else:
                launch = self._sandbox.launch(self._words, variables, endpoint)
            process = await asyncio.create_subprocess_exec(
                *launch.words,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=launch.environment,
                start_new_session=True,
            )
            begin = time.monotonic() - pause()
            assert process.stdout is not None
            assert process.stderr is not None
            ends = [bytearray(), bytearray()]
            talk = [
                asyncio.create_task(_tell(process, json.dumps(row, default=str))),
                *map(asyncio.create_task, map(_keep, (process.stdout, process.stderr), ends)),
            ]
            try:
                status = await self._wait(process, begin + self._seconds, pause)
                _signal(process, self._end)  # end child processes that still run and keep the output open
                await asyncio.wait(talk, timeout=GRACE_SECONDS)
            finally:
                _signal(process, self._end)
                for task in talk:
                    task.cancel()
                with suppress(TimeoutError):  # not in a separate task, because the end of a run would cancel it
                    async with asyncio.timeout(GRACE_SECONDS):
                        await process.wait()
                _signal(process, signal.SIGKILL)
            texts = [bytes(end).decode("utf-8", "replace") for end in ends]
            return Ended(status, texts[0], texts[1], time.monotonic() - pause() - begin)

    async def _wait(self, process: asyncio.subprocess.Process, end: float, pause: Callable[[], float]) -> int | None:
        ending = asyncio.ensure_future(process.wait())
        while (left := end + pause() - time.monotonic()) > 0:
            await asyncio.wait([ending], timeout=min(left, LOOK_SECONDS))
            if process.returncode is not None:  # `ending` would also wait for children that keep the output open
                return process.returncode
        _signal(process, signal.SIGTERM)
        await asyncio.wait([ending], timeout=GRACE_SECONDS)
        return None

    def log(self, name: str, ended: Ended, what: str) -> None:
        """Log how the program of a sample ended, with the end of its output."""
        entry = f"=== {name}: {what}, {ended.seconds:.1f} s"
        for stream, text in (("stdout", ended.output), ("stderr", ended.errors)):
            if text.strip():
                entry += f"\n--- {stream}\n{text[-LOGGED:].rstrip()}"
        self._log.emit(logging.makeLogRecord({"msg": entry}))

    def close(self) -> None:
        """Close the log."""
        self._log.close()


def _signal(process: asyncio.subprocess.Process, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


async def _tell(process: asyncio.subprocess.Process, line: str) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError, ConnectionResetError):  # a program may ignore its stdin
        process.stdin.write(line.encode() + b"\n")
        await process.stdin.drain()
        process.stdin.close()


async def _keep(stream: asyncio.StreamReader, end: bytearray) -> None:
    while chunk := await stream.read(KEPT):
        end += chunk
        del end[:-KEPT]
