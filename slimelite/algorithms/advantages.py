"""Rewards to advantages: group statistics, token-level estimators, whitening, on-policy distillation.

Group statistics are computed once for the whole rollout, before rows are dealt to ranks; the token-level functions run
on packed tokens (see `packed`). Nothing here has a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slimelite.algorithms.estimators import ESTIMATORS
from slimelite.algorithms.packed import Metrics, checked, mean_metric, segment_sum, select, upcast
from slimelite.registry import function


@dataclass(frozen=True, slots=True)
class GroupedRewards:
    """Rewards of the M rollouts of G groups; float64 except for the integers.

    ``rewards``: [M]; ``group``: [M] int64, 0 … G − 1; ``size``: [G] int64 rollouts of each group; ``centered``: [M]
    R − mean of the group; ``std``: [G] unbiased, 0 in a group of one. ``divide_by_std``: False is
    ``--disable-grpo-std-normalization``.
    """

    rewards: Tensor
    group: Tensor
    size: Tensor
    centered: Tensor
    std: Tensor
    divide_by_std: bool


def over_std(rewards: GroupedRewards) -> Tensor:
    """[M] (R − mean) / (std + 1e-6) (arXiv:2402.03300); without ``divide_by_std`` R − mean (arXiv:2503.20783)."""
    return rewards.centered * (1 / (rewards.std + 1e-6))[rewards.group] if rewards.divide_by_std else rewards.centered


def minus_mean(rewards: GroupedRewards) -> Tensor:
    """[M] R − mean (arXiv:2501.03262)."""
    return rewards.centered


def leave_one_out(rewards: GroupedRewards) -> Tensor:
    """[M] R − mean of the *other* rewards of the group = n / (n − 1)·(R − mean) (arXiv:2402.14740)."""
    scale = rewards.size.double() / (rewards.size - 1).clamp(min=1)  # a quotient of two int64 tensors is fp32
    return rewards.centered * scale[rewards.group]


@torch.no_grad()
def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    rollout_ids: Tensor,
    estimator: str,
    *,
    std_normalization: bool = True,
    normalize: bool = True,
) -> tuple[Tensor, Metrics]:
    """The advantage of each row from the rewards of its group's rollouts, by the ``group`` function of an estimator.

    Groups may have any size (slime falls back to one group of the whole batch when sizes differ). Fan-out siblings,
    rows of one rollout id, count once, with the mean of their rewards, and share its advantage. A group of one rollout
    and a group of equal rewards get exactly 0; metrics ``groups_of_one`` and ``zero_variance_groups`` give their share
    of all groups.

    Args:
        rewards: [N], one a row.
        group_ids: [N] int64.
        rollout_ids: [N] int64.
        estimator: one of ``ESTIMATORS``.
        std_normalization: False is ``--disable-grpo-std-normalization``.
        normalize: False is ``--disable-rewards-normalization``: the rewards come back as they are.

    Returns:
        [N] advantages in the dtype of ``rewards`` (at least fp32), and metrics.

    Raises:
        ValueError: an unknown estimator, a reward that is not finite, or a rollout in two groups.
    """
    compare = ESTIMATORS[estimator].group
    dtype = upcast(rewards).dtype
    bad = (~rewards.float().isfinite()).nonzero().flatten().tolist()
    if bad:
        raise ValueError(
            f"rewards of rows {bad[:8]} are not finite in fp32; --reward-error zero|drop handles such rewards"
        )
    rewards = rewards.double()  # in float64 squares of fp32 numbers do not overflow
    groups, row_group = torch.unique(group_ids, return_inverse=True)
    rollouts, row_rollout = torch.unique(rollout_ids, return_inverse=True)
    group = torch.zeros_like(rollouts).scatter(0, row_rollout, row_group)
    if (group[row_rollout] != row_group).any():
        raise ValueError("rows of one rollout_id are in different groups; fan-out siblings must keep their group_index")

    of_rollouts = _means(rewards, row_rollout, len(rollouts))
    size = torch.bincount(group, minlength=len(groups))
    centered = of_rollouts - _means(of_rollouts, group, len(groups))[group]
    std = (segment_sum(centered.square(), group, len(groups)) / (size - 1).clamp(min=1)).sqrt()
    metrics = {
        "groups_of_one": mean_metric(size == 1, size > 0),
        "zero_variance_groups": mean_metric((size > 1) & (std == 0), size > 0),
    }
    if not normalize or compare is None:
        return rewards.to(dtype), metrics
    found = function(compare, ESTIMATORS.option, estimator)(
        GroupedRewards(of_rollouts, group, size, centered, std, std_normalization)
    )
    advantages = checked(found, len(rollouts), f"--advantage-estimator {estimator}: its group function")
    return advantages[row_rollout].to(dtype), metrics


def _means(values: Tensor, index: Tensor, size: int) -> Tensor:
    """[size] mean of the values of each index, computed relative to their minimum: exact if all values are equal."""
    low = values.new_full((size,), torch.inf).scatter_reduce(0, index, values, "amin")
    count = torch.bincount(index, minlength=size)
    return low + segment_sum(values - low[index], index, size) / count


@dataclass(frozen=True, slots=True)
class RolloutTokens:
    """The T response tokens of the rows of a whole rollout, packed, on the CPU.

    ``advantages``: [rows] fp32 of `group_advantages`; ``kl``: [T] fp32 estimate of KL(old ‖ ref), 0 without
    ``--kl-coef``; ``mask``: [T] bool; ``segments``: [T] int64 row of each token; ``values``: [T] of the critic at the
    position that predicts the token, None without one; ``kl_coef``, ``gamma``, ``lambd``: the flags.
    """

    advantages: Tensor
    kl: Tensor
    mask: Tensor
    segments: Tensor
    values: Tensor | None = None
    kl_coef: float = 0.0
    gamma: float = 1.0
    lambd: float = 1.0

    def rewards(self) -> Tensor:
        """[T] rewards, see `token_rewards`."""
        rows = len(self.advantages)
        return token_rewards(self.advantages, self.kl, self.mask, self.segments, rows, kl_coef=self.kl_coef)


@torch.no_grad()
def token_advantages(estimator: str, tokens: RolloutTokens) -> tuple[Tensor, Tensor]:
    """[T] advantages and [T] returns; they are equal unless the estimator's ``token`` function returns both."""
    make = ESTIMATORS[estimator].token
    if make is None:
        found = tokens.advantages[tokens.segments]
    else:
        found = function(make, ESTIMATORS.option, estimator)(tokens)
    advantages, returns = found if isinstance(found, tuple) else (found, found)
    length, what = len(tokens.segments), f"--advantage-estimator {estimator}: its token function"
    return checked(advantages, length, what), checked(returns, length, what)


