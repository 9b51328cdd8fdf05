"""Handles the early end of a run: by Ctrl-C, by SIGTERM, or without a chance to react (SIGKILL, out of memory).

This file is also the program of the watchdog process, so it imports only the standard library.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, ClassVar

# `slimelite.base.guard` replaces the function in the module os while plugins run
end_process = os._exit
# environment variables of a run's child processes. The first one marks them. The second one is for setproctitle, with
# which Ray names its processes: then a long name does not overwrite the environment in /proc
MARK, KEEP = "SLIMELITE_RUN", "SPT_NOENV"
# number of times that `--max-restarts` has restarted this run; not set without the flag
ATTEMPT = "SLIMELITE_ATTEMPT"
WITHOUT_A_WORD = "stopped without a word"
KILLED = "train.py was killed (SIGKILL), by hand, by a job scheduler, or because the machine ran out of memory"
# a launcher may signal a process and then its group; two signals within this time count as one [s]
SAME_SIGNAL_S = 1.0
SWEEP_S = 10.0
# the kernel's flag PF_EXITING: a process that ends closes its pipes before it becomes a zombie
EXITING = 0x4
ALL_IS_WELL = b"."


class Stopped(KeyboardInterrupt):
    """Ctrl-C or SIGTERM, raised in the main thread. ``status``: the exit status, 128 + the signal's number."""

    def __init__(self, number: int) -> None:
        super().__init__(number)  # torch's checkpointing pickles this exception and rebuilds it from its arguments
        self._name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        self.status = 128 + number

    def __str__(self) -> str:
        return self._name


class RolloutError(ValueError):
    """A rollout cannot be finished. ``metrics``: the rollout's counts up to the error, as ``rollout/...``."""

    def __init__(self, message: str, metrics: Mapping[str, float]) -> None:
        super().__init__(message, metrics)  # Ray pickles this exception and rebuilds it from its arguments
        self.metrics = metrics

    def __str__(self) -> str:
        return str(self.args[0])


class StopSignals:
    """Inside this block, the first Ctrl-C or SIGTERM raises `Stopped`. A second signal ends the process at once.

    The block catches `Stopped`, and ``status`` is then the exit status. If a signal arrives inside a finalizer
    (``__del__``, for example of a pyarrow file), Python drops the exception. Therefore code that waits calls `check`,
    which raises `Stopped` again.
    """

    status = 0
    _number: ClassVar[int | None] = None  # number of the first signal, inside the block

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._first: float | None = None

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup and & ignore Ctrl-C
                    self._before[number] = signal.signal(number, self) or signal.SIG_DFL
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> bool:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        StopSignals._number = None
        if isinstance(error, Stopped):
            self.status = error.status
        return isinstance(error, Stopped)

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        stopped, now = Stopped(number), time.monotonic()
        if self._first is None:
            self._first, StopSignals._number = now, number
            _say(f"{stopped}: the run is shutting down; a second {stopped} ends it at once")
            raise stopped
        if now - self._first > SAME_SIGNAL_S:
            end_process(stopped.status)  # the signal may arrive in a plugin

    @classmethod
    def check(cls) -> None:
        """Raise `Stopped` if a signal was received. A run's loop calls this method in case the first exception was
        lost."""
        if cls._number is not None:
            raise Stopped(cls._number)


def _say(text: str) -> None:
    # no print(): the main thread may be inside one. The first newline ends a progress bar on a terminal
    with suppress(OSError):
        os.write(1, ("\n" * os.isatty(1) + text + "\n").encode())


def start_module(module: str, *words: str, **options: Any) -> subprocess.Popen[Any]:
    """Start ``python -m module words``, with the ``options`` of Popen. The new process can import our package.

    Ctrl-C reaches only the parent of the process.
    """
    path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *words],  # -P: the current folder is not searched for modules
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
        start_new_session=True,
        **options,
    )


class Watchdog:
    """A small process that outlives this process, and kills the processes that this process left behind.

    The watchdog acts when this process dies or leaves the block with an error. The watchdog then kills every process of
    the run, such as Ray's daemons, actors and servers. A mark in their environment variables identifies these
    processes. If the run could not write its status, the watchdog writes the status. ``folder``: the run folder.
    ``explain``: a command that prints a possible reason why the run was killed.
    """

    _current: ClassVar[Watchdog | None] = None

    def __init__(self, folder: str | Path, explain: Sequence[str] = ()) -> None:
        self._folder, self._explain = Path(folder).absolute(), explain
        self._mark = secrets.token_hex(16)

    def __enter__(self) -> Watchdog:
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), self._mark, str(self._folder)]
        self._process = subprocess.Popen(
            [*command, *self._explain],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},  # for ``explain``; -I ignores it
            start_new_session=True,
        )
        self._before = {name: os.environ.get(name) for name in (MARK, KEEP)}
        os.environ.update({MARK: self._mark, KEEP: "1"})
        Watchdog._current = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        Watchdog._current = None
        for name, value in self._before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as stdin:  # closing the pipe flushes it
            if error is None:
                stdin.write(ALL_IS_WELL)
        self._process.wait()

    @classmethod
    def note_session(cls, session: Path) -> None:
        """Tell the watchdog to remove this folder of Ray when this process ends, even if Ray's daemons are already
        gone."""
        if cls._current is not None and (stdin := cls._current._process.stdin) is not None:
            with suppress(BrokenPipeError):
                stdin.write(f"{session}\n".encode())
                stdin.flush()


