"""Chat templates are programs that come with a model: one is tried in a process with limits before it is used, and each
rendering of real messages has a bound on its time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

# what rendering a few short conversations may take: CPU time [s], memory beyond this process's [bytes], and time [s]
CPU_S, MEMORY, DEADLINE_S = 2, 1 << 29, 60.0
# CPU time that one rendering of real messages may take [s]; a long conversation takes milliseconds. POLL_S: how often a
# thread looks at it
RENDER_S, POLL_S = 30.0, 0.5
# exit status of the trial
WELL, NO_MEMORY = 0, 3
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "1"}}}
TOOL = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": TOOL}}]
ASKED = [{"role": "user", "content": "a"}]
ANSWERED = [{"role": "system", "content": "s"}, *ASKED, {"role": "assistant", "content": "b"}, *ASKED]
CALLED: list[dict[str, Any]] = [
    *ASKED,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "look", "content": "c"},
]


def try_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Render conversations by the chat template, if there is one, in a copy of this process with limits.

    It takes some ten milliseconds. What the template refuses is no matter here.

    Raises:
        ValueError: the template takes too long or too much memory.
    """
    if not tokenizer.chat_template:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a copy of a process with threads may come to a stop: it is ended in time
        child = os.fork()
    if not child:
        os._exit(_trial(tokenizer))  # nothing of this process is cleaned up twice
    status = _ended(child)
    if status == WELL:
        return
    slow = status in (-signal.SIGXCPU, -signal.SIGKILL)
    raise ValueError(
        f"the chat template takes more than {f'{CPU_S} s' if slow else f'{MEMORY >> 20} MB'} to render a few words: it "
        "is broken or hostile; take that of the model's makers (chat_template.jinja or tokenizer_config.json)"
    )


def _trial(tokenizer: PreTrainedTokenizerBase) -> int:
    """The exit status of the copy."""
    try:
        quiet = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):
            os.dup2(quiet, descriptor)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGXCPU):
            signal.signal(number, signal.SIG_DFL)
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        for limit, most in ((resource.RLIMIT_CPU, CPU_S), (resource.RLIMIT_AS, size + MEMORY)):
            hard = resource.getrlimit(limit)[1]
            resource.setrlimit(limit, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    except (OSError, ValueError):
        return WELL  # no such limits on this system
    for messages, tools in ((ASKED, None), (ANSWERED, None), (CALLED, TOOLS)):
        try:
            tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        except MemoryError:
            return NO_MEMORY
        except Exception:
            continue
    return WELL


def _ended(child: int) -> int:
    """The exit status of a child, negative for a signal; it is killed at the deadline."""
    until = time.monotonic() + DEADLINE_S
    try:
        while os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None and time.monotonic() < until:
            time.sleep(0.002)
    finally:
        os.kill(child, signal.SIGKILL)  # does nothing to one that has ended
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class TooSlow(ValueError):
    """A chat template that takes too long with some messages: others may take as long, and none is to be tried."""


class _Stop(BaseException):
    """Ends a rendering; what catches errors of a template does not catch it."""


@dataclass
class _Rendering:
    """One that runs in a thread: the ``clock`` of the thread's CPU time, and when by it it is stopped."""

    clock: int
    until: float
    stopped: bool = False


class _Watch:
    """Stops renderings of this process that take too long, from a thread of its own that lives while there are some."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[int, _Rendering] = {}
        self._thread: threading.Thread | None = None

    def begin(self, seconds: float) -> None:
        """The calling thread renders, for ``seconds`` of its CPU time at most; then `_Stop` is raised in it."""
        ident = threading.get_ident()
        clock = time.pthread_getcpuclockid(ident)
        with self._lock:
            self._running[ident] = _Rendering(clock, time.clock_gettime(clock) + seconds)
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="chat-templates", daemon=True)
                self._thread.start()

    def end(self) -> None:
        """The calling thread has rendered."""
        ident = threading.get_ident()
        with self._lock:
            rendering = self._running.pop(ident, None)
            if rendering is not None and rendering.stopped:  # if it has not arrived, it would end something else
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), None)

    def _look(self) -> None:
        while True:
            time.sleep(POLL_S)
            with self._lock:
                if not self._running:
                    self._thread = None
                    return
                for ident, each in self._running.items():
                    if not each.stopped and time.clock_gettime(each.clock) > each.until:
                        each.stopped = True
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(_Stop))


_watch = _Watch()
os.register_at_fork(after_in_child=_watch.__init__)  # type: ignore[misc]  # its thread is not in a child


@contextlib.contextmanager
def bounded(tokenizer: PreTrainedTokenizerBase) -> Iterator[None]:
    """The block renders messages by the template of ``tokenizer``, in any thread, and costs some microseconds.

    What a template does in Python is bounded: loops, and so the texts that they grow. One operation, such as a power of
    huge numbers, is not.

    Raises:
        TooSlow: it takes longer than `RENDER_S` of CPU time.
    """
    try:
        _watch.begin(RENDER_S)
        try:
            yield
        finally:
            _watch.end()
    except _Stop:
        _watch.end()
        raise TooSlow(
            f"the chat template of {tokenizer.name_or_path or 'the tokenizer'} takes more than {RENDER_S:g} s to "
            "render these messages: it is broken or hostile; take that of the model's makers (chat_template.jinja or "
            "tokenizer_config.json)"
        ) from None
