"""Runs environments in this process, in worker processes or on a server. Every call has a time limit."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import wraps
from typing import Any

from slimelite.base.guard import defined_at, kept_alive, raised_at
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

# time limit for the start of a worker process, including the imports and the data of its environment [s]
START_SECONDS = 120.0
# after a call timed out, the worker must answer a ping within this time, or it is replaced [s]
PING_SECONDS = 5.0


class EnvironmentFailure(Exception):
    """An environment failed. The environment raised an error, took too long, disappeared, returned an invalid value, or
    sent first messages that exceed the context. ``kind``: "exception", "timeout", "crash", "invalid" or "too_long".
    ``lost``: whether the environment's worker process is gone, perhaps because of another environment in the same
    process.
    """

    def __init__(self, kind: str, message: str, *, lost: bool = False) -> None:
        super().__init__(message)
        self.kind, self.lost = kind, lost


def load(environment: str, sandbox: SandboxSettings = NO_WISHES) -> Callable[[], Environment]:
    """Load a factory. The factory makes the environment of one episode in this process. ``environment``: a value of
    ``--environment``.

    ``sandbox``: the sandbox for the programs that the environment starts.

    Raises:
        ValueError: there is no such environment, or the environment refuses its spec.
    """
    entry = known(environment)
    if entry is None:
        try:
            return load_function(environment)
        except ValueError:
            raise
        except Exception as error:  # the import of a user's file may raise any error
            raise ValueError(f"cannot load {environment!r}: {_described(error)}") from error
    kind, spec = entry
    words = (spec, sandbox) if kind.boxed else (spec,)
    make: Callable[[], Environment] = function(kind.make, ENVIRONMENTS.option, kind.name)(*words)
    return make


def _quit(status: int) -> EnvironmentFailure:
    what = f"a method called os._exit({status!r}), which would end the run without a message"
    return EnvironmentFailure("crash", what)


def _guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``method`` of an environment in this process. The wrapped method cannot end the process with
    ``os._exit``."""
    if inspect.iscoroutinefunction(method):

        @wraps(method)
        async def awaited(*args: object) -> object:
            with kept_alive(_quit):
                return await method(*args)

        return awaited

    @wraps(method)
    def called(*args: object) -> object:
        with kept_alive(_quit):
            return method(*args)

    return called


class Host:
    """Opens environments. A run has one host, which is used on one event loop.

    Args:
        environment: the value of ``--environment``.
        processes: ``--environment-processes``. 0: environments run in this process.
        call_seconds: time limit of one call, ``--environment-call-timeout``.
        seconds: time limit of all calls of an episode together, ``--environment-timeout``.
        sandbox: the sandbox for the programs that the environment starts.

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

    async def open(self) -> Live:
        """Open a new environment. If there are workers, the environment runs on the worker with the fewest episodes.

        Raises:
            ValueError: a worker cannot be started.
            EnvironmentFailure: the environment cannot be created.
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
            raise EnvironmentFailure("invalid", f"{what}; an environment needs reset and step (docs/agents.md){where}")
        return Live(made, self)

    async def close(self) -> None:
        """End the worker processes and close the connections."""
        await self._client.close()
        for worker in self._workers:
            worker.kill()


