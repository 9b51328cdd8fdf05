"""Reads the state of this machine's processes from /proc: stopped processes, idle processes, and their stacks."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

# a process has this long to write its stack after the signal [s]
STACK_S = 3.0
# a worker does nothing if its CPU share, page faults per second and bytes read per second are below these limits
IDLE_SHARE, IDLE_FAULTS, IDLE_BYTES = 0.02, 1.0, 1000.0
# if the kernel killed a process, a worker that dies within this time was probably that process [s]
RECENT_S = 30.0
TICKS = os.sysconf("SC_CLK_TCK")
SHOW_STACK = signal.SIGUSR2
FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')
# the files in which our threads wait for work; messages leave these files out
WAITING_FILES = ("threading.py", "queue.py", "selectors.py", "base_events.py", ">")


@dataclass(frozen=True, slots=True)
class Process:
    """A process at one moment. ``state``: the letter of proc(5). ``cpu``: the CPU seconds that the process has used so
    far. ``faults``: pages read from disk."""

    pid: int
    parent: int
    state: str
    started: int
    cpu: float
    faults: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """A process that has been stopped (SIGSTOP) for ``seconds``. ``log``: the log of the worker that the process
    belongs to."""

    pid: int
    seconds: float
    command: str
    log: str | None
    is_worker: bool


@dataclass(frozen=True, slots=True)
class Sight:
    """The result of `Machine.look`. ``pids``: log -> process id of the worker. ``still``: log -> time for which the
    worker has done nothing [s]."""

    pids: Mapping[str, int]
    still: Mapping[str, float]
    stopped: Sequence[Stopped]


@dataclass(slots=True)
class _Window:
    """The time when a worker and its children were last active, and their counters at that time."""

    since: float
    cpu: float
    faults: int
    read: int


@dataclass(slots=True)
class Machine:
    """Observes the processes of this machine. ``limit``: a worker may do nothing for this long [s].

    A worker is recognised by its log, because the log is the worker's stderr. The processes that a worker or this
    process has started also belong to the run.
    """

    limit: float
    _windows: dict[tuple[str, int], _Window] = field(default_factory=dict)
    _stopped: dict[tuple[int, int], float] = field(default_factory=dict)
    _pids: dict[str, tuple[int, int]] = field(default_factory=dict)
    _looked: float = field(default_factory=time.monotonic)

    def look(self, logs: Sequence[str]) -> Sight:
        """The state of the workers with these logs, and every stopped process of the run."""
        now, processes = time.monotonic(), {each.pid: each for each in snapshot()}
        if now - self._looked > max(self.limit / 2, 1.0):  # this process or the machine was stopped
            self._windows.clear()
            self._stopped.clear()
        self._looked = now
        self._find(logs, processes)
        families = {log: list(_family(pid, processes)) for log, (pid, _) in self._pids.items() if log in logs}
        still = {log: self._still(log, family, now) for log, family in families.items()}
        owners: dict[int, str | None] = {each.pid: None for each in _family(os.getpid(), processes)}
        owners |= {each.pid: log for log, family in families.items() for each in family}
        return Sight(
            {log: family[0].pid for log, family in families.items()},
            still,
            list(self._find_stopped(processes, owners, now)),
        )

    def _find(self, logs: Sequence[str], processes: Mapping[int, Process]) -> None:
        for log, (pid, started) in list(self._pids.items()):
            if pid not in processes or processes[pid].started != started:
                del self._pids[log]
        missing = {os.path.realpath(log): log for log in logs if log not in self._pids}
        if not missing:
            return
        for process in sorted(processes.values(), key=lambda each: each.started):
            with suppress(OSError):
                its = missing.get(os.readlink(f"/proc/{process.pid}/fd/2"))
                if its is not None and its not in self._pids and process.state != "Z":
                    self._pids[its] = process.pid, process.started

    def _still(self, log: str, family: Sequence[Process], now: float) -> float:
        cpu, faults = sum(each.cpu for each in family), sum(each.faults for each in family)
        read = sum(bytes_read(each.pid) for each in family)
        key = log, family[0].pid
        window = self._windows.setdefault(key, _Window(now, cpu, faults, read))
        # when a child ends, the sum loses its CPU seconds; that counts as activity too
        moved = not 0 <= cpu - window.cpu <= IDLE_SHARE * self.limit
        moved = moved or not 0 <= faults - window.faults <= IDLE_FAULTS * self.limit
        moved = moved or not 0 <= read - window.read <= IDLE_BYTES * self.limit
        states = set() if moved or now - window.since < self.limit else _states(family)
        if moved or "D" in states:  # D: it waits for a disk or a file server, which may be slow
            self._windows[key] = window = _Window(now, cpu, faults, read)
        return 0.0 if "R" in states else now - window.since  # R: it waits only for a free core

    def _find_stopped(
        self, processes: Mapping[int, Process], owners: Mapping[int, str | None], now: float
    ) -> Iterator[Stopped]:
        stops = {}
        for pid, log in owners.items():
            if (each := processes[pid]).state == "T":
                since = stops[pid, each.started] = self._stopped.get((pid, each.started), now)
                is_worker = log is not None and self._pids[log][0] == pid
                yield Stopped(pid, now - since, command(pid), log, is_worker)
        self._stopped = stops

    def stack(self, pid: int, log: str) -> str:
        """See `stack`."""
        return stack(pid, log)

    def send(self, pid: int, number: int) -> None:
        """Send a signal to a process."""
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def snapshot() -> Iterator[Process]:
    """All processes of this machine that /proc shows."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError, IndexError):
                fields = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
                cpu = (int(fields[11]) + int(fields[12])) / TICKS
                yield Process(int(name), int(fields[1]), fields[0].decode(), int(fields[19]), cpu, int(fields[9]))


