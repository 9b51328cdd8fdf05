"""The progress of a process that reads a large model. The process prints its progress, and other processes read this
progress in the log."""

from __future__ import annotations

import time
from pathlib import Path

from slimelite.base.files import in_units

# interval between two lines [s]
SAY_S = 5.0
# the beginning of each line
READ = "read"


class Reading:
    """Prints how many of ``total`` bytes have been read, and how fast, every `SAY_S` seconds. The lines go to the
    rank's log."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._begin = self._printed = time.monotonic()

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self._printed > self._begin:
            self._say()

    def add(self, count: int) -> None:
        """Add ``count`` to the number of bytes read so far."""
        self._done += count
        if time.monotonic() - self._printed > SAY_S:
            self._say()

    def _say(self) -> None:
        self._printed = time.monotonic()
        rate = self._done / max(self._printed - self._begin, 1e-3)
        done, total, each = in_units(self._done), in_units(self._total), in_units(rate)
        print(f"{READ} {done} of this rank's {total} of weights, {each} a second", flush=True)


def last_reading(log: Path) -> str | None:
    """The last line of the file ``log`` if `Reading` wrote this line, else None."""
    lines = log.read_text(encoding="utf-8", errors="replace")[-300:].splitlines() if log.is_file() else []
    return lines[-1] if lines and lines[-1].startswith(READ) else None
