"""The environment ``nim``, a game for two players. The model plays both players. Each player has its own conversation
and advantages.

In turn, the players take 1 to 3 matches from a pile. The player who takes the last match wins. With a pile of 4, 8, 12
… the player to move loses if the other player makes no mistake. The right move is the remainder of the pile divided by
4.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

from slimelite.environments.protocol import Message, Row, Start, Step

MOST = 3
PILES = range(3, 10)
PLAYERS = ("first", "second")
OPPONENTS = ("self", "random", "perfect")


class Nim:
    """The game. A win gives reward 1, and a loss gives −1. A player with an invalid move loses, and the other player
    gets 0.

    The ``metadata`` of a row may have ``pile`` and ``opponent``. The opponent "self" is the model. The opponents
    "random" and "perfect" are played by the environment. The metric ``winning_chances`` counts the moves for which a
    winning move existed. The metric ``winning_moves`` counts how often the model then made the winning move.
    """

    def reset(self, row: Row) -> Start:
        """Begin a game. ``pile`` in the row's ``metadata`` is the number of matches at the start. If ``pile`` is
        missing, the number is random."""
        self._chance = random.Random(row.seed)
        self._pile = int(row.metadata.get("pile") or self._chance.choice(PILES))
        self._opponent = row.metadata.get("opponent", "self")
        if self._opponent not in OPPONENTS:
            raise ValueError(f"there is no opponent {self._opponent!r}; use one of {', '.join(OPPONENTS)}")
        self._player = 0
        return Start(self._shown(), role=PLAYERS[0])

    def step(self, reply: Mapping[str, Any]) -> Step:
        """Make the move. If the opponent is not the model, make the opponent's move too."""
        match = re.fullmatch(r"\s*(\d{1,9})\s*", reply.get("content") or "")
        move = int(match[1]) if match else 0
        other = PLAYERS[1 - self._player]
        metrics = {"illegal_moves": 0.0}
        if self._pile % (MOST + 1):
            metrics |= {"winning_chances": 1.0, "winning_moves": float(move == self._pile % (MOST + 1))}
        if not 1 <= move <= min(MOST, self._pile):
            return Step(reward=-1.0, rewards={other: 0.0}, done=True, metrics={**metrics, "illegal_moves": 1.0})
        self._pile -= move
        if not self._pile:
            return Step(reward=1.0, rewards={other: -1.0}, done=True, metrics=metrics)
        if self._opponent == "self":
            self._player = 1 - self._player
            return Step(self._shown(), role=other, metrics=metrics)
        self._pile -= self._answer()
        if not self._pile:
            return Step(reward=-1.0, done=True, metrics=metrics)
        return Step(self._shown(), metrics=metrics)

    def _shown(self) -> list[Message]:
        return [{"role": "user", "content": str(self._pile)}]

    def _answer(self) -> int:
        """The opponent's move."""
        right = self._pile % (MOST + 1)
        return right if right and self._opponent == "perfect" else self._chance.randint(1, min(MOST, self._pile))


def make(spec: str) -> type[Nim]:
    """The factory of the environment. ``spec``: the opponent. Rows may name another opponent.

    Raises:
        ValueError: there is no such opponent.
    """
    if spec and spec not in OPPONENTS:
        raise ValueError(f"--environment nim:{spec}: the opponent must be one of {', '.join(OPPONENTS)}")
    return Nim


def rows(spec: str) -> Iterator[dict[str, Any]]:
    """Yield 64 rows for each pile, with the piles in turn."""
    for _ in range(64):
        for pile in PILES:
            yield {"input": "nim", "metadata": {"pile": pile, "opponent": spec or "self"}}
