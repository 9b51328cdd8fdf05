"""The first step from rewards to advantages: each rollout is compared with the other rollouts of its prompt.

This comparison runs once for the whole rollout, before rows are distributed to ranks. It uses numpy arrays, because the
process that runs it does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from slimelite.algorithms.estimators import ESTIMATORS
from slimelite.base.registry import function

if TYPE_CHECKING:
    from torch import Tensor

    Array = TypeVar("Array", np.ndarray, Tensor)
else:
    Array = TypeVar("Array")


@dataclass(frozen=True, slots=True)
class GroupedRewards(Generic[Array]):
    """Rewards of the M rollouts of G groups; float64 except for the integers. A user's function gets tensors. The
    functions of this file get numpy arrays.

    ``rewards``: [M]. ``group``: [M] int64, 0 … G − 1. ``size``: [G] int64, the number of rollouts of each group.
    ``centered``: [M], reward − mean reward of the group. ``std``: [G], the unbiased standard deviation of the rewards,
    0 in a group of one rollout. ``divide_by_std``: False with ``--disable-grpo-std-normalization``.
    """

    rewards: Array
    group: Array
    size: Array
    centered: Array
    std: Array
    divide_by_std: bool


def over_std(rewards: GroupedRewards[np.ndarray]) -> np.ndarray:
    """[M] (R − mean) / (std + 1e-6) (arXiv:2402.03300); R − mean (arXiv:2503.20783) if ``divide_by_std`` is False."""
    return rewards.centered * (1 / (rewards.std + 1e-6))[rewards.group] if rewards.divide_by_std else rewards.centered


def minus_mean(rewards: GroupedRewards[np.ndarray]) -> np.ndarray:
    """[M] R − mean (arXiv:2501.03262)."""
    return rewards.centered


def leave_one_out(rewards: GroupedRewards[np.ndarray]) -> np.ndarray:
    """[M] R − mean of the *other* rewards of the group of n rollouts = n / (n − 1)·(R − mean) (arXiv:2402.14740)."""
    scale = rewards.size / (rewards.size - 1).clip(min=1)
    return rewards.centered * scale[rewards.group]


def group_advantages(
    rewards: np.ndarray,
    group_ids: np.ndarray,
    rollout_ids: np.ndarray,
    estimator: str,
    *,
    std_normalization: bool = True,
    normalize: bool = True,
) -> tuple[np.ndarray, dict[str, float]]:
    """The advantage of each row. The estimator's ``group`` function compares the rewards of a group's rollouts.

    Groups may have any size. (If sizes differ, slime uses one group for the whole batch.) Rows of one rollout id
    (fan-out siblings) count as one rollout. The rollout's reward is the mean of these rows' rewards, and the rows get
    the rollout's advantage. Advantages are exactly 0 in a group of one rollout, and in a larger group of equal rewards.
    The metrics ``groups_of_one`` and ``zero_variance_groups`` are the shares of these two kinds of groups. Without rows
    there are no metrics.

    Args:
        rewards: [N], one for each row.
        group_ids: [N] int64.
        rollout_ids: [N] int64.
        estimator: one of ``ESTIMATORS``.
        std_normalization: False with ``--disable-grpo-std-normalization``.
        normalize: False with ``--disable-rewards-normalization``; the function then returns the rewards unchanged.

    Returns:
        [N] float64 advantages, and metrics.

    Raises:
        ValueError: an unknown estimator, a reward that is not finite, a rollout in two groups, or a user's function
            that does not return one number for each rollout.
    """
    compare = ESTIMATORS[estimator].group
    with np.errstate(over="ignore"):
        bad = np.flatnonzero(~np.isfinite(np.asarray(rewards, np.float32))).tolist()
    if bad:
        raise ValueError(
            f"rewards of rows {bad[:8]} are not finite in fp32; use --reward-error zero or drop for such rewards"
        )
    rewards = np.asarray(rewards, np.float64)  # in float64, the squares of fp32 numbers do not overflow
    groups, row_group = np.unique(group_ids, return_inverse=True)
    rollouts, row_rollout = np.unique(rollout_ids, return_inverse=True)
    group = np.zeros(len(rollouts), np.int64)
    group[row_rollout] = row_group
    if (group[row_rollout] != row_group).any():
        raise ValueError("rows of one rollout_id are in different groups; fan-out siblings must keep their group_index")

    of_rollouts = _means(rewards, row_rollout, len(rollouts))
    size = np.bincount(group, minlength=len(groups))
    centered = of_rollouts - _means(of_rollouts, group, len(groups))[group]
    std = np.sqrt(np.bincount(group, centered**2, len(groups)) / (size - 1).clip(min=1))
    shares = {"groups_of_one": size == 1, "zero_variance_groups": (size > 1) & (std == 0)}
    metrics = {name: float(share.mean()) for name, share in shares.items() if len(groups)}
    if not normalize or compare is None:
        return rewards, metrics
    grouped = GroupedRewards(of_rollouts, group, size, centered, std, std_normalization)
    call = function(compare, ESTIMATORS.option, estimator)
    ours = isinstance(compare, str) and compare.startswith(f"{__name__}:")
    what = f"--advantage-estimator {estimator}: its group function"
    compared: np.ndarray = call(grouped) if ours else _on_tensors(call, grouped, what)
    return compared[row_rollout], metrics


def _on_tensors(call: Callable[..., Any], rewards: GroupedRewards[np.ndarray], what: str) -> np.ndarray:
    """[M] result of ``call``, a user's function. It gets tensors instead of numpy arrays."""
    import torch

    from slimelite.algorithms.packed import checked

    names = ("rewards", "group", "size", "centered", "std")
    tensors = {name: torch.from_numpy(getattr(rewards, name)) for name in names}
    grouped = GroupedRewards(**tensors, divide_by_std=rewards.divide_by_std)
    with torch.no_grad():
        return checked(call(grouped), len(rewards.rewards), what).double().numpy()


def _means(values: np.ndarray, index: np.ndarray, size: int) -> np.ndarray:
    """[size] mean of the values of each index. The mean is computed relative to the minimum of these values, so it is
    exact if all of them are equal."""
    low = np.full(size, np.inf)
    np.minimum.at(low, index, values)
    count: np.ndarray = np.bincount(index, minlength=size)
    return low + np.bincount(index, values - low[index], size) / count
