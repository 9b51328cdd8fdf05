"""Sessions: conversations that keep the exact tokens, log-probs and weight versions of every turn.

A session is a tree of turns. If the messages of a request begin with the messages and the reply of an earlier turn, the
request continues that turn. The new prompt then consists of the earlier turn's prompt, its sampled tokens, and the
tokens that the template puts after the reply (`ChatFormat.continuation`). Any other request begins a new branch of the
tree. For example, a branch begins if the template or the client has rewritten the history, if a sub-agent has its own
system prompt, or if the same messages get a second answer. So a sampled token is never encoded again when a
conversation continues.

A session belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np

from slimelite.engines.protocol import GenerateRequest, GenerateResult, OnTokens, SamplingParams, stream_seed
from slimelite.engines.sampling import Sampler
from slimelite.samples.sample import Kept, Sample, Status, joined, together
from slimelite.serving.format import ChatFormat, Message, Reply, Tools, before_stop, comparable


class ContextFullError(ValueError):
    """The prompt leaves no room for a reply. The message and the ``code`` are the same as OpenAI's, because clients
    look for them.

    ``tokens``: the length of the prompt, or an estimate if the prompt is far too long. ``most``: the length of the
    context.
    """

    code = "context_length_exceeded"

    def __init__(self, tokens: int, most: int) -> None:
        super().__init__(
            f"This model's maximum context length is {most} tokens. However, your messages resulted in {tokens} "
            "tokens, which leaves no room for a reply. Please reduce the length of the messages."
        )
        self.tokens, self.most = tokens, most


@dataclass
class Turn:
    """One reply of a session, with its prompt.

    ``before``: the turn that this turn continues; None: this turn begins a branch. ``messages``: the messages that this
    turn answers; empty for raw tokens. If the client sent a reply of this session back, ``messages`` has the reply as
    read from its tokens, not the client's copy. ``added_text``, ``added_ids``: what this turn's prompt adds to the
    prompt and the output of the turn ``before``. A turn stores only this part of its prompt, because long sessions
    would otherwise be too large. ``given_ids``: the beginning of the reply, if the model did not choose it. The prompt
    ends with ``given_ids``. ``ends``: texts that end the reply. Unlike a request's stop strings, these texts are shown
    as part of the reply. ``tools``: the tools that the model sees. ``sent``: the `comparable` part of the messages that
    the client sent. ``echoes``: the `comparable` part of the reply with the stop string, and without it. A client may
    send either form back. ``log_probs``, ``weight_versions``: one for each of ``output_ids``. ``kept``,
    ``constrained``: see `GenerateResult`. ``finish_reason``: why the reply ended, as "stop", "length" or "abort".
    ``reward``: set by the environment. ``began``, ``ended``: [s, monotonic]. ``answered``: the time of the
    environment's answer to this turn; 0 if there is no answer. ``call_seconds``: the duration of each tool call of the
    turn.
    """

    number: int
    before: Turn | None = field(repr=False)
    messages: tuple[Message, ...]
    added_text: str = field(repr=False)
    added_ids: list[int] = field(repr=False)
    sent: tuple[Any, ...] = field(default=(), repr=False)
    tools: Tools = field(default=None, repr=False)
    given_ids: list[int] = field(default_factory=list, repr=False)
    ends: tuple[str, ...] = ()
    echoes: tuple[object, ...] = field(default=(), repr=False)
    output_ids: list[int] = field(default_factory=list, repr=False)
    log_probs: list[float] = field(default_factory=list, repr=False)
    weight_versions: list[int] = field(default_factory=list, repr=False)
    kept: Kept | None = field(default=None, repr=False)
    constrained: np.ndarray | None = field(default=None, repr=False)
    finish_reason: str = ""
    cached_tokens: int = 0
    reply: Reply = field(default_factory=lambda: Reply(""))
    reward: float | dict[str, float] | None = None
    began: float = field(default_factory=time.monotonic, repr=False, compare=False)
    ended: float = field(default=0.0, repr=False, compare=False)
    answered: float = field(default=0.0, repr=False, compare=False)
    call_seconds: Sequence[float] = field(default=(), repr=False, compare=False)

    @property
    def parent(self) -> int | None:
        """Number of the turn ``before``, or None."""
        return self.before.number if self.before is not None else None

    @property
    def path(self) -> list[Turn]:
        """The turns from the beginning of the branch to this turn."""
        path = [self]
        while (before := path[-1].before) is not None:
            path.append(before)
        return path[::-1]

    @property
    def rendered(self) -> str:
        """The text of the prompt, made with the chat template."""
        return "".join(turn.added_text for turn in self.path)

    @property
    def own_ids(self) -> list[int]:
        """The tokens that this turn adds to the tokens of the turn ``before``."""
        return self.added_ids + self.reply_ids

    @property
    def reply_ids(self) -> list[int]:
        """The tokens of the reply."""
        return self.given_ids + self.output_ids

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the prompt and the output."""
        return [token for turn in self.path for token in turn.own_ids]

    @property
    def prompt_ids(self) -> list[int]:
        """The whole prompt."""
        return [*(self.before.token_ids if self.before is not None else ()), *self.added_ids, *self.given_ids]

    @cached_property
    def history(self) -> tuple[Message, ...]:
        """The messages and the reply, if there is one."""
        return (*self.messages, self.reply.message())