def this_process() -> dict[str, object]:
    """A unique description of this process: host, process id, and start time in ticks since boot."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": _started(os.getpid())}


def is_gone(process: Mapping[str, Any]) -> bool:
    """Whether the process that `this_process` described is dead. False for a process on another host, because its state
    is unknown."""
    return process.get("host") == socket.gethostname() and process.get("started") != _started(process["pid"])


def _started(pid: int) -> int | None:
    try:
        # the fields from number 3 on; the process name before them may contain spaces and brackets
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] == b"Z" or int(fields[6]) & EXITING else int(fields[19])


def read_status(folder: str | Path) -> dict[str, Any]:
    """The content of status.json in a run folder; empty if there is no such file.

    If the file has the status "running" but the process is gone, the result has the status "stopped without a word".
    In this case the watchdog died too: a scheduler killed the whole job, or the machine went down.
    """
    try:
        status: Any = json.loads((Path(folder) / "status.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(status, dict):
        return {}
    if status.get("status") == "running" and {"started", "pid"} <= status.keys() and is_gone(status):
        status |= {"status": WITHOUT_A_WORD, "message": KILLED}
    return status


def _watch(pid: int, mark: str, folder: Path, explain: list[str]) -> None:
    """The watchdog's program."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    waiting = select.poll()
    waiting.register(0, select.POLLIN)
    with suppress(OSError):  # an old kernel: then only the closed pipe shows the end of the process
        waiting.register(os.pidfd_open(pid), select.POLLIN)
    *noted, last = _words(waiting).split(b"\n")
    if last == ALL_IS_WELL:
        return
    deadline, sessions = time.monotonic() + SWEEP_S, {Path(os.fsdecode(session)) for session in noted}
    while left := list(_marked(mark)):
        sessions |= {session for child in left for session in _sessions(child)}
        for child in left:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    for session in sessions:
        _remove(session)
    _set_status(folder, pid, explain)


def _words(waiting: select.poll) -> bytes:
    """The text that the process wrote before it ended or left its block: a line for each session, and `ALL_IS_WELL` if
    there was no error."""
    words = b""
    os.set_blocking(0, False)
    while True:
        gone = any(source != 0 for source, _ in waiting.poll())
        with suppress(BlockingIOError):
            while part := os.read(0, 1 << 16):
                words += part
            return words  # the process has closed the pipe
        if gone:
            return words


def _marked(mark: str) -> Iterator[int]:
    """Process ids of the processes with ``mark`` in their environment."""
    entry = f"{MARK}={mark}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if entry in (process / "environ").read_bytes().split(b"\0"):
                yield int(process.name)


def end_session(session: Path) -> None:
    """Remove the folder of this process's Ray after Ray has ended, and kill processes that a killed daemon left."""
    if mark := os.environ.get(MARK):
        for child in _marked(mark):
            with suppress(OSError):
                if _command(child).startswith("ray::") or session in _sessions(child):
                    os.kill(child, signal.SIGKILL)
    _remove(session)


def _remove(session: Path) -> None:
    shutil.rmtree(session, ignore_errors=True)
    latest = session.parent / "session_latest"
    with suppress(OSError):
        if os.readlink(latest) in (str(session), session.name):
            latest.unlink()


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")


def _sessions(pid: int) -> set[Path]:
    """Folders of Ray in the command line of one of its daemons."""
    with suppress(OSError):
        return {Path(path) for path in re.findall(r"=(/\S*/session_[\d_-]+)/logs", _command(pid))}
    return set()


def _set_status(folder: Path, pid: int, explain: list[str]) -> None:
    status = _status_of(folder, pid)
    if status is None:
        return
    for left in folder.glob("*.partial"):
        left.unlink(missing_ok=True)
    _write_status(folder, status)
    if explain:
        done = subprocess.run(explain, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        # the command took seconds; another run may have begun in the folder during that time
        if done.stdout.strip() and _status_of(folder, pid) is not None:
            _write_status(folder, status | {"message": f"{status['message']}. {done.stdout.strip()}"})


def _status_of(folder: Path, pid: int) -> dict[str, Any] | None:
    """The status in ``folder``, if process ``pid`` wrote this status and then died without writing its final status."""
    status = read_status(folder)
    return status if status.get("pid") == pid and status["status"] == WITHOUT_A_WORD else None


def _write_status(folder: Path, status: dict[str, Any]) -> None:
    partial = folder / "status.json.partial"
    partial.write_text(json.dumps(status, indent=1) + "\n", encoding="utf-8")
    partial.replace(folder / "status.json")


if __name__ == "__main__":
    _watch(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
