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

``--environment guess.py:Guess`` trains on it. Methods may be async. A plain method runs in its own thread, so that a
tool that sleeps stops nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """The row of ``--prompt-data`` that an episode begins with.

    ``prompt``: its messages. Text becomes one message of the user. Empty if the run has no data. ``seed``: for the
    environment's random choices. All episodes of a group have the same seed, so that they play the same game.
    """

    prompt: list[Message]
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True)
class Start:
    """What the model sees first. ``messages``: the first messages. ``tools``: the tools that it may call, as JSON
    schemas in OpenAI's form.

    ``role``: who speaks first, if several roles of the model share the environment, such as the two players of a game.
    Each role has its own conversation.
    """

    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]] = ()
    role: str = ""


@dataclass(frozen=True)
class Step:
    """The answer to a reply of the model.

    ``messages``: these follow the reply in the conversation of the next speaker, which is ``role``, or the same role if
    that is None. ``reward``: for the reply. A dict has named parts, and the reward is their sum. If no step of an
    episode has a reward, ``--rm-type`` or ``--custom-rm-path`` scores it. ``rewards``: for the last replies of other
    roles, by role. ``done``: whether the episode is over. ``metrics``: numbers to log, summed over an episode. They do
    not affect training. ``call_seconds``: how long each call of the reply took, in order. The run's page shows it.
    """

    messages: Sequence[Message] = ()
    reward: float | Mapping[str, float] | None = None
    done: bool = False
    role: str | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    call_seconds: Sequence[float] = field(default=(), compare=False)


class Environment(Protocol):
    """There is one object for each episode. If there is a method ``close(self) -> None``, it is called at the end.

    A method ``golden(self)`` may return the replies of the best episode after `reset`, as texts or messages.
    ``slimelite env check`` plays them. Without it, the row's label is the golden answer.

    An exception in a method ends the episode. ``--reward-error`` decides what happens to it.
    """

    def reset(self, row: Row) -> Start:
        """Begin the episode."""
        ...

    def step(self, reply: Mapping[str, Any]) -> Step:
        """Answer a reply of the model.

        ``reply``: an OpenAI message with ``content``, and with ``tool_calls`` and ``reasoning_content`` if there are
        any. Its ``malformed`` has a sentence for each call that could not be read. Its ``finish_reason`` is "length" if
        a limit cut it off; the episode then ends with this step.
        """
        ...