def reinforce_plus_plus(tokens: RolloutTokens) -> Tensor:
    """[T] REINFORCE++ (arXiv:2501.03262): `discounted_returns` of the reward and the KL, to be whitened."""
    return discounted_returns(tokens.rewards(), tokens.segments, gamma=tokens.gamma)


def reinforce_plus_plus_baseline(tokens: RolloutTokens) -> Tensor:
    """[T] A_t = (R − group mean) − kl_coef·kl_t·m_t (arXiv:2501.03262), to be whitened."""
    penalty = tokens.kl_coef * select(tokens.kl, tokens.mask)
    return tokens.advantages[tokens.segments].to(penalty.dtype) - penalty


def ppo(tokens: RolloutTokens) -> tuple[Tensor, Tensor]:
    """[T] advantages and [T] returns: `gae` of the reward, the KL and the critic's values."""
    assert tokens.values is not None, "an estimator with a critic has its values"
    return gae(tokens.rewards(), tokens.values, tokens.mask, tokens.segments, gamma=tokens.gamma, lambd=tokens.lambd)


@torch.no_grad()
def token_rewards(
    rewards: Tensor, kl: Tensor, mask: Tensor, segments: Tensor, num_segments: int, *, kl_coef: float
) -> Tensor:
    """[T] r_t = −kl_coef·kl_t·m_t, plus the row's reward at its last unmasked token.

    slime's ppo puts the reward on the last token even where that is masked. A fully masked row gets no reward.

    Args:
        rewards: [num_segments], one a row.
        kl: [T] estimate of KL(old ‖ ref), see `policy.kl_estimate`; zeros when kl_coef is 0.
        mask: [T] bool.
        segments: [T] int64 row of each token.
        num_segments: number of rows.
        kl_coef: ``--kl-coef``.
    """
    per_token = -kl_coef * select(kl, mask)
    position = torch.arange(len(mask), device=mask.device)
    last = position.new_full((num_segments,), -1).scatter_reduce(0, segments[mask], position[mask], "amax")
    trained = last >= 0
    return per_token.index_add(0, last[trained], rewards[trained].to(per_token.dtype))


