"""What an environment is: an object that begins an episode, answers each reply of the model, and ends it.

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

``--environment guess.py:Guess`` trains on it. Methods may be async; plain ones run in a thread of their own, so that a
tool that sleeps stops nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """What an episode begins with: a row of ``--prompt-data``.

    ``prompt``: its messages, where text is one message of the user; empty if the run has no data. ``seed``: for the
    environment's own chance; all episodes of a group have the same, so that they play the same game.
    """

    prompt: list[Message]
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True)
class Start:
    """What the model sees first: messages, and the tools that it may call, as JSON schemas in OpenAI's form.

    ``role``: who speaks first, in an environment that several roles of the model share, such as the two players of a
    game. Every role has a conversation of its own.
    """

    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]] = ()
    role: str = ""


@dataclass(frozen=True)
class Step:
    """What a reply of the model leads to.

    ``messages`` follow the reply in the conversation of whoever speaks next: ``role``, or the same role if it is None.
    ``reward``: for the reply; a dict has named parts, and their sum is the reward. If no step of an episode has a
    reward, ``--rm-type`` or ``--custom-rm-path`` scores it. ``rewards``: for the last replies of other roles, by role.
    ``done``: the episode is over. ``metrics``: numbers to log, as sums over an episode; nothing is trained on them.
    ``call_seconds``: how long each call of the reply took, in their order; the page of the run shows it.
    """

    messages: Sequence[Message] = ()
    reward: float | Mapping[str, float] | None = None
    done: bool = False
    role: str | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    call_seconds: Sequence[float] = field(default=(), compare=False)


class Environment(Protocol):
    """One object for each episode. A method ``close(self) -> None`` is called at the end, if there is one.

    A method ``golden(self)`` may return the replies of the best episode after `reset`, as texts or messages:
    ``slimelite env check`` plays them. Without it the label of the row is the golden answer.

    What a method raises ends the episode; ``--reward-error`` says what becomes of it.
    """

    def reset(self, row: Row) -> Start:
        """Begin the episode."""
        ...

    def step(self, reply: Mapping[str, Any]) -> Step:
        """Answer a reply of the model.

        ``reply``: an OpenAI message with ``content``, ``tool_calls`` and ``reasoning_content`` if there are any; its
        ``malformed`` has a sentence for each call that could not be read, and its ``finish_reason`` is "length" if a
        limit cut it off: the episode then ends with this step.
        """
        ...
