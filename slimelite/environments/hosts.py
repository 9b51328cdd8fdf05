"""Runs environments in this process, in worker processes or behind an address. Every call has a time limit."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import asdict
from functools import wraps
from typing import Any, NoReturn

from slimelite.base.guard import defined_at, raised_at
from slimelite.base.http_client import Client, HttpError, shown
from slimelite.base.lifecycle import start_module
from slimelite.base.processes import is_stopped
from slimelite.base.registry import function
from slimelite.base.threads import call
from slimelite.data.messages import A_TOOL, read_messages, sound
from slimelite.environments.protocol import Environment, Message, Row, Start, Step
from slimelite.environments.registry import ENVIRONMENTS, is_address, known
from slimelite.sandbox.registry import NO_WISHES, SandboxSettings
from slimelite.serving.format import content_text
from slimelite.slime.plugins import files_run, load_function

# time for a worker process to import and to load what its environment reads [s]
START_SECONDS = 120.0
# time in which a worker that let a call time out must answer, or it is replaced [s]
PING_SECONDS = 5.0


class EnvironmentFailure(Exception):
    """An environment raised, took too long or went away, or its first messages exceed the context. ``kind``:
    "exception", "timeout", "crash", "invalid" or "too_long". ``lost``: its worker process is gone. This environment
    need not be the cause.
    """

    def __init__(self, kind: str, message: str, *, lost: bool = False) -> None:
        super().__init__(message)
        self.kind, self.lost = kind, lost


def load(environment: str, sandbox: SandboxSettings = NO_WISHES) -> Callable[[], Environment]:
    """A factory that makes the environment of one episode in this process. ``environment``: a value of
    ``--environment``.

    ``sandbox``: the sandbox of the programs that it starts.

    Raises:
        ValueError: there is no such environment, or it refuses its spec.
    """
    entry = known(environment)
    if entry is None:
        try:
            return load_function(environment)
        except ValueError:
            raise
        except Exception as error:  # a user's file may raise anything when it is imported
            raise ValueError(f"cannot load {environment!r}: {_described(error)}") from error
    kind, spec = entry
    words = (spec, sandbox) if kind.boxed else (spec,)
    make: Callable[[], Environment] = function(kind.make, ENVIRONMENTS.option, kind.name)(*words)
    return make


_playing = ContextVar[int | None]("_playing", default=None)
_end_process = os._exit


def _guarded_exit(status: int) -> NoReturn:
    if _playing.get() == os.getpid():
        raise EnvironmentFailure("crash", f"it called os._exit({status!r}), which would end the run without a word")
    _end_process(status)


def _guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    """``method`` of an environment in this process. It can no longer end the process with ``os._exit``."""
    if inspect.iscoroutinefunction(method):

        @wraps(method)
        async def awaited(*args: object) -> object:
            _playing.set(os.getpid())  # in the context of this call: it has a task of its own, or a thread
            return await method(*args)

        return awaited

    @wraps(method)
    def called(*args: object) -> object:
        token = _playing.set(os.getpid())
        try:
            return method(*args)
        finally:
            _playing.reset(token)

    return called


class Host:
    """Opens environments. There is one object for a run, and it is used on one event loop.

    Args:
        environment: the value of ``--environment``.
        processes: ``--environment-processes``; 0: this process.
        call_seconds: time limit of one call, ``--environment-call-timeout``.
        seconds: time limit of all calls of an episode together, ``--environment-timeout``.
        sandbox: the sandbox of the programs that the environment starts.

    Raises:
        ValueError: see `load`.
    """

    def __init__(
        self,
        environment: str,
        *,
        processes: int = 0,
        call_seconds: float,
        seconds: float,
        sandbox: SandboxSettings = NO_WISHES,
    ) -> None:
        self.call_seconds, self.seconds = call_seconds, seconds
        self._client = Client(texts=True)
        self._make: Callable[[], Environment] | None = None
        self._workers: list[_Worker] = []
        self._url = environment.rstrip("/")
        if is_address(environment):
            return
        if processes:
            self._workers = [_Worker(environment, sandbox) for _ in range(processes)]
        else:
            self._make = _guarded(load(environment, sandbox))
            os._exit = _guarded_exit  # such a call would end the run, its exit status the environment's

    async def open(self) -> Live:
        """A new environment. If there are workers, it runs on the one with the fewest episodes.

        Raises:
            ValueError: a worker cannot be started.
            EnvironmentFailure: the environment cannot be made.
        """
        if self._workers:
            worker = min(self._workers, key=lambda worker: len(worker.open))
            environment = _InWorker(worker, self._client)
            worker.open.add(environment)
            await worker.started()
            environment.url = worker.url
            return Live(environment, self)
        if self._make is None:
            return Live(_Remote(self._url, self._client), self)
        try:
            made = await asyncio.to_thread(self._make)
        except EnvironmentFailure:
            raise
        except Exception as error:
            raise EnvironmentFailure("exception", _described(error)) from error
        if lacking := [name for name in ("reset", "step") if not callable(getattr(made, name, None))]:
            what = f"{type(made).__name__} has no method {' and no method '.join(lacking)}"
            where = defined_at(type(made))
            raise EnvironmentFailure("invalid", f"{what}: an environment has reset and step (docs/agents.md){where}")
        return Live(made, self)

    async def close(self) -> None:
        """End the worker processes and the connections."""
        await self._client.close()
        for worker in self._workers:
            worker.kill()


class Live:
    """A running environment with time limits. ``spent``: seconds in its calls so far."""

    def __init__(self, environment: Environment | _Remote, host: Host) -> None:
        self.spent = 0.0
        self._environment, self._host = environment, host

    async def reset(self, row: Row) -> Start:
        """Begin the episode.

        Raises:
            EnvironmentFailure: the environment failed, or used up its time.
        """
        start: Start = _sound(await self._within(self._environment.reset, row), self._environment.reset, Start)
        return start

    async def step(self, reply: Mapping[str, Any]) -> Step:
        """Answer a reply. It raises the same errors as `reset`."""
        step: Step = _sound(await self._within(self._environment.step, reply), self._environment.step, Step)
        return step

    async def golden(self) -> list[str | Message] | None:
        """The replies of `protocol.Environment.golden`, or None if there is no such method. It raises the same errors
        as `reset`."""
        best = getattr(self._environment, "golden", None)
        return None if best is None else list(await self._within(best))  # type: ignore[call-overload]

    async def close(self) -> None:
        """Let the environment clean up. It raises the same errors as `reset`."""
        end = getattr(self._environment, "close", None)
        if end is not None:
            self.spent = 0.0  # what is over has no limit left to keep, but it may need a moment
            await self._within(end)

    async def _within(self, method: Callable[..., Any], *args: object) -> object:
        """The result of ``method``. After a time-out, a coroutine that ignores its cancellation, or a thread, may
        continue to run."""
        whole = self._host.seconds - self.spent
        limit, flag = min((self._host.call_seconds, "--environment-call-timeout"), (whole, "--environment-timeout"))
        begin = time.monotonic()
        here = method if isinstance(self._environment, _Remote) else _guarded(method)
        task: asyncio.Future[object] = asyncio.ensure_future(call(here, *args))
        try:
            done, _ = await asyncio.wait([task], timeout=max(limit, 0.0))
        finally:
            task.cancel()  # does nothing if it is done
            self.spent += time.monotonic() - begin
        error = task.exception() if done else None
        gone = isinstance(error, OSError) and isinstance(self._environment, _Remote)
        if (gone or not done) and isinstance(self._environment, _InWorker):
            await self._environment.suspect()
        lost = isinstance(self._environment, _InWorker) and self._environment.lost
        if not done:
            what = f"{method.__name__} took longer than {limit:.3g} s ({flag})"
            if type(self._environment) is _Remote:  # a server of the user's, which may be stopped or gone
                what = f"{shown(self._environment.url)}: {what}"
            raise EnvironmentFailure("timeout", what, lost=lost)
        if isinstance(error, EnvironmentFailure):
            raise error
        if isinstance(error, HttpError):
            raise EnvironmentFailure("crash" if gone else "exception", str(error), lost=lost) from error
        if error is not None:
            raise EnvironmentFailure("exception", _described(error)) from error
        return task.result()


def _sound(result: object, method: Callable[..., object], wanted: type[Start] | type[Step]) -> Any:
    """Check ``result``, which ``method`` returned. It must be a ``wanted`` with readable messages and finite numbers.

    Raises:
        EnvironmentFailure: it is not. If this were found later, it would look like a failure of the engine and be
            retried.
    """
    if not isinstance(result, wanted):
        what = f"{method.__name__} returned a {type(result).__name__}, not a {wanted.__name__}"
        raise EnvironmentFailure("invalid", what + defined_at(method))
    try:
        if len(result.messages):
            for place, message in enumerate(read_messages(list(result.messages))):
                sound(message, "messages")
                content_text(message["content"], f"message {place}: content")
        if not isinstance(result.role, str | None):
            raise TypeError(f"the role is {result.role!r:.60}, not text")
        if isinstance(result, Start):
            if not len(result.messages):
                raise ValueError("there is no message for the model to answer")
            names = list(map(_tool_name, result.tools))
            if twice := [name for name in names if names.count(name) > 1]:
                raise ValueError(f"two tools have the name {twice[0]}")
            return result
        if isinstance(result.done, str):  # which would be true
            raise TypeError(f"done is {result.done!r:.60}, not True or False")
        parts = result.reward if isinstance(result.reward, Mapping) else {"": result.reward or 0.0}
        for number in (*parts.values(), *result.rewards.values()):
            if not math.isfinite(number):
                raise ValueError(f"a reward is {number}")
        any(map(math.isnan, [*result.metrics.values(), *result.call_seconds]))  # raises where one is no number
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        problem = getattr(error, "problem", error)  # of a `BadCell`, which speaks of the column of a file
        what = f"{method.__name__} returned a value that cannot be used: {problem}{defined_at(method)}"
        raise EnvironmentFailure("invalid", what) from error
    return result


def _tool_name(tool: object) -> str:
    """The name of a tool in OpenAI's form; TypeError if it is not in that form."""
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise TypeError(f"{tool!r:.60} is not a tool; a tool looks like {A_TOOL}")
    shape = function.get("parameters", {})
    if not isinstance(shape, dict) or not isinstance(shape.get("properties", {}), dict):
        raise TypeError(f"the parameters of the tool {name} are {shape!r:.60}, not a JSON schema of an object")
    return name


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}{raised_at(error)}"


