"""The second step from rewards to advantages: token-level and turn-level estimators, whitening, on-policy distillation.

The first step from rewards to advantages is in `groups`; it has already compared the rollouts of each prompt. The
functions of this file take packed tokens (see `packed`). These functions compute no gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slimelite.algorithms.estimators import ESTIMATORS
from slimelite.algorithms.packed import checked, select, upcast
from slimelite.base.registry import function


@dataclass(frozen=True, slots=True)
class RolloutTokens:
    """The packed T response tokens of all rows of a rollout, on the CPU.

    ``advantages``: [rows] fp32, the result of `groups.group_advantages`. ``kl``: [T] fp32, an estimate of
    KL(old ‖ ref), 0 without ``--kl-coef``. ``mask``: [T] bool. ``segments``: [T] int64, the row of each token.
    ``values``: [T], the critic's value at the position that predicts the token; None without a critic.
    ``turn_rewards``: [T], a turn's reward at the last token of its reply, and NaN at other tokens. ``turn_rewards`` is
    None if no row has turn rewards, or if ``advantages`` are not plain rewards. ``groups``, ``rollouts``: [rows] int64,
    the id of each row's group, and the id of its rollout. The rollouts of a group are compared. ``kl_coef``, ``gamma``,
    ``lambd``: the values of the flags.
    """

    advantages: Tensor
    kl: Tensor
    mask: Tensor
    segments: Tensor
    values: Tensor | None = None
    turn_rewards: Tensor | None = None
    groups: Tensor | None = None
    rollouts: Tensor | None = None
    kl_coef: float = 0.0
    gamma: float = 1.0
    lambd: float = 1.0

    def rewards(self) -> Tensor:
        """[T] rewards, see `token_rewards`. A turn's reward is at the last token of the turn. The rest of the row's
        reward is at the last unmasked token of the row."""
        rows, of_rows = len(self.advantages), self.advantages
        turns = None if self.turn_rewards is None else self.turn_rewards.nan_to_num(0.0).to(of_rows.dtype)
        if turns is not None:
            of_rows = of_rows.index_add(0, self.segments, turns, alpha=-1)
        rewards = token_rewards(of_rows, self.kl, self.mask, self.segments, rows, kl_coef=self.kl_coef)
        return rewards if turns is None else rewards + turns


@torch.no_grad()
def token_advantages(estimator: str, tokens: RolloutTokens) -> tuple[Tensor, Tensor]:
    """[T] advantages and [T] returns. The returns equal the advantages, unless the estimator's ``token`` function
    returns both."""
    make = ESTIMATORS[estimator].token
    if make is None:
        advantages = returns = tokens.advantages[tokens.segments]
    else:
        result = function(make, ESTIMATORS.option, estimator)(tokens)
        advantages, returns = result if isinstance(result, tuple) else (result, result)
    length, what = len(tokens.segments), f"--advantage-estimator {estimator}: its token function"
    return checked(advantages, length, what), checked(returns, length, what)


def reinforce_plus_plus(tokens: RolloutTokens) -> Tensor:
    """[T] REINFORCE++ advantages (arXiv:2501.03262) before whitening: `discounted_returns` of the reward and the KL."""
    return discounted_returns(tokens.rewards(), tokens.segments, gamma=tokens.gamma)


def reinforce_plus_plus_baseline(tokens: RolloutTokens) -> Tensor:
    """[T] A_t = (R − group mean) − kl_coef·kl_t·m_t (arXiv:2501.03262), before whitening."""
    penalty = tokens.kl_coef * select(tokens.kl, tokens.mask)
    return tokens.advantages[tokens.segments].to(penalty.dtype) - penalty


def ppo(tokens: RolloutTokens) -> tuple[Tensor, Tensor]:
    """[T] advantages and [T] returns, computed with `gae` from the reward, the KL and the critic's values."""
    assert tokens.values is not None, "the values of the critic are missing"
    return gae(tokens.rewards(), tokens.values, tokens.mask, tokens.segments, gamma=tokens.gamma, lambd=tokens.lambd)