class Live:
    """A running environment with time limits. ``spent``: the total time of the calls to this environment so far [s]."""

    def __init__(self, environment: Environment | _Remote, host: Host) -> None:
        self.spent = 0.0
        self._environment, self._host = environment, host

    async def reset(self, row: Row) -> Start:
        """Begin the episode.

        Raises:
            EnvironmentFailure: the environment failed, or reached its time limit.
        """
        start: Start = _sound(await self._within(self._environment.reset, row), self._environment.reset, Start)
        return start

    async def step(self, reply: Mapping[str, Any]) -> Step:
        """Answer a reply. Raises the same errors as `reset`."""
        step: Step = _sound(await self._within(self._environment.step, reply), self._environment.step, Step)
        return step

    async def golden(self) -> list[str | Message] | None:
        """The replies of `protocol.Environment.golden`, or None if there is no such method. Raises the same errors as
        `reset`."""
        best = getattr(self._environment, "golden", None)
        return None if best is None else list(await self._within(best))  # type: ignore[call-overload]

    async def close(self) -> None:
        """Let the environment clean up. Raises the same errors as `reset`."""
        end = getattr(self._environment, "close", None)
        if end is not None:
            self.spent = 0.0  # a finished episode may have used up its time, but closing it may take a moment
            await self._within(end)

    async def _within(self, method: Callable[..., Any], *args: object) -> object:
        """Call ``method``, and return its result. After a time-out, a thread may continue to run, and so may a
        coroutine that ignores its cancellation."""
        whole = self._host.seconds - self.spent
        limit, flag = min((self._host.call_seconds, "--environment-call-timeout"), (whole, "--environment-timeout"))
        begin = time.monotonic()
        here = method if isinstance(self._environment, _Remote) else _guarded(method)
        task: asyncio.Future[object] = asyncio.ensure_future(call(here, *args))
        try:
            done, _ = await asyncio.wait([task], timeout=max(limit, 0.0))
        finally:
            task.cancel()  # does nothing if the task is done
            self.spent += time.monotonic() - begin
        error = task.exception() if done else None
        gone = isinstance(error, OSError) and isinstance(self._environment, _Remote)
        if (gone or not done) and isinstance(self._environment, _InWorker):
            await self._environment.suspect()
        lost = isinstance(self._environment, _InWorker) and self._environment.lost
        if not done:
            what = f"{method.__name__} took longer than {limit:.3g} s ({flag})"
            if type(self._environment) is _Remote:  # the user's server may be stopped or gone
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
    """Check ``result``, which ``method`` returned. The result must be a ``wanted`` with readable messages and finite
    numbers.

    Raises:
        EnvironmentFailure: the result is not valid. A later check would not help, because the error would look like a
            failure of the engine, and the episode would be retried.
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
            raise TypeError(f"the role must be text, not {result.role!r:.60}")
        if isinstance(result, Start):
            if not len(result.messages):
                raise ValueError("there is no message to which the model can reply")
            names = list(map(_tool_name, result.tools))
            if twice := [name for name in names if names.count(name) > 1]:
                raise ValueError(f"two tools have the name {twice[0]}")
            return result
        if isinstance(result.done, str):  # a text would count as true
            raise TypeError(f"done must be True or False, not {result.done!r:.60}")
        parts = result.reward if isinstance(result.reward, Mapping) else {"": result.reward or 0.0}
        for number in (*parts.values(), *result.rewards.values()):
            if not math.isfinite(number):
                raise ValueError(f"a reward is {number}")
        # raises an error if a value is not a number
        any(map(math.isnan, [*result.metrics.values(), *result.call_seconds]))
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        problem = getattr(error, "problem", error)  # the message of a `BadCell` would also name the column of a file
        what = f"{method.__name__} returned a value that cannot be used: {problem}{defined_at(method)}"
        raise EnvironmentFailure("invalid", what) from error
    return result


def _tool_name(tool: object) -> str:
    """The name of a tool in OpenAI's form. Raises TypeError if the tool has another form."""
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise TypeError(f"{tool!r:.60} is not a tool; write a tool in the form {A_TOOL}")
    shape = function.get("parameters", {})
    if not isinstance(shape, dict) or not isinstance(shape.get("properties", {}), dict):
        raise TypeError(f"the parameters of the tool {name} must be a JSON schema of an object, not {shape!r:.60}")
    return name


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}{raised_at(error)}"


def _fields(answer: Any, wanted: type[Start] | type[Step]) -> Any:
    """Convert a server's answer to a ``wanted``."""
    try:
        return wanted(**answer)
    except TypeError as error:
        raise EnvironmentFailure(
            "invalid", f"its server answered {answer!r:.80}, which is not a {wanted.__name__} ({error})"
        ) from error


class _Remote:
    """An environment on a server. The environment is called with JSON by POST to ``/reset``, ``/step`` and ``/close``
    (see docs/agents.md)."""

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
        """End the worker process if it is stopped or does not answer. The worker's other episodes then fail too. Later
        episodes run in a new process."""
        if self._worker.stopped:  # do not ping it; it might be continued, answer now, and be ended later
            self._worker.kill()
            return
        try:
            await asyncio.wait_for(self._client.get(f"{self.url}/health"), PING_SECONDS)
        except (HttpError, TimeoutError):
            if self.url == self._worker.url:  # otherwise a new worker is already running
                self._worker.kill()


class _Worker:
    """A process that serves environments on a loopback port. The worker process ends together with this process,
    because the end of this process closes its stdin."""

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
        """Wait until the worker process accepts requests. Start a worker process if there is none or if the last one
        has ended."""
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
