"""One episode. The model replies and the environment answers, in turn, until one of them ends the episode."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from slimelite.engines.protocol import SamplingParams
from slimelite.environments.hosts import EnvironmentFailure, Host, Live
from slimelite.environments.protocol import Message, Row
from slimelite.environments.registry import FACTS, TOTAL
from slimelite.samples.sample import Sample, Status
from slimelite.serving.sessions import ContextFullError, Session, Turn

logger = logging.getLogger(__name__)
# the maximum number of turns in the timeline of an episode
MOST_TURNS = 200
REMEDY = "shorten the messages that reset returns, or raise --rollout-max-context-len"


@dataclass
class Role:
    """A role with its conversation and its rewards. ``parts``: the sums of named rewards."""

    session: Session
    number: int
    messages: list[Message] = field(default_factory=list)
    total: float | None = None
    parts: Counter[str] = field(default_factory=Counter)

    def reward(self, reward: float | Mapping[str, float] | None) -> None:
        """Add a reward for the last reply."""
        if reward is None:
            return
        number = math.fsum(reward.values()) if isinstance(reward, Mapping) else float(reward)
        if isinstance(reward, Mapping):
            self.parts.update(reward)
        self.total = (self.total or 0.0) + number
        if self.session.turns:
            last = self.session.turns[-1]
            assert not isinstance(last.reward, dict)
            last.reward = (last.reward or 0.0) + number


class Episode:
    """Plays one episode, and then makes samples from it.

    Args:
        host: opens the environment. The environment is closed at the end.
        converse: function ``fn(number of the role)`` that opens the conversation of a role.
        params: sampling parameters of each reply.
        max_turns, max_tokens: limits for all replies of the episode together. None: no limit.
    """

    def __init__(
        self,
        host: Host,
        converse: Callable[[int], Session],
        params: SamplingParams,
        *,
        max_turns: int,
        max_tokens: int | None = None,
    ) -> None:
        self.roles: dict[str, Role] = {}
        self.status = Status.COMPLETED
        self.failure: EnvironmentFailure | None = None
        self.counts: Counter[str] = Counter(turns=0, tool_calls=0, malformed_calls=0, timeouts=0, errors=0)
        self.counts.update(context_full=0, turn_limit=0)
        self.metrics: Counter[str] = Counter()
        self.seconds = 0.0  # time in calls of the environment [s]
        self._environment: Live | None = None
        self._host, self._converse, self._params = host, converse, params
        self._max_turns, self._max_tokens = max_turns, max_tokens
        self._tokens = 0

    async def play(self, row: Row) -> None:
        """Play to the end, and then call `close`. An error of the environment is stored in ``failure``.

        Raises:
            ValueError: the chat template refuses the messages, or an engine refuses a request.
            ConnectionError: no engine answered.
        """
        try:
            self._environment = await self._host.open()
            await self._play(self._environment, row)
        except EnvironmentFailure as failure:
            self.failure, self.status = failure, Status.FAILED
            self._count(failure)
            for turn in [turn for role in self.roles.values() for turn in role.session.turns]:
                turn.reward = None  # --reward-error decides the reward of the episode, so its turns have no rewards

    async def close(self) -> None:
        """Close the environment if there is one. If closing it fails, the failure is counted, unless the episode has
        already failed."""
        if self._environment is None:
            return
        self.seconds = self._environment.spent
        try:
            await self._environment.close()
        except EnvironmentFailure as failure:  # the episode itself may be complete
            if self.failure is None:
                self._count(failure)
            logger.info("an environment raised an error when it was closed: %s", failure)

    def _count(self, failure: EnvironmentFailure) -> None:
        self.counts["timeouts" if failure.kind == "timeout" else "errors"] += 1

    async def _play(self, environment: Live, row: Row) -> None:
        first = self._converse(0)  # open it now, because the end of a rollout looks for the sessions of its episodes
        start = await environment.reset(row)
        name, tools, messages = start.role, list(start.tools), start.messages
        while True:
            role = self.roles.get(name)
            if role is None:
                number = len(self.roles)
                role = self.roles[name] = Role(self._converse(number) if number else first, number)
            role.messages += messages
            if not role.messages:
                raise EnvironmentFailure("invalid", f"the role {name!r} must reply, but has no message to reply to")
            params = self._params.after(0, None if self._max_tokens is None else self._max_tokens - self._tokens)
            if params.max_new_tokens <= 0 or self.counts["turns"] >= self._max_turns:
                self.counts["turn_limit"] = int(params.max_new_tokens > 0)
                self.status = Status.TRUNCATED
                return
            try:
                turn = await role.session.chat(role.messages, tools or None, params)
            except ContextFullError as error:
                self.counts["context_full"] = 1
                if not self.counts["turns"]:
                    raise EnvironmentFailure(
                        "too_long", f"the start of an episode is too long: {str(error).rstrip('.')}; {REMEDY}"
                    ) from error
                self.status = Status.TRUNCATED
                return
            if turn.finish_reason == "abort":
                self.status = Status.ABORTED
                return
            try:
                step = await environment.step(self._counted_reply(turn))
            finally:
                turn.answered = time.monotonic()
            turn.call_seconds = step.call_seconds
            role.reward(step.reward)
            for other, reward in step.rewards.items():
                if other in self.roles:
                    self.roles[other].reward(reward)
            self.metrics.update(step.metrics)
            role.messages.append(turn.reply.message())
            cut = turn.finish_reason == "length"
            if step.done or cut:
                self.status = Status.TRUNCATED if cut else Status.COMPLETED
                return
            name, messages = name if step.role is None else step.role, step.messages

    def _counted_reply(self, turn: Turn) -> dict[str, object]:
        """Count the reply, and return it in the form that the environment gets."""
        self._tokens += len(turn.output_ids)
        self.counts["turns"] += 1
        self.counts["tool_calls"] += len(turn.reply.tool_calls)
        self.counts["malformed_calls"] += len(turn.reply.malformed)
        whole = {"malformed": list(turn.reply.malformed), "finish_reason": turn.finish_reason}
        return {**turn.reply.message(), **whole}

    def samples(self, sample: Sample) -> list[Sample]:
        """Make a sample for each branch of each role's conversation. The rollout id of these samples is the index of
        ``sample``.

        The reward is None if no step had a reward. If another role had rewards, a role without rewards gets 0. Rewards
        with parts become dicts. The sum of the parts is added as ``total``.
        """
        made: list[Sample] = []
        scored = any(role.total is not None for role in self.roles.values())
        facts = {**self.counts, "seconds": self.seconds, "metrics": dict(self.metrics)}
        facts["timeline"] = timeline([role.session for role in self.roles.values()])
        for name, role in self.roles.items():
            if not role.session.turns:
                continue
            total = role.total or 0.0 if scored else None
            seen: set[int] = set()
            for branch, path in zip(role.session.samples(sample), role.session.paths, strict=True):
                own = [turn for turn in path if turn.number not in seen]
                seen.update(turn.number for turn in own)
                vars(branch).update(turn_rewards=turn_rewards(own, branch), role=role.number)
                branch.reward = total if not role.parts else {**role.parts, TOTAL: total}
                branch.metadata = {**branch.metadata, FACTS: facts, **({"role": name} if name else {})}
                made.append(branch)
        if not made:  # the episode ended before the first reply
            made = [replace(sample, remove_sample=True, metadata={**sample.metadata, FACTS: facts})]
        for each in made:
            each.status, each.non_generation_time = self.status, self.seconds
            each.rollout_id = sample.index if len(made) > 1 else each.rollout_id
        return made


def timeline(sessions: Sequence[Session]) -> list[dict[str, object]]:
    """The first turns of conversations, in the order in which they began. Each turn has its times [s], its number of
    tokens and its calls. ``parent``: the turn that this turn continues, or None if it begins a branch. ``answer``: the
    seconds that the environment took for the step, if known. ``call_seconds``: the seconds of each tool call, if
    known."""
    turns = [(turn.began, place, turn) for place, session in enumerate(sessions) for turn in session.turns]
    first = min((began for began, _, _ in turns), default=0.0)
    return [
        {
            "role": place,
            "turn": turn.number,
            "parent": turn.parent,
            "begin": round(began - first, 3),
            "seconds": round(turn.ended - began, 3),
            "tokens": len(turn.output_ids),
            "calls": [call.name for call in turn.reply.tool_calls],
            **({"answer": round(turn.answered - turn.ended, 3)} if turn.answered else {}),
            **({"call_seconds": [round(float(s), 3) for s in turn.call_seconds]} if turn.call_seconds else {}),
        }
        for began, place, turn in sorted(turns, key=lambda each: each[0])[:MOST_TURNS]
    ]


def turn_rewards(own: Sequence[Turn], sample: Sample) -> list[float]:
    """A number for each response token. At the last token of a reply, this is the reward of the reply; at all other
    tokens it is NaN. Only the branch's ``own`` replies have rewards.

    The last token of a reply means its last trained token, because a grammar may exclude later ones from training.
    """
    rewards = [math.nan] * sample.response_length
    mask = vars(sample)["loss_mask"]
    for turn in own:
        end = len(turn.token_ids) - sample.prompt_length
        if turn.output_ids:
            assert not isinstance(turn.reward, dict)
            places = range(end - len(turn.output_ids), end)
            rewards[max((place for place in places if mask[place]), default=end - 1)] = turn.reward or 0.0
    return rewards


def row_of(sample: Sample, seed: int) -> Row:
    """The row for the environment, made from the prompt of ``sample``."""
    prompt: Sequence[Message] | str = sample.prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) and prompt else list(prompt or [])
    return Row(messages, sample.label, sample.metadata, seed)