@torch.no_grad()
def token_rewards(
    rewards: Tensor, kl: Tensor, mask: Tensor, segments: Tensor, num_segments: int, *, kl_coef: float
) -> Tensor:
    """[T] r_t = −kl_coef·kl_t·m_t, plus the row's reward at its last unmasked token.

    A fully masked row gets no reward. (slime's ppo puts the reward on the last token, even if that token is masked.)

    Args:
        rewards: [num_segments], one for each row.
        kl: [T] estimate of KL(old ‖ ref), see `policy.kl_estimate`; zeros when kl_coef is 0.
        mask: [T] bool.
        segments: [T] int64 row of each token.
        num_segments: number of rows.
        kl_coef: ``--kl-coef``.
    """
    per_token = -kl_coef * select(kl, mask)
    last = last_tokens(mask, segments, num_segments)
    trained = last >= 0
    return per_token.index_add(0, last[trained], rewards[trained].to(per_token.dtype))


def last_tokens(mask: Tensor, segments: Tensor, num_segments: int) -> Tensor:
    """[num_segments] int64 position of each row's last unmasked token, −1 in a fully masked row."""
    position = torch.arange(len(mask), device=mask.device)
    return position.new_full((num_segments,), -1).scatter_reduce(0, segments[mask], position[mask], "amax")


@torch.no_grad()
def discounted_returns(rewards: Tensor, segments: Tensor, *, gamma: float) -> Tensor:
    """[T] A_t = Σ_k γ^k r_{t+k}, summed to the end of the row.

    Masked tokens are discounted like other tokens. ``rewards``: [T], see `token_rewards`; ``segments``: [T] int64.
    """
    return reverse_scan(upcast(rewards), gamma, segments)


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, segments: Tensor, *, gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (arXiv:1506.02438), and the returns that a value head learns.

    δ_t = r_t + γ·V_next − V_t,  A_t = δ_t + γλ·A_next,  return_t = A_t + V_t

    "next" is the next *unmasked* token of the row. After the last unmasked token, V and A are 0. The recurrence skips
    masked tokens (of tools and environments). slime's recurrence does not skip them.

    Args:
        rewards: [T], see `token_rewards`.
        values: [T], V_t is the value at the position that predicts token t.
        mask: [T] bool.
        segments: [T] int64 row of each token.
        gamma, lambd: ``--gamma``, ``--lambd``.

    Returns:
        advantages [T] and returns [T], 0 where masked.
    """
    kept, values = segments[mask], upcast(values)[mask]
    next_values = torch.zeros_like(values)
    next_values[:-1] = torch.where(_continues(kept)[:-1], values[1:], 0.0)
    delta = rewards[mask].to(values.dtype) + gamma * next_values - values
    advantages = reverse_scan(delta, gamma * lambd, kept)
    blank = values.new_zeros(len(mask))
    return blank.masked_scatter(mask, advantages), blank.masked_scatter(mask, advantages + values)


@torch.no_grad()
def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """[T] (x − mean)·rsqrt(var + 1e-8) over the unmasked tokens of the whole rollout, 0 where masked.

    The variance is unbiased, and is computed in float64 after the mean (two passes).
    """
    x, count = select(values.double(), mask), mask.sum().double()
    centered = select(x - x.sum() / count.clamp(min=1), mask)
    variance = centered.square().sum() / (count - 1).clamp(min=1)
    return (centered * torch.rsqrt(variance + 1e-8)).to(upcast(values).dtype)


@torch.no_grad()
def add_distillation(advantages: Tensor, old: Tensor, teacher: Tensor, mask: Tensor, *, opd_kl_coef: float) -> Tensor:
    """On-policy distillation: A_t − opd_kl_coef·(old_t − teacher_t), before whitening.

    old_t − teacher_t is the reverse KL to the teacher at the sampled token (arXiv:2306.13649;
    thinkingmachines.ai/blog/on-policy-distillation). All tensors are [T]. If no teacher scored a token, ``teacher`` is
    NaN there, and the advantage of the token stays unchanged.
    """
    scored = mask & ~teacher.isnan()
    reverse_kl = select(old, scored) - select(teacher, scored)
    return advantages - opd_kl_coef * reverse_kl


def _continues(segments: Tensor) -> Tensor:
    """[T] bool: whether the next token belongs to the same row."""
    same = torch.zeros_like(segments, dtype=torch.bool)
    same[:-1] = segments[1:] == segments[:-1]
    return same


def reverse_scan(values: Tensor, decay: float, segments: Tensor) -> Tensor:
    """[T] y_t = x_t + decay·y_{t+1} within each row, computed in log2(T) passes instead of a loop over tokens.

    Each pass doubles the number of summed terms. After k passes, y_t is the discounted sum of the 2^k terms from t on.
    factor_t is the discount of the term after these 2^k terms; it is 0 if the row ends before that term.
    """
    y = values.clone()
    factor = decay * _continues(segments).to(values.dtype)
    span = 1
    while span < len(y):
        y[:-span] += factor[:-span] * y[span:]
        factor[:-span] *= factor[span:].clone()
        span *= 2
    return y


@dataclass(frozen=True, slots=True)
class Turns:
    """The K turns of all rows of a rollout, in order. For turn-level estimators, a time step is a turn instead of a
    token.

    A turn ends at each token that has a number in `RolloutTokens.turn_rewards`, and at the row's last unmasked token.
    The environment's tokens before a reply belong to the turn of the reply, and are masked. A row without turn rewards
    is one turn.

    ``of``: [T] int64, the turn of each token; K for tokens after the last turn. ``rows``: [K] int64, the row of each
    turn. ``number``: [K] int64, the index of the turn among the turns of its row, from 0. ``rewards``: [K] float64, the
    sum of the rewards of the turn's tokens. ``begin``: [K] int64, the position of the turn's first unmasked token. If
    all its tokens are masked, ``begin`` is the position of its last token.
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
        """[T] for each token, the value of its turn in ``values`` [K]; 0 where masked."""
        return torch.where(mask, torch.cat([values, values.new_zeros(1)])[self.of], 0.0)


