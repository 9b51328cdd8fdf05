"""Sessions of agents on the engines of a run. This module pauses the sessions at the end of a rollout, and serves them
over HTTP.

An agent may be a program that knows nothing about rollouts. At the end of a rollout, the agent's session is *paused*:
its current reply is aborted, and the agent waits. With ``--partial-rollout`` the group of the agent waits too: the
group's coroutine stays alive, and the group's prompt goes back to the data source like other unfinished prompts. When
the data source returns this prompt in a later rollout, the group continues after its tokens so far, with the new
weights. To the agent, the pause is only a long wait for a reply. A checkpoint does not contain waiting groups. After a
resume they start again from their prompts.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from slimelite.engines.protocol import (
    EngineInfo,
    GenerateRequest,
    GenerateResult,
    OnTokens,
    SamplingParams,
    Scores,
    stream_seed,
)
from slimelite.rollout.pool import AgentState, EnginePool, WaitingGroup
from slimelite.serving.format import ChatFormat
from slimelite.serving.sessions import Session, Sessions

# the maximum number of attempts for a request if its engine dies
ATTEMPTS = 3


class PooledSessions(Sessions):
    """The sessions of a run. A session's id is the ``session_id`` of its sample, optionally followed by a dot and a
    name.

    ``states``: the `AgentState` of each agent, by the ``session_id`` of the agent's sample. ``waiting``: group index ->
    a group that is paused until the next rollout. ``keeps_ids``: whether engines return from which ids each token was
    drawn, even if a program's request does not ask for this. For a sample in ``states``, `AgentState.tells` overrides
    ``keeps_ids``. ``engines_tell``: whether the engines can return from which ids a token was drawn.
    ``trains_constrained``: see `Session`.
    """

    def __init__(
        self,
        chat_format: ChatFormat,
        pool: EnginePool,
        states: Mapping[str, AgentState],
        limit: int,
        seed: int,
        keeps_ids: bool = False,
        engines_tell: bool = True,
        trains_constrained: bool = False,
    ) -> None:
        super().__init__(chat_format, self._sample, limit)
        self.states = states
        self.waiting: dict[int | None, WaitingGroup] = {}
        self._pool, self._seed, self._keeps_ids, self._engines_tell = pool, seed, keeps_ids, engines_tell
        self._trains_constrained = trains_constrained
        self._paused: str | None = None

    def open(
        self, session_id: str | None = None, *, defaults: SamplingParams | None = None, seed: int | None = None
    ) -> Session:
        """See `Sessions.open`. The default ``seed`` is a hash of the run's seed and the session's id."""
        if seed is None and session_id is not None:
            seed = stream_seed(self._seed, session_id)
        session = super().open(session_id, defaults=defaults, seed=seed)
        session.trains_constrained = self._trains_constrained
        if self._paused is not None and session.id.startswith(self._paused):
            session.pause()
        return session

    def of(self, ids: Iterable[str]) -> Iterator[Session]:
        """The open sessions of the samples whose ``session_id`` is in ``ids``."""
        wanted = set(ids)
        return (session for name, session in self._open.items() if not wanted.isdisjoint(_owners(name)))

    def pause(self, prefix: str) -> None:
        """Pause the sessions whose ids begin with ``prefix``, and the time limits of their agents. Until `admit` is
        called, newly opened sessions whose ids begin with ``prefix`` are paused too.
        """
        self._paused = prefix
        for session in self._open.values():
            if session.id.startswith(prefix):
                session.pause()
        for name, state in self.states.items():
            if name.startswith(prefix) and state.since is None:
                state.since = time.monotonic()

    def admit(self) -> None:
        """Do not pause sessions that are opened after this call. Sessions that are already paused stay paused until
        `resume`."""
        self._paused = None

    def resume(self, ids: Sequence[str]) -> None:
        """Resume the agents of the samples whose ``session_id`` is in ``ids``."""
        for state in (self.states[name] for name in ids if name in self.states):
            state.before, state.since = state.paused, None
        for session in self.of(ids):
            session.resume()

    @property
    def running(self) -> bool:
        """Whether a paused session still has a request in flight on an engine."""
        return any(s.running for s in self._open.values() if self._paused is not None and s.id.startswith(self._paused))

    async def _sample(self, request: GenerateRequest, on_tokens: OnTokens | None) -> GenerateResult:
        """Send the request to the engine of the session's sample. If this engine is gone, use another engine.

        Raises:
            ValueError: the response is trained on, but its sampling parameters exclude tokens and the engine does not
                return the ids of the kept tokens.
        """
        assert request.prefix_key is not None
        owners = _owners(str(request.prefix_key))
        state = next((self.states[name] for name in owners if name in self.states), None)
        own = None if state is None else state.engine
        if self._keeps_ids if state is None else state.tells:
            truncated = request.params.truncation()
            if self._trains_constrained and (shifts := request.params.shifts()):
                raise ValueError(
                    f"the request sets {' and '.join(shifts)}, so its tokens come from an unknown distribution and "
                    "cannot be trained on; leave such parameters out of the request, or start the run without "
                    "--train-constrained"
                )
            request = replace(request, params=request.params.telling(constrained=self._trains_constrained))
            if truncated and not self._engines_tell:
                raise ValueError(
                    f"{' and '.join(truncated)}: this engine does not report which tokens it kept, so training would "
                    "compute other log-probs; leave these parameters out of the request, or start the run with "
                    "--allow-truncated-sampling"
                )
        tries = 0
        while True:
            engine = await self._pool.usable(own)
            tries += 1
            try:
                (result,) = await self._pool.generate(engine, [request], on_tokens)
                return result
            except ConnectionError:
                await self._pool.check(engine)
                if tries == ATTEMPTS:
                    raise


def _owners(session_id: str) -> tuple[str, str]:
    """The session ids of the samples to which this session may belong."""
    return session_id, session_id.rpartition(".")[0]


class RunFront:
    """An HTTP server for a run's engines and sessions, on the event loop of the rollout.

    The API key of the whole server stays secret. An agent gets only the API key of its own session.
    """

    def __init__(self, sessions: PooledSessions, pool: EnginePool, name: str) -> None:
        from slimelite.serving.front import Front  # imports a web server, which other runs do not need

        self._sessions, self._pool = sessions, pool
        self._front = Front(sessions, self, name, key=secrets.token_urlsafe(24))
        self._started: asyncio.Task[str] | None = None

    async def start(self) -> str:
        """The base URL of the server. The first call starts the server."""
        self._started = self._started or asyncio.create_task(self._front.start())
        return await asyncio.shield(self._started)

    async def stop(self) -> None:
        """Stop the server."""
        if self._started is not None:
            with suppress(OSError):  # the server was never started
                await self._started
            await self._front.stop()

    async def info(self) -> EngineInfo:
        """The info (limits and weight version) of the run's first engine."""
        return next(iter(self._pool.infos.values()))

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """See `Engine.generate`. Each request goes to the least loaded engine."""
        return list(await asyncio.gather(*(self._sessions.sampler(request, None) for request in requests)))

    async def score(self, input_ids: Sequence[int], start: int, temperature: float = 1.0, top: int = 0) -> Scores:
        """See `Engine.score`."""
        engine = await self._pool.usable(None)
        return await self._pool.engines[engine].score(input_ids, start, temperature, top)

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """See `Engine.abort`."""
        await asyncio.gather(*(self._pool.engines[engine].abort(request_ids) for engine in self._pool.up))
