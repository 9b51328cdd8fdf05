"""Turns errors of the user's functions and files into one message that names the line."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from slimelite.base.lifecycle import end_process

# the folder of our own package
PACKAGE = Path(__file__).parents[1]


class PluginError(ValueError):
    """A plugin raised an error or tried to end the process. The message names the plugin and its line."""


class Quit(SystemExit):
    """A plugin called ``os._exit``, which would end the run without a message."""


_refusal = ContextVar[tuple[int, Callable[[int], BaseException]] | None]("_refusal", default=None)


def _checked_exit(status: int) -> NoReturn:
    refusal = _refusal.get()
    if refusal is not None and refusal[0] == os.getpid():
        raise refusal[1](status)
    end_process(status)


@contextmanager
def kept_alive(refuse: Callable[[int], BaseException] = Quit) -> Iterator[None]:
    """In the block, ``os._exit`` raises the error ``refuse(status)`` instead of ending this process. Child processes,
    and threads that the block starts, may still end themselves with ``os._exit``."""
    os._exit = _checked_exit
    token = _refusal.set((os.getpid(), refuse))
    try:
        yield
    finally:
        with suppress(ValueError):  # a coroutine that is garbage-collected is closed in another context
            _refusal.reset(token)


def ending(error: SystemExit) -> str:
    """The call of a plugin that would have ended the process, for messages."""
    return f"{'os._exit' if isinstance(error, Quit) else 'sys.exit'}({error.code!r})"


def guarded(function: Callable[..., Any], path: str, flag: str | None) -> Callable[..., Any]:
    """Wrap ``function`` to convert its errors; `load_function` describes the conversion."""

    async def awaited(coroutine: Any) -> Any:
        with _guard(function, path, flag):
            return await coroutine

    @functools.wraps(function)
    async def call_async(*args: Any, **named: Any) -> Any:
        with _guard(function, path, flag):
            return await function(*args, **named)

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        with _guard(function, path, flag):
            result = function(*args, **named)
        return awaited(result) if inspect.iscoroutine(result) else result

    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    return call_async if is_async else call


@contextmanager
def _guard(function: Callable[..., Any], path: str, flag: str | None) -> Iterator[None]:
    """Convert errors of the block into `PluginError`; `load_function` describes the conversion."""
    try:
        with kept_alive():
            yield
    except (PluginError, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError):
        raise
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        # if the plugin called our code and that code raised a ValueError, its message is clear enough
        ours = isinstance(error, ValueError) and Path(frames[-1].filename).is_relative_to(PACKAGE)
        if isinstance(error, Exception) and (flag is None or ours):
            raise
        file = getattr(inspect.unwrap(function), "__code__", None) and inspect.getsourcefile(function)
        what = f"called {ending(error)}" if isinstance(error, SystemExit) else f"raised {named_error(error)}"
        name = f"{flag} {path}" if flag else f"the plugin {path}"
        raise PluginError(f"{name} {what}{_place([f for f in frames if f.filename == file])}") from error


def _place(frames: Sequence[traceback.FrameSummary]) -> str:
    """The last of ``frames`` for a message: `` (file, line 3, in reward)``; empty if there are no frames."""
    return f" ({frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""


def named_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def own_traceback(error: BaseException) -> str:
    """The traceback of a plugin's error, without slimelite's own calls above the plugin's first line.

    If the traceback has no line of the plugin, the whole traceback is returned. This happens with a TimeoutError from
    another thread, because asyncio drops the plugin's lines from the traceback.
    """
    first = error.__traceback__
    while first is not None and Path(first.tb_frame.f_code.co_filename).is_relative_to(PACKAGE):
        first = first.tb_next
    return "".join(traceback.format_exception(type(error), error, first or error.__traceback__)).rstrip()


def raised_at(error: BaseException) -> str:
    """The line of a plugin that raised ``error``, for a message: `` (file, line 3, in reward)``. Empty if the line is
    unknown, or if the error's message already has the line."""
    if isinstance(error, PluginError):
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    # a syntax error is raised in Python's import system, and its message has the file and the line
    own = [f for f in frames if not (Path(f.filename).is_relative_to(PACKAGE) or f.filename.startswith("<frozen"))]
    return _place(own)


def defined_at(thing: Callable[..., object]) -> str:
    """The line where a user's function, method or class is defined, for a message: `` (file, line 3)``. Empty if the
    line is unknown or in our package."""
    try:
        file, (_, line) = inspect.getsourcefile(inspect.unwrap(thing)), inspect.getsourcelines(inspect.unwrap(thing))
    except (TypeError, OSError):  # a C function, or its file is missing
        return ""
    return f" ({file}, line {line})" if file is not None and not Path(file).is_relative_to(PACKAGE) else ""


def import_failure(option: str, path: str, error: BaseException) -> str:
    """The message for ``error``, which the user's file at ``path`` raised when it ran. ``option``: the flag whose value
    is this file."""
    file = str(Path(path).resolve())
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    ends = f"it calls {ending(error)}" if isinstance(error, SystemExit) else ""
    what = ends or " ".join((str(error) if isinstance(error, ValueError) else named_error(error)).split())
    place = f" {path}, line {lines[-1]}" if lines else ""  # without a line, the message still names the file
    return f"{option}{place}: {what}"


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """``"; did you mean …?"``, or "" if no known name is similar. ``prefix``: what the message writes before the
    name."""
    close = get_close_matches(name, [k for k in known if not k.startswith("__")], n=1, cutoff=0.7)
    return f"; did you mean {prefix}{close[0]}?" if close else ""