class Session:
    """A conversation with its branches. `Sessions.open` makes one.

    ``key`` opens only this session. ``turns``: the finished turns, in the order in which they finished. ``running``:
    the number of requests that are being sampled. ``overflows``: the number of prompts that left no room for a reply.
    ``trains_constrained``: whether tokens that a grammar constrained are trained on. ``longest_reply``: the largest
    number of tokens of a reply, even if a request allows more. ``used``: when the last turn ended, or when the session
    was opened if it has no turn [s, monotonic].
    """

    def __init__(
        self,
        session_id: str,
        chat_format: ChatFormat,
        sampler: Sampler,
        max_context_len: int,
        defaults: SamplingParams | None = None,
        seed: int | None = None,
    ) -> None:
        self.id, self.key = session_id, secrets.token_urlsafe(24)
        self.format, self.max_context_len = chat_format, max_context_len
        self.defaults = defaults or SamplingParams(max_new_tokens=max_context_len)
        self.turns: list[Turn] = []
        self._unfinished: dict[int, GenerateResult] = {}  # number of a turn -> the result so far
        self.running = self.overflows = 0
        self.trains_constrained = False
        self.longest_reply: int | None = None
        self._sampler, self._seed = sampler, seed
        self._begun = 0
        self.used = time.monotonic()
        self._going = asyncio.Event()
        self._going.set()

    async def chat(
        self, messages: Sequence[Message], tools: Tools = None, params: SamplingParams | None = None
    ) -> Turn:
        """Answer ``messages``.

        ``params``: the default is the session's parameters. A reply that reaches the end of the context ends with
        reason "length". If ``params`` has no seed but the session has one, each turn gets its own random stream,
        derived from the session's seed.

        Raises:
            ValueError: the chat template refuses the messages, or the engine refuses the request.
            ContextFullError: the prompt leaves no room for a reply.
        """
        return await self.sample(self.turn(messages, tools), params)

    def pause(self) -> None:
        """Make new requests wait until `resume` is called. If the engine aborts a request during the pause, the request
        keeps its tokens and continues after `resume`."""
        self._going.clear()

    def resume(self) -> None:
        """End the `pause`."""
        self._going.set()

    @property
    def weight_versions(self) -> set[int]:
        """Versions of the weights that sampled this session's tokens, including the tokens of unfinished turns."""
        parts = [turn.weight_versions for turn in self.turns]
        return {version for part in parts + [r.weight_versions for r in self._unfinished.values()] for version in part}

    @property
    def paths(self) -> list[list[Turn]]:
        """For each leaf, the turns from the root to this leaf. The leaves are in the order in which their turns
        began."""
        parents = {turn.parent for turn in self.turns}
        leaves = [turn for turn in self.turns if turn.number not in parents]
        return [leaf.path for leaf in sorted(leaves, key=lambda leaf: leaf.number)]

    def samples(self, sample: Sample) -> list[Sample]:
        """Copies of ``sample``, one for each leaf of the tree, with the tokens of the path to this leaf.

        The prompt is the prompt of the path's first turn. The loss mask is 1 only on sampled tokens. On a sampled token
        that a grammar constrained, the mask is 1 only with ``trains_constrained``. A turn in several paths is trained
        on only in the first of these paths. Branches share a rollout id, so the episode counts once. ``metadata`` gets
        the number of ``turns``, and the number of ``malformed_tool_calls`` if it is not 0.

        Raises:
            ValueError: the session has no turn.
        """
        if not self.turns:
            raise ValueError(f"session {self.id} has no turn, so there is nothing to train on")
        seen: set[int] = set()
        made = []
        for path in self.paths:
            branch = Sample.from_dict(sample.to_dict())
            branch.tokens, branch.response, branch.response_length = list(path[0].added_ids), "", 0
            branch.loss_mask, branch.rollout_log_probs, branch.weight_versions = [], [], []
            branch.kept = None
            for turn in path:
                if turn.before is not None:
                    branch.append_response_tokens(turn.added_ids, trainable=False)
                branch.append_response_tokens(turn.given_ids, trainable=False)
                trained = turn.number not in seen
                constrained = turn.constrained if trained else None
                if constrained is not None and self.trains_constrained:
                    branch.count_constrained(constrained)
                    constrained = None
                branch.append_response_tokens(
                    turn.output_ids,
                    turn.log_probs,
                    weight_versions=turn.weight_versions,
                    kept=turn.kept,
                    constrained=constrained,
                    trainable=trained,
                )
            new = [turn for turn in path if turn.number not in seen]
            seen.update(turn.number for turn in new)
            branch.response = self.format.decode(branch.tokens[branch.prompt_length :])
            # if the agent aborted the last turn of a branch, the branch counts as truncated, because nothing will
            # continue it
            branch.status = Status.COMPLETED if path[-1].finish_reason == "stop" else Status.TRUNCATED
            branch.metadata["turns"] = len(new)
            if malformed := sum(len(turn.reply.malformed) for turn in new):
                branch.metadata["malformed_tool_calls"] = malformed
            made.append(branch)
        if len(made) > 1:
            for branch in made:
                branch.rollout_id = sample.index if sample.rollout_id is None else sample.rollout_id
        return made

    def turn(
        self,
        messages: Sequence[Message],
        tools: Tools = None,
        forced: Sequence[str] = (),
        template_kwargs: Mapping[str, object] | None = None,
        *,
        one_call: bool = False,
        goes_on: bool = False,
    ) -> Turn:
        """The turn that answers ``messages``, with its place in the tree and its prompt. `sample` then generates the
        reply.

        ``forced``: the reply must begin like a call of one of these tools. ``one_call``: the reply ends with its first
        call. ``goes_on``: the reply continues the last message, which must be an assistant message.

        Raises:
            ValueError: the chat template refuses the messages; the template does not show calls (only with ``forced``);
                or the end of the first call cannot be recognised (only with ``one_call``).
        """
        template_kwargs = template_kwargs or {}
        if goes_on and messages[-1]["role"] != "assistant":
            raise ValueError("continue_final_message: the last message must be the assistant's")
        messages, begun = (messages[:-1], messages[-1]) if goes_on else (messages, None)
        sent = tuple(comparable(message) for message in messages)
        before = [turn for turn in self.turns if turn.messages and _begins(messages, sent, turn)]
        before.sort(key=lambda turn: -len(turn.messages))
        known = before[0].history if before else ()
        whole = (*known, *messages[len(known) :])
        if before:  # the earlier turn has most of this part already
            sent = (*before[0].sent, *sent[len(before[0].sent) :])
        rendered = self.format.render(whole, tools, **template_kwargs)
        if tokens := self.format.excess(rendered, self.max_context_len):
            self.overflows += 1
            raise ContextFullError(tokens, self.max_context_len)
        if begun is not None:
            if forced:
                raise ValueError(
                    "continue_final_message: a reply that begins with text cannot become a tool call; use "
                    "tool_choice auto"
                )
            opening = self.format.begun(whole, begun, rendered, tools, **template_kwargs)
        else:
            opening = self.format.opening(whole, rendered, forced, tools, **template_kwargs) if forced else []
        ends = self.format.call_ends(tools) if one_call else ()
        for parent in before:
            thinking = (parent.reply.reasoning or "").strip()
            # a quick check first: a template that removes thinking removes it from all turns
            if thinking not in rendered:
                continue
            text, at = parent.rendered, len(parent.messages)
            added = self.format.continuation(text, rendered, parent.reply_ids, whole, at, tools, **template_kwargs)
            if added is not None:
                return Turn(self._next(), parent, whole, rendered[len(text) :], added, sent, tools, opening, ends)
        return Turn(self._next(), None, whole, rendered, self.format.encode(rendered), sent, tools, opening, ends)

    def raw_turn(self, input_ids: Sequence[int]) -> Turn:
        """The turn that continues raw tokens. Its parent is a turn whose prompt and output are the beginning of the raw
        tokens. If there are several such turns, the parent is the longest one."""
        ids, parent = list(input_ids), None
        # number of a turn that the tokens begin with -> the position in the tokens where the turn ends
        ends: dict[int | None, int] = {None: 0}
        for turn in self.turns:  # each turn comes after the turn that it continues
            begin = ends.get(turn.parent)
            own = turn.own_ids
            if begin is not None and ids[begin : begin + len(own)] == own:
                ends[turn.number] = begin + len(own)
                if parent is None or ends[turn.number] > ends[parent.number]:
                    parent = turn
        return Turn(self._next(), parent, (), "", ids[ends[parent.number] if parent is not None else 0 :])

    def _next(self) -> int:
        self._begun += 1
        return self._begun - 1

    async def sample(self, turn: Turn, params: SamplingParams | None = None, on_tokens: OnTokens | None = None) -> Turn:
        """Fill a new ``turn`` with the sampler's result, add it to the session, and return it; see `chat`."""
        params = params or self.defaults
        prompt_ids = turn.prompt_ids
        room = self.max_context_len - len(prompt_ids)
        if room <= 0:
            self.overflows += 1
            raise ContextFullError(len(prompt_ids), self.max_context_len)
        if self.longest_reply is not None:
            room = min(room, self.longest_reply)
        seed = params.seed
        if seed is None and self._seed is not None:
            seed = stream_seed(self._seed, turn.number)
        params = replace(params.after(0, room), seed=seed)
        try:
            known = self.format.guided(params, turn.rendered, turn.tools, turn.given_ids)
            whole = replace(known, stop=(*params.stop, *turn.ends))
            result = await self._whole(turn, prompt_ids, whole, on_tokens)
        finally:
            self._unfinished.pop(turn.number, None)
        turn.output_ids, turn.log_probs = result.output_ids, result.log_probs
        turn.weight_versions, turn.kept, turn.constrained = result.weight_versions, result.kept, result.constrained
        turn.finish_reason, turn.cached_tokens = result.finish_reason, result.cached_tokens
        opened = self.format.opens_thinking(turn.rendered)
        turn.reply = self.format.reply(turn.reply_ids, turn.tools, opened=opened, salt=f"{self.id}/{turn.number}")
        message = turn.reply.message()
        shown = {**message, "content": before_stop(turn.reply.content, params.stop)}
        turn.echoes = comparable(message), comparable(shown)
        self.turns.append(turn)
        self.used = turn.ended = time.monotonic()
        return turn

    async def _whole(
        self, turn: Turn, prompt_ids: list[int], params: SamplingParams, on_tokens: OnTokens | None
    ) -> GenerateResult:
        """The response to ``turn``. If a pause interrupts the request, the request continues afterwards with the new
        weights."""
        whole = GenerateResult(f"{self.id}/{turn.number}")
        self._unfinished[turn.number] = whole
        for part in count():
            await self._going.wait()
            if whole.length and params.guided:
                # in SGLang, a grammar applies from the first token of a response on
                if on_tokens is not None:
                    raise ConnectionError(
                        "the reply was interrupted, and a reply that follows a grammar cannot be resumed; send the "
                        "request again"
                    )
                whole = self._unfinished[turn.number] = GenerateResult(whole.request_id)
            done = whole.length
            request = GenerateRequest(
                request_id=f"{self.id}/{turn.number}/{part}",
                input_ids=(*prompt_ids, *whole.output_ids),
                params=params.after(done),
                prefix_key=self.id,
                position=done,
            )
            self.running += 1
            try:
                result = await self._sampler(request, on_tokens)
            finally:
                self.running -= 1
            columns = map(joined, whole.columns, result.columns)
            whole.kept = together(whole.kept, done, result.kept, result.length)
            if whole.constrained is not None and result.constrained is not None:
                result.constrained = np.concatenate([whole.constrained, result.constrained])
            whole.constrained = result.constrained
            whole.output_ids, whole.log_probs, whole.weight_versions = columns
            whole.finish_reason = result.finish_reason
            whole.cached_tokens = whole.cached_tokens if part else result.cached_tokens
            if result.finish_reason != "abort" or self._going.is_set():
                break
            if whole.length == params.max_new_tokens:
                whole.finish_reason = "length"
                break
        return whole


