"""The environment ``textarena:<Game>``, a game of TextArena. The model plays all players, and each player has its own
conversation."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any
from urllib.parse import parse_qsl

from slimelite.environments.protocol import Message, Row, Start, Step

# if the spec has no number of players, numbers up to this one are tried in turn
MOST_PLAYERS = 15
# number of rows of an epoch
GAMES = 1000


@contextmanager
def _global_chance(keeper: Game | None = None) -> Iterator[None]:
    """In this block, Python's global random numbers come from the game's own sequence. After the block, the global
    sequence continues as before."""
    before = random.getstate()
    if keeper is not None:
        random.setstate(keeper.chance)
    try:
        yield
    finally:
        if keeper is not None:
            keeper.chance = random.getstate()
        random.setstate(before)


class Game:
    """One game. Players take turns. The game's reward for a player is the reward of the player's last reply.

    The library's games draw from Python's global random numbers. In this adapter, each game has its own sequence of
    random numbers. So a seed always gives the same game, even if other games run at the same time.
    """

    def __init__(self, name: str, players: int) -> None:
        self._name, self._players = name, players

    async def reset(self, row: Row) -> Start:
        """Begin the game. This method and `step` are async, so they run on the event loop instead of in threads. Two
        games therefore never use the global random numbers at the same time."""
        import textarena

        self.chance = random.Random(row.seed).getstate()
        with _global_chance(self):
            self._game = textarena.make(self._name)
            self._game.reset(num_players=self._players, seed=row.seed)
            player, messages = self._seen()
        return Start(messages, role=self._role(player))

    async def step(self, reply: Mapping[str, Any]) -> Step:
        """Make the move that the reply contains. If the game cannot read the move, the game decides what happens."""
        mover = self._game.state.current_player_id
        with _global_chance(self):
            done, _ = self._game.step(reply.get("content") or "")
            if not done and reply.get("finish_reason") != "length":
                player, messages = self._seen()
                return Step(messages, role=self._role(player))
            rewards, facts = self._game.close()
        rewards = rewards or {}
        others = {self._role(player): float(value) for player, value in rewards.items() if player != mover}
        wrong = sum(bool(fact.get("invalid_move")) for fact in facts.values())
        return Step(reward=float(rewards.get(mover, 0.0)), done=True, rewards=others, metrics={"invalid_moves": wrong})

    def _seen(self) -> tuple[int, list[Message]]:
        """The player who must move, and the new messages for this player. The player's own messages are left out."""
        inner = self._game
        while hasattr(inner, "env"):  # the library's wrappers would repeat all messages to a player in each turn
            inner = inner.env
        from textarena import GAME_ID

        player, observation = inner.get_observation()
        roles = inner.state.role_mapping
        names = {other: f"[{name}] " for other, name in roles.items() if other != GAME_ID}
        lines = [f"{names.get(source, '')}{text}" for source, text, _ in observation if source != player]
        return player, [{"role": "user", "content": "\n".join(lines) or "It is your turn."}]

    def _role(self, player: int) -> str:
        return f"player {player}" if self._players > 1 else ""


def make(spec: str) -> Callable[[], Game]:
    """The factory of the games of ``spec``, such as ``TicTacToe-v0`` or ``Poker-v0?players=4``.

    Raises:
        ValueError: there is no such game, or the game cannot start.
    """
    import textarena
    from textarena.envs.registration import ENV_REGISTRY

    name, _, query = spec.partition("?")
    if name not in ENV_REGISTRY:
        near = ", ".join(get_close_matches(name, ENV_REGISTRY, 3, 0.4)) or "TicTacToe-v0, GuessTheNumber-v0"
        raise ValueError(f"--environment textarena:{spec}: there is no game {name}; known games are {near}, …")
    options = dict(parse_qsl(query))
    players = options.pop("players", None)
    if options or not (players or "1").isdecimal():
        raise ValueError(f"--environment textarena:{spec}: write {name}, or {name}?players=N with a number")
    problem: Exception | None = None
    for count in [int(players)] if players else range(1, MOST_PLAYERS + 1):
        try:
            with _global_chance():
                textarena.make(name).reset(num_players=count, seed=0)
            return lambda: Game(name, count)
        except (AssertionError, ValueError) as error:  # the number of players is too small or too large
            problem = problem or error
        except Exception as error:  # for example, the library cannot download a word list, or a module is missing
            raise ValueError(f"--environment textarena:{spec} cannot begin: {type(error).__name__}: {error}") from error
    raise ValueError(
        f"--environment textarena:{spec} cannot begin with {players or 'any number of'} players: {problem}"
    )


def rows(spec: str) -> Iterator[dict[str, Any]]:
    """Yield the same row many times. The prompt comes from the game. Each row starts a new game with another seed."""
    return ({"input": spec, "metadata": {}} for _ in range(GAMES))
