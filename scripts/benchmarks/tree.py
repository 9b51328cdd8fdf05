"""Run one command, and count what all its processes use: CPU-seconds, marks on the way, peak memory.

    python scripts/benchmarks/tree.py --out used.json --watch run/metrics.jsonl --mark '"kind": "perf"' -- COMMAND

This process makes itself the reaper of all its descendants (``PR_SET_CHILD_SUBREAPER``). So daemons that detach, such
as Ray's, stay its descendants and are found by their parents' ids. CPU-seconds are user and system time of all threads.
There are two counts, and both can only be too low. The first is the last ticks in ``/proc`` of each process, which miss
the time after the last look. The second is the kernel's own sum over children that were waited for, which misses
processes whose parent ignores their end. The larger one is reported. Marks use the first count, because only that
exists while processes run.

Peak memory is the sum of the proportional set sizes of all processes, which count a shared page once. It is read twice
a second, or less often, so that reading takes at most 2 % of the time. The kernel walks every page of a process and
delays its page faults meanwhile (70 ms for 6 GB). A peak between two readings is missed. Processes that still run half
a minute after the command's end are killed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TICKS = os.sysconf("SC_CLK_TCK")
PR_SET_CHILD_SUBREAPER = 36
LOOK_S = 0.05
LOOK_AT_MEMORY_S = 0.5
MEMORY_SHARE = 0.02  # of the time, at most, goes into looking at memory
LEFT_OVER_S = float(os.environ.get("BENCHMARKS_LEFT_OVER_S", "30"))


@dataclass
class Tree:
    """All descendants of this process that were ever seen."""

    # (process id, start time) to its name and CPU-seconds; the start time tells a reused id from the first one
    cpu: dict[tuple[int, str], float] = field(default_factory=dict)
    names: dict[tuple[int, str], str] = field(default_factory=dict)
    alive: list[int] = field(default_factory=list)
    others: set[int] = field(default_factory=lambda: {os.getpid()})
    peak_pss: int = 0

    def look(self) -> float:
        """Read every descendant once. Returns the CPU-seconds of all of them so far."""
        listed = {int(entry) for entry in os.listdir("/proc") if entry.isdigit()}
        self.others &= listed  # an id that is gone may come back as another process
        parents: dict[int, int] = {}
        seen: dict[int, tuple[tuple[int, str], float, str]] = {}
        for process in listed - self.others:
            with suppress(OSError, ValueError):
                name, _, rest = Path(f"/proc/{process}/stat").read_text().partition("(")[2].rpartition(")")
                part = rest.split()
                parents[process] = int(part[1])
                seen[process] = (process, part[19]), (int(part[11]) + int(part[12])) / TICKS, name
        mine = {os.getpid()}
        while more := {p for p, parent in parents.items() if parent in mine} - mine:
            mine |= more
        self.alive = sorted(mine - {os.getpid()})
        # one whose parent ended before it was read is decided at the next look
        strangers = parents.keys() - mine
        self.others |= {p for p in strangers if parents[p] == 0 or parents[p] in self.others | strangers}
        for process in self.alive:
            key, spent, self.names[key] = seen[process]
            self.cpu[key] = max(spent, self.cpu.get(key, 0.0))
        return sum(self.cpu.values())

    def look_at_memory(self) -> None:
        """Add up the proportional set sizes [bytes]."""
        total = 0
        for process in self.alive:
            with suppress(OSError, ValueError):  # it may have ended
                for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
                    if line.startswith("Pss:"):
                        total += int(line.split()[1]) * 1024
        self.peak_pss = max(self.peak_pss, total)


@dataclass
class Marks:
    """The CPU-seconds at each new line of a file that has one of the texts."""

    file: Path | None
    texts: list[str]
    found: list[dict[str, Any]] = field(default_factory=list)
    _position: int = 0
    _rest: str = ""

    def look(self, wall: float, cpu: float) -> None:
        """Note the lines that were added since the last look."""
        if not self.file or not self.file.is_file():
            return
        with self.file.open() as opened:
            opened.seek(self._position)
            self._rest += opened.read()
            self._position = opened.tell()
        *lines, self._rest = self._rest.split("\n")
        for line in lines:
            if any(text in line for text in self.texts):
                self.found.append({"wall": wall, "cpu": cpu, "line": json.loads(line)})


def reap() -> None:
    """Wait for descendants that have ended and whose parent has ended, so that the kernel adds up their time."""
    with suppress(ChildProcessError):
        while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            os.waitpid(-1, os.WNOHANG)


def run(
    command: list[str], log: Path, watch: Path | None = None, marks: list[str] | None = None, limit_s: float = 3600.0
) -> dict[str, Any]:
    """Run ``command`` to its end, and return what it used; see the module docstring."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "this kernel has no child subreapers")
    tree, noted = Tree(), Marks(watch, marks or [])
    if watch and watch.exists():
        watch.unlink()
    began = time.monotonic()
    memory_due = 0.0
    with log.open("wb") as output:
        first = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        while True:
            wall = time.monotonic() - began
            noted.look(wall, tree.look())
            if wall >= memory_due:
                tree.look_at_memory()
                looking = time.monotonic() - began - wall
                memory_due = wall + max(LOOK_AT_MEMORY_S, looking / MEMORY_SHARE)
            if first.poll() is not None or wall > limit_s:
                break
            time.sleep(LOOK_S)
        status, wall = first.poll(), time.monotonic() - began
        while status is not None and tree.alive and time.monotonic() - began < wall + LEFT_OVER_S:
            time.sleep(LOOK_S)
            reap()
            noted.look(time.monotonic() - began, tree.look())
    finally:
        left = kill_all(tree)
        first.poll()
        reap()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    sampled, waited = sum(tree.cpu.values()), used.ru_utime + used.ru_stime
    by_name: dict[str, float] = {}
    for key, spent in tree.cpu.items():
        by_name[tree.names[key]] = round(by_name.get(tree.names[key], 0.0) + spent, 2)
    return {
        "status": status,
        "wall": wall,
        "cpu": max(sampled, waited),
        "cpu_sampled": sampled,
        "cpu_waited": waited,
        "peak_pss": tree.peak_pss,
        "marks": noted.found,
        "left_over": left,
        "cpu_by_name": dict(sorted(by_name.items(), key=lambda item: -item[1])[:12]),
    }


def kill_all(tree: Tree) -> int:
    """End every descendant that still runs. Returns how many there were."""
    tree.look()
    ended = list(tree.alive)
    while tree.alive:
        for process in tree.alive:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(LOOK_S)
        reap()
        tree.look()
    return len(ended)


def main() -> int:
    """Measure the command of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="write the figures to this JSON file")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="the command's output")
    parser.add_argument("--watch", type=Path, help="watch this file of JSON lines, which the command writes")
    parser.add_argument("--mark", action="append", default=[], help="a line with this text is a mark")
    parser.add_argument("--limit", type=float, default=3600.0, help="end the command after this time [s]")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started ends with this process
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    used = run(command, given.log, given.watch, given.mark, given.limit)
    given.out.write_text(json.dumps(used))
    return used["status"] if used["status"] is not None else 124


if __name__ == "__main__":
    sys.exit(main())
