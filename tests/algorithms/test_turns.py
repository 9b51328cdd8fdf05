"""Estimators whose steps are turns, against loops over rows and turns."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged import few

from slimelite.algorithms.advantages import RolloutTokens, gae, grpo_turns, ppo_turns, reinforce_plus_plus

# a turn: tokens of the environment before the reply, its tokens, its reward
Turn = tuple[int, int, float]
Row = list[Turn]
numbers = st.floats(-2, 2).map(lambda x: round(x, 2))
rows_of_turns = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), numbers), min_size=1, max_size=4), min_size=1, max_size=7
)


def packed(rows: list[Row], extra: float = 0.0, **more: object) -> RolloutTokens:
    """The rows' tokens; ``extra``: what each row's reward has beyond that of its turns. Rows 0, 1, 2 are a group, and
    the last row is a branch of the rollout of the one before it.
    """
    mask, segments, rewards = [], [], []
    for number, row in enumerate(rows):
        for before, reply, reward in row:
            mask += [False] * before + [True] * reply
            rewards += [math.nan] * (before + reply - 1) + [reward]
            segments += [number] * (before + reply)
    rollouts = list(range(len(rows)))
    if len(rows) in (2, 3, 5, 6):  # both are in one group
        rollouts[-1] = rollouts[-2]
    return RolloutTokens(
        torch.tensor([sum(turn[2] for turn in row) + extra for row in rows]),
        torch.zeros(len(mask)),
        torch.tensor(mask),
        torch.tensor(segments),
        turn_rewards=torch.tensor(rewards),
        groups=torch.tensor([number // 3 for number in range(len(rows))]),
        rollouts=torch.tensor(rollouts),
        **more,  # type: ignore[arg-type]
    )


def returns_to_go(row: Row, gamma: float, extra: float) -> list[float]:
    """G of each turn."""
    found, after = [], 0.0
    for number, (*_, reward) in reversed(list(enumerate(row))):
        after = reward + (extra if number == len(row) - 1 else 0.0) + gamma * after
        found.insert(0, after)
    return found


def per_token(rows: list[Row], values: list[list[float]]) -> list[float]:
    """The value of its turn for each token, 0 for those of the environment."""
    pairs = [pair for row, of_row in zip(rows, values, strict=True) for pair in zip(row, of_row, strict=True)]
    return [x for (before, reply, _), value in pairs for x in [0.0] * before + [value] * reply]


@few
@given(rows=rows_of_turns, gamma=st.sampled_from([1.0, 0.9]), extra=st.sampled_from([0.0, 0.5]))
def test_grpo_turns_equals_the_loop(rows: list[Row], gamma: float, extra: float) -> None:
    tokens = packed(rows, extra, gamma=gamma)
    assert tokens.groups is not None
    assert tokens.rollouts is not None
    groups, rollouts = tokens.groups.tolist(), tokens.rollouts.tolist()
    returns = [returns_to_go(row, gamma, extra) for row in rows]
    expected: list[list[float]] = []
    for number in range(len(rows)):
        of_row = []
        for k, mine in enumerate(returns[number]):
            there = [i for i in range(len(rows)) if groups[i] == groups[number] and len(returns[i]) > k]
            means = [
                statistics.fmean(returns[i][k] for i in there if rollouts[i] == r) for r in {rollouts[i] for i in there}
            ]
            std = statistics.stdev(means) if len(means) > 1 else 0.0
            of_row.append((mine - statistics.fmean(means)) / (std + 1e-6) if std > 1e-6 else 0.0)
        expected.append(of_row)
    # turn rewards are fp32: a group of nearly equal returns divides their rounding by 1e-6
    assert grpo_turns(tokens).tolist() == pytest.approx(per_token(rows, expected), abs=1e-4, rel=1e-4)


@few
@given(rows=rows_of_turns, gamma=st.sampled_from([1.0, 0.9]), lambd=st.sampled_from([1.0, 0.8]), data=st.data())
def test_ppo_turns_equals_the_loop(rows: list[Row], gamma: float, lambd: float, data: st.DataObject) -> None:
    tokens = packed(rows, 0.25, gamma=gamma, lambd=lambd)
    count = len(tokens.mask)
    values = torch.tensor(data.draw(st.lists(numbers, min_size=count, max_size=count)))
    advantages, returns = ppo_turns(packed(rows, 0.25, gamma=gamma, lambd=lambd, values=values))
    expected, targets, position = [], [], 0
    for row in rows:
        first = []
        for before, reply, _ in row:
            first.append(values[position + before].item())
            position += before + reply
        steps = [*zip(row, pairwise([*first, 0.0]), strict=True)]
        of_row, after = [], 0.0
        for number, ((*_, reward), (value, following)) in reversed(list(enumerate(steps))):
            gained = reward + (0.25 if number == len(row) - 1 else 0.0)
            after = gained + gamma * following - value + gamma * lambd * after
            of_row.insert(0, after)
        expected.append(of_row)
        targets.append([a + v for a, v in zip(of_row, first, strict=True)])
    assert advantages.tolist() == pytest.approx(per_token(rows, expected), abs=1e-5)
    assert returns.tolist() == pytest.approx(per_token(rows, targets), abs=1e-5)


def test_rewards_of_turns_reach_estimators_of_tokens_where_their_turns_end() -> None:
    tokens = packed([[(1, 2, 1.0), (2, 1, -0.5)], [(0, 2, 0.0)]], 0.25, gamma=0.5)
    assert tokens.rewards().tolist() == [0.0, 0.0, 1.0, 0.0, 0.0, -0.25, 0.0, 0.25]
    assert reinforce_plus_plus(tokens)[:3].tolist() == [0.25 - 0.25 / 32, 0.5 - 0.25 / 16, 1.0 - 0.25 / 8]


def test_without_turns_they_are_the_estimators_of_whole_rows() -> None:
    """One turn a row: grpo; a turn for each token: ppo."""
    rewards, mask, segments = torch.tensor([1.0, 0.0, 0.0]), torch.ones(6) > 0, torch.tensor([0, 0, 1, 1, 2, 2])
    ids = {"groups": torch.zeros(3, dtype=torch.int64), "rollouts": torch.arange(3)}
    whole = grpo_turns(RolloutTokens(rewards, torch.zeros(6), mask, segments, **ids))
    third = 1 / 3
    assert whole.tolist() == pytest.approx([x for r in (1.0, 0.0, 0.0) for x in [(r - third) / (3**-0.5 + 1e-6)] * 2])
    values = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    tokens = RolloutTokens(rewards, torch.zeros(6), mask, segments, values, torch.zeros(6), gamma=0.9, lambd=0.7)
    expected = gae(tokens.rewards(), values, mask, segments, gamma=0.9, lambd=0.7)
    for found, wanted in zip(ppo_turns(tokens), expected, strict=True):
        assert found.tolist() == pytest.approx(wanted.tolist(), abs=1e-6)