def _fields(answer: Any, wanted: type[Start] | type[Step]) -> Any:
    """A server's answer as a ``wanted``."""
    try:
        return wanted(**answer)
    except TypeError as error:
        raise EnvironmentFailure(
            "invalid", f"it answered {answer!r:.80}, which is no {wanted.__name__} ({error})"
        ) from error


class _Remote:
    """An environment behind an address. It uses JSON by POST to ``/reset``, ``/step`` and ``/close``; see
    docs/agents.md."""

    def __init__(self, url: str, client: Client) -> None:
        self.url, self._client = url, client
        self._id: str | None = None

    async def reset(self, row: Row) -> Start:
        answer = await self._client.post(f"{self.url}/reset", {"row": asdict(row)})
        if isinstance(answer, dict) and (name := answer.pop("id", None)) is None:
            raise EnvironmentFailure("invalid", f"{shown(self.url)}/reset answered without an id")
        start: Start = _fields(answer, Start)
        self._id = name
        return start

    async def step(self, reply: Mapping[str, Any]) -> Step:
        step: Step = _fields(await self._client.post(f"{self.url}/step", {"id": self._id, "reply": dict(reply)}), Step)
        return step

    async def close(self) -> None:
        if self._id is not None:
            await self._client.post(f"{self.url}/close", {"id": self._id})


