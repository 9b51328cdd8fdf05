"""``nim``: a game for two players. The model plays both, each with its own conversation and advantages.

Players take 1 to 3 matches from a pile in turn. The player who takes the last one wins. With a pile of 4, 8, 12 … the
player to move loses, if the other makes no mistake. The right move is the rest of the pile divided by 4.
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
    """A win is worth 1, a loss −1. A player whose move is invalid loses, and the other player gets 0.

    ``metadata`` of a row: ``pile``, and ``opponent``. "self" means the model; the environment plays "random" and
    "perfect". ``metrics``: ``winning_chances``, the moves from a pile that can be won, and ``winning_moves``, the right
    ones among them.
    """

    def reset(self, row: Row) -> Start:
        """Begin a game. The row, or else chance, decides how many matches the pile has."""
        self._chance = random.Random(row.seed)
        self._pile = int(row.metadata.get("pile") or self._chance.choice(PILES))
        self._opponent = row.metadata.get("opponent", "self")
        if self._opponent not in OPPONENTS:
            raise ValueError(f"there is no opponent {self._opponent!r}; there are {', '.join(OPPONENTS)}")
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
    """``spec``: the opponent, which rows may also name.

    Raises:
        ValueError: there is no such opponent.
    """
    if spec and spec not in OPPONENTS:
        raise ValueError(f"--environment nim:{spec}: the opponent is one of {', '.join(OPPONENTS)}")
    return Nim


def rows(spec: str) -> Iterator[dict[str, Any]]:
    """Each pile, many times over."""
    for _ in range(64):
        for pile in PILES:
            yield {"input": "nim", "metadata": {"pile": pile, "opponent": spec or "self"}}
