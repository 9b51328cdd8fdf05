"""`--trace`: records the work of every worker of a run over time, as a Chrome trace, which Perfetto can open too.

The file is a JSON array with one event on each line. All processes of a machine append to the file, and each event is
one `write`. Therefore a killed process loses no events, and no files have to be merged. `finish` writes the last
bracket, but Chrome and Perfetto also open an array without this bracket. The format is Chrome's "Trace Event Format",
with complete events ("X") and names ("M").
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from zlib import crc32

FILE = "trace.json"
# shorter spans are left out, such as polls of the progress [s]
SHORTEST = 1e-4
END = b"\n]\n"
# the order of the workers in the viewer, from top to bottom
ORDER = ("driver", "rollout", "trainer", "engine")


class _Writer:
    """Appends events to the file at ``path``. Other processes append to the same file too."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        append = os.O_WRONLY | os.O_APPEND
        try:
            file = os.open(path, append | os.O_CREAT | os.O_EXCL, 0o644)
            os.write(file, b"[\n")
        except FileExistsError:
            file = os.open(path, append)
        self._file: int | None = file
        self._lock = threading.Lock()
        self._busy: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
        self._named: set[tuple[str, str, int]] = set()

    def take(self, worker: str, track: str) -> int:
        """Take the first free lane of the track. Spans on one lane must not overlap."""
        with self._lock:
            busy = self._busy[worker, track]
            lane = next(n for n in range(len(busy) + 1) if n not in busy)
            busy.add(lane)
            return lane

    def give_back(self, place: tuple[str, str, int], span: dict[str, object] | None) -> None:
        """Free the lane, and write its span."""
        worker, track, lane = place
        with self._lock:
            self._busy[worker, track].discard(lane)
            if span is not None and self._file is not None:
                names = [] if place in self._named else _names(*place)
                self._named.add(place)
                lines = [json.dumps(event | _ids(*place), default=str) + ",\n" for event in [*names, span]]
                os.write(self._file, "".join(lines).encode())

    def close(self) -> None:
        """Write the last bracket of the JSON array. Spans that end after this call are not written."""
        end = {"name": "the run ends", "ph": "i", "s": "g", "ts": time.time_ns() // 1000, **_ids("driver", "phases", 0)}
        with self._lock:
            file, self._file = self._file, None
            if file is not None:
                os.write(file, json.dumps(end).encode() + END)
                os.close(file)


def _ids(worker: str, track: str, lane: int) -> dict[str, int]:
    """Numbers for a worker and for one of its lanes. Every process computes the same numbers."""
    pid, tid = (crc32(name.encode()) >> 1 for name in (worker, f"{worker} {track} {lane}"))  # viewers read int32
    return {"pid": pid, "tid": tid}


def _names(worker: str, track: str, lane: int) -> list[dict[str, object]]:
    kind, _, number = worker.partition("_")
    place = ORDER.index(kind) * 10_000 + int(number or 0)
    values = {
        "process_name": {"name": worker},
        "process_sort_index": {"sort_index": place},
        "thread_name": {"name": f"{track} {lane + 1}" if lane else track},
        "thread_sort_index": {"sort_index": lane},
    }
    return [{"name": name, "ph": "M", "args": value} for name, value in values.items()]


_writer: _Writer | None = None


def begin(path: Path, *, driver: bool = False) -> None:
    """From now on, record the spans of this process in the file at ``path``. The driver must call this function before
    any other process calls it. ``driver``: this process is the driver. If an earlier run has finished the file, the
    driver reopens it and appends.
    """
    global _writer
    if _writer is not None:
        return
    if driver and path.is_file():
        with path.open("r+b") as file:
            size = file.seek(max(file.seek(0, os.SEEK_END) - len(END), 0))
            if file.read() == END:
                file.truncate(size)
                file.seek(size)
                file.write(b",\n")
    _writer = _Writer(path)


def finish() -> None:
    """Stop recording, and finish the file. The driver calls this function after all workers have ended."""
    global _writer
    if _writer is not None:
        _writer.close()
        _writer = None


def call(worker: str, method: str, arguments: Iterable[object]) -> AbstractContextManager[dict[str, object]]:
    """The span of a call of the worker's ``method``. The span shows the arguments that are numbers or texts."""
    return span(worker, "calls", method, arguments=[each for each in arguments if isinstance(each, int | str)])


@contextmanager
def span(worker: str, track: str, name: str, **facts: object) -> Iterator[dict[str, object]]:
    """Record the time of the ``with`` block as a bar called ``name``, on a track of ``worker``. Before `begin` is
    called, `span` records nothing.

    ``facts``: shown with the bar. The ``with`` block receives ``facts`` as a dict and may add to it.
    """
    writer = _writer
    if writer is None:
        yield facts
        return
    lane = writer.take(worker, track)
    # durations come from the monotonic clock
    at, began = time.time(), time.perf_counter()
    event = None
    try:
        yield facts
    finally:
        took = time.perf_counter() - began
        if took >= SHORTEST:
            event = {"name": name, "cat": track, "ph": "X", "ts": round(at * 1e6), "dur": round(took * 1e6)}
            event["args"] = facts
        writer.give_back((worker, track, lane), event)