class _InWorker(_Remote):
    """An environment in one of our worker processes."""

    def __init__(self, worker: _Worker, client: Client) -> None:
        super().__init__("", client)
        self._worker = worker

    @property
    def lost(self) -> bool:
        """Whether the worker is gone or was replaced."""
        return self.url != self._worker.url or not self._worker.alive

    async def close(self) -> None:
        self._worker.open.discard(self)
        await super().close()

    async def suspect(self) -> None:
        """End the worker if it is stopped or does not answer. Its other episodes fail then, and new ones get a new
        process."""
        if self._worker.stopped:  # it might answer now for a moment, and be ended then by whoever found it stopped
            self._worker.kill()
            return
        try:
            await asyncio.wait_for(self._client.get(f"{self.url}/health"), PING_SECONDS)
        except (HttpError, TimeoutError):
            if self.url == self._worker.url:  # else there is a new one already
                self._worker.kill()


class _Worker:
    """A process that serves environments on a loopback port. It ends together with this process, because its stdin is
    closed then."""

    def __init__(self, environment: str, sandbox: SandboxSettings) -> None:
        self.open: set[_InWorker] = set()
        self.url = ""
        self._environment, self._sandbox = environment, json.dumps(asdict(sandbox))
        self._process: subprocess.Popen[str] | None = None
        self._lock = asyncio.Lock()

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process is not None and self._process.poll() is None

    @property
    def stopped(self) -> bool:
        """Whether the process is stopped (SIGSTOP)."""
        return self._process is not None and is_stopped(self._process.pid)

    async def started(self) -> None:
        """Wait until the process serves; start it if there is none, or if it has ended."""
        async with self._lock:
            if not self.alive:
                try:
                    await asyncio.wait_for(asyncio.to_thread(self._start), START_SECONDS)
                except TimeoutError:
                    self.kill()
                    raise ValueError(
                        f"the environment process did not start within {START_SECONDS:g} s; see stderr for the reason"
                    ) from None

    def _start(self) -> None:
        words = [
            self._environment,
            "--worker",
            "--sandbox",
            self._sandbox,
            *(word for file in files_run for word in ("--import-file", file)),
        ]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = start_module("slimelite.environments.serve", *words, text=True, **pipes)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        if not is_address(self.url):
            raise ValueError(f"the environment process does not start (exit code {self._process.wait()}): {self.url}")

    def kill(self) -> None:
        """End the process now."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
