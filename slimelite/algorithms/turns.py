"""Advantages for each reply of an episode: estimators whose steps are turns, not tokens.

A turn of a row ends where `RolloutTokens.turn_rewards` has a number, and at the row's last unmasked token; the tokens
of an environment before a reply count as part of its turn, and are masked. A row without numbers is one turn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slimelite.algorithms.advantages import RolloutTokens, gae, last_tokens, reverse_scan


@dataclass(frozen=True, slots=True)
class Turns:
    """The K turns of the rows of a rollout, in order.

    ``of``: [T] int64 turn of each token, K after the last end; ``rows``: [K] int64; ``number``: [K] int64 of the turn
    in its row, from 0; ``rewards``: [K] float64 sums of the rewards of its tokens; ``begin``: [K] int64 position of its
    first unmasked token, or of its end if all are masked.
    """

    of: Tensor
    rows: Tensor
    number: Tensor
    rewards: Tensor
    begin: Tensor

    @classmethod
    def read(cls, tokens: RolloutTokens) -> Turns:
        """The turns of ``tokens``."""
        ends = torch.zeros_like(tokens.mask)
        last = last_tokens(tokens.mask, tokens.segments, len(tokens.advantages))
        ends[last[last >= 0]] = True
        if tokens.turn_rewards is not None:
            ends |= tokens.turn_rewards.isfinite()
        places = ends.nonzero()[:, 0]
        count = len(places)
        of = ends.long().cumsum(0) - ends.long()
        rows = tokens.segments[places]
        _, sizes = torch.unique_consecutive(rows, return_counts=True)
        number = torch.arange(count) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
        rewards = torch.zeros(count + 1, dtype=torch.float64).index_add(0, of, tokens.rewards().double())
        position = torch.arange(len(of))
        begin = torch.cat([places, places.new_zeros(1)])
        begin = begin.scatter_reduce(0, of[tokens.mask], position[tokens.mask], "amin")
        return cls(of, rows, number, rewards[:count], begin[:count])

    def spread(self, values: Tensor, mask: Tensor) -> Tensor:
        """[T] the value of each token's turn of ``values`` [K], 0 where masked."""
        return torch.where(mask, torch.cat([values, values.new_zeros(1)])[self.of], 0.0)


@torch.no_grad()
def grpo_turns(tokens: RolloutTokens) -> Tensor:
    """[T] A_k = (G_k − mean) / (std + 1e-6) of the k-th turns of the rollouts of a group (after arXiv:2505.11821).

    G_k = r_k + γ·G_{k+1}. Branches of one rollout count with their mean, each with its own G_k. A turn that no other
    rollout of the group has, or that all have with the same G, gets 0. Standard deviations are unbiased.
    """
    assert tokens.groups is not None
    assert tokens.rollouts is not None
    turns = Turns.read(tokens)
    returns = reverse_scan(turns.rewards, tokens.gamma, turns.rows)
    _, place = torch.stack([tokens.groups[turns.rows], turns.number], 1).unique(dim=0, return_inverse=True)
    _, one = torch.stack([place, tokens.rollouts[turns.rows]], 1).unique(dim=0, return_inverse=True)
    means = _mean(returns, one)  # of the branches of a rollout
    where = torch.zeros_like(means, dtype=torch.int64).index_copy(0, one, place)
    mean = _mean(means, where)
    size = torch.bincount(where, minlength=len(mean))
    squares = torch.zeros_like(mean).index_add(0, where, (means - mean[where]).square())
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    # rewards are fp32, so that equal returns may differ by their rounding
    compared = (size > 1) & (std > 1e-6 * (1 + mean.abs()))
    advantages = torch.where(compared[place], (returns - mean[place]) / (std[place] + 1e-6), 0.0)
    return turns.spread(advantages, tokens.mask).float()


@torch.no_grad()
def ppo_turns(tokens: RolloutTokens) -> tuple[Tensor, Tensor]:
    """[T] advantages and [T] returns: generalized advantage estimation (arXiv:1506.02438) with turns as its steps.

    δ_k = r_k + γ·V_{k+1} − V_k and A_k = δ_k + γλ·A_{k+1}, with V_k the value before the turn's first unmasked token, V
    and A 0 after the last turn. All tokens of a turn have its A_k and its return A_k + V_k.
    """
    assert tokens.values is not None, "an estimator with a critic has its values"
    turns = Turns.read(tokens)
    values, every = tokens.values.double()[turns.begin], torch.ones_like(turns.rows, dtype=torch.bool)
    by_turn = gae(turns.rewards, values, every, turns.rows, gamma=tokens.gamma, lambd=tokens.lambd)
    advantages, returns = (turns.spread(column, tokens.mask).float() for column in by_turn)
    return advantages, returns


def _mean(values: Tensor, index: Tensor) -> Tensor:
    """[max index + 1] mean of the values of each index."""
    count = torch.bincount(index)
    return torch.zeros(len(count), dtype=values.dtype).index_add(0, index, values) / count