class Sessions:
    """The open sessions on one sampler.

    Args:
        max_context_len: the largest number of tokens of prompt and reply together.
        defaults: sampling parameters of sessions that set none. The ``max_new_tokens`` of ``defaults`` equals
            ``max_context_len``.
    """

    def __init__(
        self, chat_format: ChatFormat, sampler: Sampler, max_context_len: int, defaults: Mapping[str, Any] | None = None
    ) -> None:
        self.format, self.sampler, self.max_context_len = chat_format, sampler, max_context_len
        self.defaults = SamplingParams(max_new_tokens=max_context_len, **(defaults or {}))
        self._open: dict[str, Session] = {}

    def open(
        self, session_id: str | None = None, *, defaults: SamplingParams | None = None, seed: int | None = None
    ) -> Session:
        """Open a session. Without an id, the session gets a new id. ``seed``: each turn gets its own seed, which is
        derived from this seed. The default is the seed of ``defaults``.

        Raises:
            ValueError: another open session has the id ``session_id``.
        """
        defaults = self.defaults if defaults is None else defaults
        if seed is None:  # two turns with the same seed would draw the same random numbers
            defaults, seed = replace(defaults, seed=None), defaults.seed
        session_id = uuid.uuid4().hex if session_id is None else session_id
        if session_id in self._open:
            raise ValueError(f"session {session_id!r} exists already; close it, or use another id")
        session = Session(session_id, self.format, self.sampler, self.max_context_len, defaults, seed)
        self._open[session_id] = session
        return session

    def get(self, session_id: str, key: str | None) -> Session:
        """The open session of this id.

        Raises:
            LookupError: there is no such session.
            PermissionError: ``key`` is wrong for this session.
        """
        session = self.find(session_id)
        if not hmac.compare_digest((key or "").encode(), session.key.encode()):
            raise PermissionError(f"this key does not give access to session {session_id!r}")
        return session

    def find(self, session_id: str) -> Session:
        """The open session of this id, for callers that need no key.

        Raises:
            LookupError: there is no such session.
        """
        if session_id not in self._open:
            raise LookupError(f"there is no session {session_id!r}; it may have been closed")
        return self._open[session_id]

    def __len__(self) -> int:
        """Number of open sessions."""
        return len(self._open)

    def __contains__(self, session: Session) -> bool:
        """Whether the session is open. An anonymous session is never open."""
        return self._open.get(session.id) is session

    def close(self, session_id: str) -> Session:
        """Close the session and return it. Requests of the session that are being sampled continue.

        Raises:
            LookupError: there is no such session.
        """
        self.find(session_id)
        return self._open.pop(session_id)

    def forget(self, idle_s: float) -> None:
        """Close the sessions that were not used for ``idle_s`` seconds."""
        since = time.monotonic() - idle_s
        for session in [s for s in self._open.values() if s.used < since and not s.running]:
            self.close(session.id)

    def anonymous(self) -> Session:
        """A session that is not registered, for a request that names no session."""
        return Session(uuid.uuid4().hex, self.format, self.sampler, self.max_context_len, self.defaults)


def _begins(messages: Sequence[Message], sent: Sequence[tuple[object, ...]], turn: Turn) -> bool:
    """Whether ``messages`` begin with the history of ``turn``, in the form in which clients send messages back.
    ``sent``: the `comparable` parts of the messages.

    A client without support for thinking leaves the thinking out, which is allowed. If a client sends different
    thinking, it has rewritten the message.
    """
    at = len(turn.sent)
    if len(sent) <= at or sent[at] not in turn.echoes or sent[:at] != turn.sent:
        return False
    for message, ours in zip(messages, turn.history, strict=False):
        thinking = message.get("reasoning_content") or message.get("reasoning")
        if thinking and thinking != ours.get("reasoning_content"):
            return False
    return True
