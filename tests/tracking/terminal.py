"""A real terminal to print on, and what it shows."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO


class Terminal:
    """``stream``: print here; ``shown``: what came out until now, all of it once the terminal is closed."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.chunks: list[bytes] = []

    @property
    def shown(self) -> str:
        return b"".join(self.chunks).decode(errors="replace")

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + 120
        while text not in self.shown:
            assert time.monotonic() < deadline, f"{text!r} never came; there is {self.shown!r}"
            time.sleep(0.02)


@contextmanager
def terminal() -> Iterator[Terminal]:
    ours, theirs = os.openpty()
    screen = Terminal(os.fdopen(theirs, "w"))

    def drain() -> None:
        while True:
            try:
                screen.chunks.append(os.read(ours, 65536))
            except OSError:  # the other end is closed
                return

    reader = threading.Thread(target=drain)
    reader.start()
    try:
        yield screen
    finally:
        screen.stream.close()
        reader.join()
        os.close(ours)
