"""The interface of environments. An environment is an object that begins an episode, answers each reply of the model,
and ends the episode.

::

    class Guess:
        '''The model guesses the label; it is told whether its guess was too small or too large.'''

        def reset(self, row):
            self.number = int(row.label)
            return Start([{"role": "user", "content": "Guess my number, 1 to 9."}])

        def step(self, reply):
            guess = int(reply["content"])
            if guess == self.number:
                return Step(reward=1.0, done=True)
            return Step([{"role": "user", "content": "larger" if guess < self.number else "smaller"}])

``--environment guess.py:Guess`` trains in this environment. Methods may be async. A plain method runs in its own
thread, so a tool that sleeps does not block other episodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """The row of ``--prompt-data`` for an episode.

    ``prompt``: the messages of the row. A text becomes one user message. The list is empty if the run has no data.
    ``seed``: the seed for the environment's random choices. All episodes of a group have the same seed, so they play
    the same game.
    """

    prompt: list[Message]
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True)
class Start:
    """The start of an episode. ``messages``: the first messages for the model. ``tools``: the tools that the model may
    call, as JSON schemas in OpenAI's form.

    ``role``: the role that replies first. ``role`` is needed only if the model plays several roles in the environment,
    such as the two players of a game. Each role has its own conversation.
    """

    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]] = ()
    role: str = ""


@dataclass(frozen=True)
class Step:
    """The answer to a reply of the model.

    ``role``: the role that replies next; None: the role that has just replied. ``messages``: the messages that are
    added to the conversation of this next role. ``reward``: the reward of the reply. A dict has named parts, and the
    reward is the sum of the parts. If no step of an episode has a reward, ``--rm-type`` or ``--custom-rm-path`` scores
    the episode. ``rewards``: role -> the reward of this other role's last reply. ``done``: whether the episode is over.
    ``metrics``: numbers to log, summed over an episode. The metrics do not affect training. ``call_seconds``: the time
    of each tool call of the reply, in order [s]. The run's HTML page shows the ``call_seconds``.
    """

    messages: Sequence[Message] = ()
    reward: float | Mapping[str, float] | None = None
    done: bool = False
    role: str | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    call_seconds: Sequence[float] = field(default=(), compare=False)


class Environment(Protocol):
    """The methods of an environment. Each episode has its own object. If the object has a method ``close(self) ->
    None``, this method is called at the end of the episode.

    A method ``golden(self)`` may return the replies of the best episode after `reset`, as texts or messages.
    ``slimelite env check`` plays these replies. Without this method, the row's label is the golden answer.

    An exception in a method ends the episode. ``--reward-error`` decides what happens to the episode's samples.
    """

    def reset(self, row: Row) -> Start:
        """Begin the episode."""
        ...

    def step(self, reply: Mapping[str, Any]) -> Step:
        """Respond to a reply of the model.

        ``reply``: an OpenAI message with ``content``. The message may also have ``tool_calls`` and
        ``reasoning_content``. The field ``malformed`` has a sentence for each call that could not be read. The field
        ``finish_reason`` is "length" if a limit cut off the reply. After a reply that a limit cut off, the episode ends
        with this step.
        """
        ...