class MemoryKills:
    """Counts the processes that the kernel has killed because the machine or a control group was out of memory."""

    def __init__(self) -> None:
        self._noted = deque[tuple[float, int]]()
        self.look()

    def look(self) -> None:
        """Record how many processes the kernel has killed for lack of memory. The monitor calls this several times per
        `RECENT_S` seconds."""
        if (count := _memory_kills()) is not None:
            self._noted.append((time.monotonic(), count))
        while len(self._noted) > 1 and self._noted[1][0] < time.monotonic() - RECENT_S:
            self._noted.popleft()

    def recent(self) -> int | None:
        """The number of processes that the kernel killed for lack of memory in the last `RECENT_S` seconds. None if
        this kernel does not count such kills, or if `look` was not called lately."""
        count = _memory_kills()
        if count is None or not self._noted:
            return None
        since, before = self._noted[0]
        long_ago = time.monotonic() - since > 2 * RECENT_S  # --hang-timeout is 0 or long: a kill may be an old one
        return None if long_ago and count > before else count - before


def _memory_kills() -> int | None:
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def bytes_read(pid: int) -> int:
    """Bytes that a process has read from files and pipes; 0 if the kernel does not report it."""
    with suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/io").read_bytes().split(maxsplit=2)[1])
    return 0


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped (SIGSTOP)."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"T"
    return False


def waited(pid: int | None = None) -> float:
    """Seconds for which a thread was ready to run but had no processor; 0 if the kernel does not report it.

    ``pid``: a process; the result is the longest time of its threads. None: the time of the calling thread.
    """
    files = [Path("/proc/thread-self/schedstat")] if pid is None else Path(f"/proc/{pid}/task").glob("*/schedstat")
    longest = 0.0
    with suppress(OSError):
        for file in files:
            with suppress(OSError, IndexError, ValueError):
                longest = max(longest, int(file.read_text().split()[1]) / 1e9)
    return longest


def command(pid: int) -> str:
    """The command line of a process; empty if the process is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def _family(pid: int, processes: Mapping[int, Process]) -> Iterator[Process]:
    """A process and all its descendants."""
    children: dict[int, list[int]] = {}
    for each in processes.values():
        children.setdefault(each.parent, []).append(each.pid)
    left = [pid]
    while left:
        yield processes[left[0]]
        left += children.get(left.pop(0), [])


def _states(family: Sequence[Process]) -> set[str]:
    """States of all threads of these processes."""
    states = set()
    for task in (task for each in family for task in Path(f"/proc/{each.pid}/task").glob("*")):
        with suppress(OSError):
            states.add((task / "stat").read_bytes().rpartition(b")")[2].split()[0].decode())
    return states


def show_stacks() -> None:
    """From now on, this process writes the stacks of its threads to its stderr when `stack` asks for them.

    The handler is written in C, so it works even while another thread holds Python's global lock.
    """
    faulthandler.register(SHOW_STACK, all_threads=True, chain=False)


def stack(pid: int, log: str) -> str:
    """The stack of a process that called `show_stacks`, as "file:line in function < ...", innermost call first. The
    text is empty if the process does not answer.

    The process writes the stacks of all its threads to ``log``. If the process is stopped, this function continues it
    (SIGCONT).
    """
    with suppress(OSError, ValueError):
        caught = int(re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.M)[1], 16)  # type: ignore[index]
        if not caught >> (SHOW_STACK - 1) & 1:
            return ""
        size = os.path.getsize(log)
        os.kill(pid, SHOW_STACK)
        os.kill(pid, signal.SIGCONT)
        text, deadline = "", time.monotonic() + STACK_S
        while time.monotonic() < deadline:
            time.sleep(0.05)
            before, text = text, Path(log).read_bytes()[size:].decode(errors="replace")
            if text and text == before:
                break
        return busiest(text)
    return ""


def busiest(dump: str) -> str:
    """The stack of the thread with the most calls in our code, from faulthandler's output ``dump``."""
    stacks = []
    for part in re.split(r"^(?:Current thread|Thread) .*$", dump, flags=re.M)[1:]:
        frames = [match.groups() for line in part.splitlines() if (match := FRAME.match(line))]
        stacks.append((sum("slimelite" in file for file, _, _ in frames), frames))
    ours, frames = max(stacks, key=lambda each: each[0], default=(0, []))
    if not ours:
        return ""
    named = [frame for frame in frames if not frame[0].endswith(WAITING_FILES)] or frames
    return " < ".join(f"{'/'.join(Path(file).parts[-3:])}:{line} in {name}" for file, line, name in named[:4])
