"""Limits on time and memory for rendering messages, because a chat template may come from a stranger.

One thread watches all renderings of this process. It stops those that take too much time or memory.
"""

from __future__ import annotations

import ctypes
import os
import resource
import threading
import time
from dataclasses import dataclass
from pathlib import Path

# limits for one rendering of real messages: CPU time [s], growth of this process's memory [bytes]; a long conversation
# takes milliseconds. POLL_S: time between two looks at the renderings [s]
RENDER_S, GROWTH, POLL_S = 30.0, 1 << 30, 0.05
# other threads may allocate memory, so a rendering is not blamed for it before it has taken this CPU time [s]
BLAMED_S = 0.1


class Stop(BaseException):
    """Ends a rendering. Its text says what the template does. Code that catches ``Exception`` does not catch it."""


class _OutOfTime(Stop):
    def __str__(self) -> str:
        return f"takes more than {RENDER_S:g} s"


class _OutOfMemory(Stop):
    def __str__(self) -> str:
        return f"takes more than {GROWTH >> 20} MB"


def _resident() -> int:
    """The memory of this process [bytes], or 0 if this system does not have the file."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


@dataclass
class _Rendering:
    """A rendering that runs in a thread. ``clock`` counts the thread's CPU time, which was ``since`` at the start.
    ``size``: the memory of the process when the watch last looked before the start."""

    clock: int
    since: float
    size: int
    stopped: bool = False

    def excess(self, size: int) -> type[Stop] | None:
        """The limit that the rendering exceeds when the process has this ``size``."""
        seconds = time.clock_gettime(self.clock) - self.since
        if seconds > RENDER_S:
            return _OutOfTime
        return _OutOfMemory if seconds > BLAMED_S and size > self.size + GROWTH else None


class _Watch:
    """Stops renderings of this process that take too much time or memory. The watch's thread runs while there are
    renderings."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[int, _Rendering] = {}
        self._thread: threading.Thread | None = None
        self._size = 0

    def begin(self) -> None:
        """Record that the calling thread begins to render messages. `Stop` is raised in this thread if it exceeds a
        limit before it calls `end`."""
        ident = threading.get_ident()
        clock = time.pthread_getcpuclockid(ident)
        with self._lock:
            if self._thread is None:
                self._size = _resident()
                self._thread = threading.Thread(target=self._look, name="chat-templates", daemon=True)
                self._thread.start()
            self._running[ident] = _Rendering(clock, time.clock_gettime(clock), self._size)

    def end(self) -> None:
        """Record that the calling thread has finished rendering, so `Stop` is no longer raised in it."""
        ident = threading.get_ident()
        with self._lock:
            rendering = self._running.pop(ident, None)
            # cancel an exception that has not arrived yet, because it would end other code
            if rendering is not None and rendering.stopped:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), None)

    def limits_this_thread(self) -> bool:
        """Whether the calling thread renders messages."""
        return threading.get_ident() in self._running

    def _look(self) -> None:
        while True:
            time.sleep(POLL_S)
            with self._lock:
                if not self._running:
                    self._thread = None
                    return
                self._size = _resident()
                for ident, each in self._running.items():
                    if not each.stopped and (stop := each.excess(self._size)):
                        each.stopped = True
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(stop))


watch = _Watch()
os.register_at_fork(after_in_child=watch.__init__)  # type: ignore[misc]  # a forked child does not have the thread