@torch.no_grad()
def discounted_returns(rewards: Tensor, segments: Tensor, *, gamma: float) -> Tensor:
    """[T] A_t = Σ_k γ^k r_{t+k} to the end of the row.

    The discount runs through masked tokens. ``rewards``: [T], see `token_rewards`; ``segments``: [T] int64.
    """
    return _reverse_scan(upcast(rewards), gamma, segments)


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, segments: Tensor, *, gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (arXiv:1506.02438) and the returns a value head learns.

    δ_t = r_t + γ·V_next − V_t,  A_t = δ_t + γλ·A_next,  return_t = A_t + V_t

    where "next" is the next *unmasked* token of the row, with V and A 0 after the last: masked tokens (tools,
    environments) are skipped, while slime runs the recurrence through them.

    Args:
        rewards: [T], see `token_rewards`.
        values: [T] V at the position that predicts token t.
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
    advantages = _reverse_scan(delta, gamma * lambd, kept)
    blank = values.new_zeros(len(mask))
    return blank.masked_scatter(mask, advantages), blank.masked_scatter(mask, advantages + values)


@torch.no_grad()
def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """[T] (x − mean)·rsqrt(var + 1e-8) over the unmasked tokens of the whole rollout, 0 where masked.

    Two passes, unbiased variance, in float64.
    """
    x, count = select(values.double(), mask), mask.sum().double()
    centered = select(x - x.sum() / count.clamp(min=1), mask)
    variance = centered.square().sum() / (count - 1).clamp(min=1)
    return (centered * torch.rsqrt(variance + 1e-8)).to(upcast(values).dtype)


@torch.no_grad()
def add_distillation(advantages: Tensor, old: Tensor, teacher: Tensor, mask: Tensor, *, opd_kl_coef: float) -> Tensor:
    """On-policy distillation: A_t − opd_kl_coef·(old_t − teacher_t), before whitening.

    The term is the reverse KL to the teacher at the sampled token (arXiv:2306.13649;
    thinkingmachines.ai/blog/on-policy-distillation). All [T]; ``teacher`` is NaN where no teacher scored the token,
    which then gets no term.
    """
    scored = mask & ~teacher.isnan()
    reverse_kl = select(old, scored) - select(teacher, scored)
    return advantages - opd_kl_coef * reverse_kl


def _continues(segments: Tensor) -> Tensor:
    """[T] bool: the next token belongs to the same row."""
    same = torch.zeros_like(segments, dtype=torch.bool)
    same[:-1] = segments[1:] == segments[:-1]
    return same


def _reverse_scan(values: Tensor, decay: float, segments: Tensor) -> Tensor:
    """[T] y_t = x_t + decay·y_{t+1} within each row, by doubling: log2(T) passes instead of a loop over tokens.

    After k passes y_t is the discounted sum of the 2^k terms from t on, and factor_t multiplies the sum of the terms
    after these (0 once the row has ended).
    """
    y = values.clone()
    factor = decay * _continues(segments).to(values.dtype)
    span = 1
    while span < len(y):
        y[:-span] += factor[:-span] * y[span:]
        factor[:-span] *= factor[span:].clone()
        span *= 2
    return y
