"""``--max-restarts N``: if a machine, Ray or the network ends a run, the same command restarts the run.

The command then has two processes: the run itself, and its parent, which only waits. The parent does not use Ray, so a
failure of Ray does not affect the parent.
"""

from __future__ import annotations

import builtins
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from types import FrameType
from typing import IO, Any, Protocol

from slimelite.base.lifecycle import ATTEMPT, WITHOUT_A_WORD, Stopped, read_status

# the first and the longest pause before a restart [s]; each restart without a new rollout doubles the pause
FIRST_PAUSE_S, MOST_PAUSE_S = 1.0, 60.0
# a run that fails this many times in the same rollout would fail there again
SAME_ROLLOUT = 3
# errors, besides OSError, that are not a mistake of the user
OUTSIDE = ("ClusterError:", "EngineLostError:")
PR_SET_PDEATHSIG = 1
# the program that plans ranks and engines for the remaining machines
ELASTIC = "slimelite.cluster.elastic"


class Settings(Protocol):
    """The flags of the run that the parent process needs."""

    @property
    def run_dir(self) -> str: ...
    @property
    def save(self) -> str | None: ...
    @property
    def max_restarts(self) -> int: ...
    @property
    def elastic(self) -> bool: ...


def keep_running(program: str, argv: Sequence[str], args: Settings) -> int:
    """Run ``program`` with ``argv`` until the program finishes, or fails because of a mistake of the user. Returns the
    program's exit status.

    A restart resumes from the newest complete checkpoint in ``--save``. Without a checkpoint, the run begins again.
    Ctrl-C and SIGTERM are passed on to the run.

    Raises:
        Stopped: Ctrl-C or SIGTERM was received between two starts.
    """
    parent, words, failures, pause = _Parent(), ["--run-dir", args.run_dir], Counter[int](), FIRST_PAUSE_S
    with parent:
        for attempt in range(args.max_restarts + 1):
            code = parent.run([sys.executable, program, *argv, *words], attempt)
            if parent.stopped or (why := _mishap(args.run_dir, code, parent.pid)) is None:
                return code if code >= 0 else 128 - code
            done = read_status(args.run_dir).get("rollouts_done") or 0
            failures[done] += 1
            if failures[done] == SAME_ROLLOUT:
                return _give_up(f"rollout {done} has failed {SAME_ROLLOUT} times, the last time with: {why}")
            if attempt == args.max_restarts:
                return _give_up(f"the run was started again {attempt} times (--max-restarts): {why}")
            pause = FIRST_PAUSE_S if failures[done] == 1 else min(2 * pause, MOST_PAUSE_S)
            _say(f"start {attempt + 2} of {args.max_restarts + 1} in {pause:g} s")
            time.sleep(pause)
            words = ["--run-dir", args.run_dir, "--load", str(args.save)]
            if args.elastic and os.environ.get("RAY_ADDRESS"):
                words += parent.plan([*argv, *words])
    raise AssertionError("unreachable")


def _give_up(why: str) -> int:
    _say(f"not started again: {why}")
    return 1


def _say(text: str) -> None:
    print(f"train.py: {text}", file=sys.stderr, flush=True)


def _mishap(run_dir: str, code: int, pid: int) -> str | None:
    """The reason why process ``pid`` of the run ended, if a restart may help. None if the run is finished, or if a
    restarted run would fail again."""
    status = read_status(run_dir)
    if code == 0 or status.get("pid") != pid:  # another pid: it ended before it began to work
        return None
    message = str(status.get("message"))
    kind = getattr(builtins, message.partition(":")[0], None)
    outside = message.startswith(OUTSIDE) or (isinstance(kind, type) and issubclass(kind, OSError))
    killed = code < 0 or status.get("status") == WITHOUT_A_WORD
    return message if killed or (status.get("status") == "failed" and outside) else None


class _Parent:
    """Starts processes, and passes signals on to the running process.

    ``pid``: the id of the running process, or of the last process. ``stopped``: the number of the received signal; 0 if
    there was none.
    """

    def __init__(self) -> None:
        self.stopped, self.pid = 0, 0
        self._child: subprocess.Popen[bytes] | None = None
        self._before: dict[int, Any] = {}
        self._prctl = ctypes.CDLL(None).prctl

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._hand_on)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def run(
        self, command: Sequence[str], attempt: int, out: IO[str] | None = None, more: Mapping[str, str] | None = None
    ) -> int:
        """Run ``command`` to its end, in this process's group, and return its exit code. If this process dies, the
        command ends too.

        ``out``: a file for the command's output. ``more``: variables in addition to this process's environment.
        """
        environment = {**os.environ, **(more or {}), ATTEMPT: str(attempt)}
        self._child = subprocess.Popen(command, env=environment, stdout=out, preexec_fn=self._end_with_parent)
        self.pid = self._child.pid
        try:
            return self._child.wait()
        finally:
            self._child = None

    def plan(self, words: Sequence[str]) -> list[str]:
        """Additional flags that make the run of ``words`` fit the remaining machines.

        The list is empty if the run fits already, or if no run fits the remaining machines. In the second case, the run
        waits for machines, and prints a message about the wait.
        """
        # the path lets the process find our package, in whatever folder the run was started
        path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", ""))))
        with TemporaryFile("w+") as out:
            failed = self.run([sys.executable, "-m", ELASTIC, *words], 0, out, {"PYTHONPATH": path})
            if self.stopped:
                raise Stopped(self.stopped)
            if failed:
                return []
            out.seek(0)
            less: list[str] = json.loads(out.read().splitlines()[-1])
        if less:
            _say(f"fewer machines answer than before (--elastic): this start uses {' '.join(less)}")
        return less

    def _end_with_parent(self) -> None:
        self._prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    def _hand_on(self, number: int, _frame: FrameType | None) -> None:
        self.stopped = number
        if self._child is None:
            raise Stopped(number)
        self._child.send_signal(number)
