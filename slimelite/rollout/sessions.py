"""Sessions of agents on the engines of a run, and what becomes of them when a rollout ends.

An agent may be a program that knows nothing of rollouts. At the end of one, its session is *held*: the reply under way
is aborted, and it waits. Under ``--partial-rollout`` the group is parked: its coroutine stays as it is, its prompt goes
back to the data source as an unfinished one does, and when the source hands it out again the group goes on, with the
tokens it has, under the weights of then. The agent sees a long wait. A run that resumes from a checkpoint has no parked
groups, and begins these anew.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from slimelite.engines.protocol import GenerateRequest, GenerateResult, OnTokens, SamplingParams
from slimelite.rollout.pool import EnginePool
from slimelite.samples.sample import Generated, Sample
from slimelite.serving.format import ChatFormat
from slimelite.serving.sessions import Session, Sessions, stream_seed

# the samples of one prompt, and the error of the last attempt if they could not be generated
Outcome = tuple[list[Sample], Exception | None]
# tries of a request whose engine dies
ATTEMPTS = 3


@dataclass(slots=True)
class Home:
    """Where an agent's requests go: the ``engine`` that its group's room is reserved on; and its clock.

    ``since``: since when the agent is held [s, monotonic]; None: it is not. ``before``: seconds of earlier holds.
    """

    engine: int
    since: float | None = None
    before: float = 0.0

    @property
    def held(self) -> float:
        """Seconds for which the agent was held so far; limits on its time do not count them."""
        return self.before + (0.0 if self.since is None else time.monotonic() - self.since)


@dataclass(slots=True)
class Parked:
    """A ``group`` that waits for the next rollout: the task that generates it, and its `GroupGenerator.go_on`."""

    task: asyncio.Task[list[Outcome]]
    group: list[Sample]
    go_on: Callable[[int, list[Generated]], None]

    def cancel(self) -> None:
        """End it; what it was to become is forgotten."""
        self.task.cancel()
        self.task.add_done_callback(lambda task: task.cancelled() or task.exception())


class PooledSessions(Sessions):
    """The sessions of a run; the ids of one sample's are its ``session_id``, alone or with a dot and a name after it.

    ``homes``: session id of a sample that an agent works on -> its `Home`.
    ``parked``: group index -> a group that waits for the next rollout.
    """

    def __init__(
        self, chat_format: ChatFormat, pool: EnginePool, homes: Mapping[str, Home], max_context_len: int, seed: int
    ) -> None:
        super().__init__(chat_format, self._sample, max_context_len)
        self.homes = homes
        self.parked: dict[int | None, Parked] = {}
        self._pool, self._seed = pool, seed
        self._held: str | None = None

    def open(
        self, session_id: str | None = None, *, defaults: SamplingParams | None = None, seed: int | None = None
    ) -> Session:
        """See `Sessions.open`; the default ``seed`` is a hash of the run's seed and the id."""
        if seed is None and session_id is not None:
            seed = stream_seed(self._seed, session_id)
        session = super().open(session_id, defaults=defaults, seed=seed)
        if self._held is not None and session.id.startswith(self._held):
            session.pause()
        return session

    def of(self, ids: Iterable[str]) -> Iterator[Session]:
        """The open sessions of samples with these session ids."""
        wanted = set(ids)
        return (session for name, session in self._open.items() if not wanted.isdisjoint(_owners(name)))

    def hold(self, prefix: str) -> None:
        """Pause the sessions whose ids begin with ``prefix``, also those that are opened from now on, and the clocks of
        their agents.
        """
        self._held = prefix
        for session in self._open.values():
            if session.id.startswith(prefix):
                session.pause()
        for name, home in self.homes.items():
            if name.startswith(prefix) and home.since is None:
                home.since = time.monotonic()

    def let_go(self) -> None:
        """End `hold` for sessions that are opened from now on; others wait for `go_on`."""
        self._held = None

    def go_on(self, ids: Sequence[str]) -> None:
        """End `hold` for the agents of samples with these session ids."""
        for home in (self.homes[name] for name in ids if name in self.homes):
            home.before, home.since = home.held, None
        for session in self.of(ids):
            session.resume()

    @property
    def running(self) -> bool:
        """Whether a held session has a request on an engine."""
        return any(s.running for s in self._open.values() if self._held is not None and s.id.startswith(self._held))

    async def _sample(self, request: GenerateRequest, on_tokens: OnTokens | None) -> GenerateResult:
        """Ask the engine of the session's sample, or another one when that is gone."""
        assert request.prefix_key is not None
        home = next((self.homes[name].engine for name in _owners(request.prefix_key) if name in self.homes), None)
        tries = 0
        while True:
            engine = await self._pool.usable(home)
            tries += 1
            try:
                (result,) = await self._pool.generate(engine, [request], on_tokens)
                return result
            except ConnectionError:
                await self._pool.check(engine)
                if tries == ATTEMPTS:
                    raise


def _owners(session_id: str) -> tuple[str, str]:
    """The session ids of samples that this session may belong to."""
    return session_id, session_id.rpartition(".")[0]