@torch.no_grad()
def grpo_turns(tokens: RolloutTokens) -> Tensor:
    """[T] A_k = (G_k − mean) / (std + 1e-6), with mean and std over the k-th turns of a group (after arXiv:2505.11821).

    G_k = r_k + γ·G_{k+1}. Each branch of a rollout has its own G_k. Mean and std count a rollout once, with the mean
    G_k of its branches. A_k is 0 if no other rollout of the group has a k-th turn, or if all k-th turns of the group
    have the same G_k. Standard deviations are unbiased.
    """
    assert tokens.groups is not None
    assert tokens.rollouts is not None
    turns = Turns.read(tokens)
    returns = reverse_scan(turns.rewards, tokens.gamma, turns.rows)
    _, place = torch.stack([tokens.groups[turns.rows], turns.number], 1).unique(dim=0, return_inverse=True)
    _, one = torch.stack([place, tokens.rollouts[turns.rows]], 1).unique(dim=0, return_inverse=True)
    means = _mean(returns, one)  # the mean over the branches of each rollout
    where = torch.zeros_like(means, dtype=torch.int64).index_copy(0, one, place)
    mean = _mean(means, where)
    size = torch.bincount(where, minlength=len(mean))
    squares = torch.zeros_like(mean).index_add(0, where, (means - mean[where]).square())
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    # rewards are fp32, so equal returns may differ by rounding
    compared = (size > 1) & (std > 1e-6 * (1 + mean.abs()))
    advantages = torch.where(compared[place], (returns - mean[place]) / (std[place] + 1e-6), 0.0)
    return turns.spread(advantages, tokens.mask).float()


@torch.no_grad()
def ppo_turns(tokens: RolloutTokens) -> tuple[Tensor, Tensor]:
    """[T] advantages and [T] returns of generalized advantage estimation (arXiv:1506.02438) with turns as steps.

    δ_k = r_k + γ·V_{k+1} − V_k and A_k = δ_k + γλ·A_{k+1}. V_k is the value before the turn's first unmasked token. V
    and A are 0 after the last turn. All tokens of turn k have the advantage A_k and the return A_k + V_k.
    """
    assert tokens.values is not None, "the values of the critic are missing"
    turns = Turns.read(tokens)
    values, every = tokens.values.double()[turns.begin], torch.ones_like(turns.rows, dtype=torch.bool)
    by_turn = gae(turns.rewards, values, every, turns.rows, gamma=tokens.gamma, lambd=tokens.lambd)
    advantages, returns = (turns.spread(column, tokens.mask).float() for column in by_turn)
    return advantages, returns


def _mean(values: Tensor, index: Tensor) -> Tensor:
    """[max index + 1] mean of the values of each index."""
    count = torch.bincount(index)
    return torch.zeros(len(count), dtype=values.dtype).index_add(0, index, values) / count
