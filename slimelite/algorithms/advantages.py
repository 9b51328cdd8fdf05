"""Rewards to advantages: group statistics, token-level estimators, whitening, on-policy distillation.

Group statistics are computed once for the whole rollout, before rows are dealt to ranks; the token-level functions run
on packed tokens (see `packed`). Nothing here has a gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from slimelite.algorithms.packed import Metrics, mean_metric, segment_sum, select, upcast

# estimators whose advantage starts from a comparison within the group of one prompt
GROUP_ESTIMATORS = ("grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus_baseline")
# estimators that read the reward itself
REWARD_ESTIMATORS = ("reinforce_plus_plus", "ppo")


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
    """The advantage of each row from the rewards R of its group's rollouts.

    ============================  ===============================================================================
    grpo, gspo, cispo             (R − mean) / (std + 1e-6), std unbiased (arXiv:2402.03300); without
                                  ``std_normalization`` R − mean (Dr.GRPO, arXiv:2503.20783)
    reinforce_plus_plus_baseline  R − mean (arXiv:2501.03262)
    rloo                          R − mean of the *other* rewards of the group (arXiv:2402.14740)
    reinforce_plus_plus, ppo      R
    ============================  ===============================================================================

    Groups may have any size (slime falls back to one group of the whole batch when sizes differ). Fan-out siblings,
    rows of one rollout id, count once, with the mean of their rewards, and share its advantage. A group of one rollout
    and a group of equal rewards get exactly 0; metrics ``groups_of_one`` and ``zero_variance_groups`` give their share
    of all groups.

    Args:
        rewards: [N], one a row.
        group_ids: [N] int64.
        rollout_ids: [N] int64.
        estimator: one of ``GROUP_ESTIMATORS`` or ``REWARD_ESTIMATORS``.
        std_normalization: False is ``--disable-grpo-std-normalization``.
        normalize: False is ``--disable-rewards-normalization``: the rewards come back as they are.

    Returns:
        [N] advantages in the dtype of ``rewards`` (at least fp32), and metrics.

    Raises:
        ValueError: an unknown estimator, a reward that is not finite, or a rollout in two groups.
    """
    if estimator not in GROUP_ESTIMATORS + REWARD_ESTIMATORS:
        known = ", ".join(GROUP_ESTIMATORS + REWARD_ESTIMATORS)
        raise ValueError(f"unknown estimator {estimator!r}; --advantage-estimator takes {known}")
    dtype = upcast(rewards).dtype
    bad = (~rewards.float().isfinite()).nonzero().flatten().tolist()
    if bad:
        raise ValueError(
            f"rewards of rows {bad[:8]} are not finite in fp32; --reward-error zero|drop handles such rewards"
        )
    rewards = rewards.double()  # where squares of what fp32 holds do not overflow
    groups, row_group = torch.unique(group_ids, return_inverse=True)
    rollouts, row_rollout = torch.unique(rollout_ids, return_inverse=True)
    rollout_group = torch.zeros_like(rollouts).scatter(0, row_rollout, row_group)
    if (rollout_group[row_rollout] != row_group).any():
        raise ValueError("rows of one rollout_id are in different groups; fan-out siblings must keep their group_index")

    rollout_rewards = _means(rewards, row_rollout, len(rollouts))
    size = torch.bincount(rollout_group, minlength=len(groups))
    centered = rollout_rewards - _means(rollout_rewards, rollout_group, len(groups))[rollout_group]
    others = (size - 1).clamp(min=1)
    std = (segment_sum(centered.square(), rollout_group, len(groups)) / others).sqrt()
    metrics = {
        "groups_of_one": mean_metric(size == 1, size > 0),
        "zero_variance_groups": mean_metric((size > 1) & (std == 0), size > 0),
    }
    if not normalize or estimator in REWARD_ESTIMATORS:
        return rewards.to(dtype), metrics
    if estimator == "rloo":
        scale = size.double() / others  # of two int64 it would be fp32
    elif estimator != "reinforce_plus_plus_baseline" and std_normalization:
        scale = 1 / (std + 1e-6)
    else:
        scale = torch.ones_like(std)
    return (centered * scale[rollout_group])[row_rollout].to(dtype), metrics


def _means(values: Tensor, index: Tensor, size: int) -> Tensor:
    """[size] mean of the values of each index; measured from the smallest, so that equal values give it exactly."""
    low = values.new_full((size,), torch.inf).scatter_reduce(0, index, values, "amin")
    count = torch.bincount(index, minlength=size)
    return low + segment_sum(values - low[index], index, size) / count


@torch.no_grad()
def token_rewards(
    rewards: Tensor, kl: Tensor, mask: Tensor, segments: Tensor, num_segments: int, *, kl_coef: float
) -> Tensor:
    """[T] r_t = −kl_coef·kl_t·m_t, plus the row's reward at its last unmasked token.

    slime's ppo puts the reward on the last token even where that is masked. A fully masked row gets no reward.

    Args:
        rewards: [num_segments], one a row.
        kl: [T] estimate of KL(old ‖ ref), see `kl.kl_estimate`; zeros when kl_coef is 0.
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
    """[T] A_t = Σ_k γ^k r_{t+k} to the end of the row: REINFORCE++ (arXiv:2501.03262), to be whitened.

    The discount runs through masked tokens. ``rewards``: [T], see `token_rewards`; ``segments``: [T] int64.
    """
    return _reverse_scan(upcast(rewards), gamma, segments)


@torch.no_grad()
def reinforce_plus_plus_baseline(
    advantages: Tensor, kl: Tensor, mask: Tensor, segments: Tensor, *, kl_coef: float
) -> Tensor:
    """[T] A_t = (R − group mean) − kl_coef·kl_t·m_t (arXiv:2501.03262), to be whitened.

    ``advantages``: [rows] from `group_advantages`; ``kl``: [T]; ``mask``: [T] bool; ``segments``: [T] int64.
    """
    penalty = kl_coef * select(kl, mask)
    return advantages[segments].to(penalty.dtype) - penalty


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, segments: Tensor, *, gamma: float, lambd: float
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (arXiv:1506.02438) and the returns a value head learns.

    δ_t = r_t + γ·V_next − V_t,  A_t = δ_t + γλ·A_next,  return_t = A_t + V_t

    where "next" is the next *unmasked* token of the row, with V and A 0 after the last: masked tokens (tools,
    environments) are transparent, where slime runs the recurrence through them.

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
def whiten(values: Tensor, mask: Tensor, all_reduce: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """[T] (x − mean)·rsqrt(var + 1e-8) over the unmasked tokens of the whole rollout, 0 where masked.

    Two passes, unbiased variance, in float64. ``all_reduce`` takes a tensor and returns its sum over all ranks; it
    is called twice on every rank, also on one without tokens.
    """
    x = select(values.double(), mask)
    total = torch.stack([x.sum(), mask.sum().double()])
    total = total if all_reduce is None else all_reduce(total)
    centered = select(x - total[0] / total[1].clamp(min=1), mask)
    squares = centered.square().sum()
    squares = squares if all_reduce is None else all_reduce(squares)
    variance = squares / (total[1] - 1).clamp(min=1)
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

    After k passes y_t sums the 2^k terms from t on, and factor_t is what multiplies the sum that follows them (0 once
    the row has ended).
    """
    y = values.clone()
    factor = decay * _continues(segments).to(values.dtype)
    span = 1
    while span < len(y):
        y[:-span] += factor[:-span] * y[span:]
        factor[:-span] *= factor[span:].clone()
        span *= 2
    return y
