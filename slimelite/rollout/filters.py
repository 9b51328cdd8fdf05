"""Dynamic sampling filters. A filter ``fn(args, samples)`` decides whether a scored group is trained on.

Choose a filter with ``--dynamic-sampling-filter-path slimelite.rollout.filters.<name>``, or write your own. Your filter
may call the filters of this file. A filter returns a bool or a `DynamicFilterOutput`. `all_of` combines several
filters. A generate function may return several samples for one response (a fan-out). Filters that check rewards treat
these samples as one response with the reward of the last sample.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from slimelite.arguments import Args
from slimelite.arguments.secret import masked
from slimelite.base.guard import PluginError, raised_at
from slimelite.base.lifecycle import RolloutError
from slimelite.rollout.context import PluginArgs
from slimelite.rollout.groups import check_scored
from slimelite.samples.sample import Sample
from slimelite.samples.table import SampleTable

logger = logging.getLogger(__name__)

# the reason for a group whose samples were all removed by --reward-error drop
NO_REWARD = "no_reward"
# rewards count as equal if they differ by at most this value, because graders may add floats in different orders
SAME_REWARD = 1e-6


@dataclass(frozen=True)
class DynamicFilterOutput:
    """``keep``: whether the run trains on the group. ``reason``: why the group is dropped.

    ``keep_when_insufficient``: whether a group with ``keep`` False is still used when the batch would otherwise need
    another prompt.
    """

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


Filter = Callable[[PluginArgs, Sequence[Sample]], bool | DynamicFilterOutput]


def verdict(output: bool | DynamicFilterOutput, name: str = "the filter") -> DynamicFilterOutput:
    """Convert a filter's return value to a `DynamicFilterOutput`. The return value is a bool of Python, numpy or torch,
    or slime's ``DynamicFilterOutput``.

    Raises:
        ValueError: the return value has another type, such as the text "no", which Python treats as true. The error
            message names the filter.
    """
    keep: Any = getattr(output, "keep", output)
    keep = keep.item() if getattr(keep, "shape", None) == () else keep
    if not isinstance(keep, bool | int) or keep not in (0, 1):
        raise ValueError(
            f"{name} returned {output!r:.100}; a filter returns True to keep the group, False to drop it, or a "
            "DynamicFilterOutput(keep, reason)"
        )
    reason = None if keep else getattr(output, "reason", None) or "filter"
    return DynamicFilterOutput(bool(keep), reason, bool(getattr(output, "keep_when_insufficient", False)))


def rollout_rewards(samples: Sequence[Sample], reward_key: str | None) -> list[float]:
    """One reward for each response of the group. If a response consists of several samples (a fan-out), its reward is
    that of the last sample."""
    rewards = {s.index if s.rollout_id is None else s.rollout_id: s.reward_value(reward_key) for s in samples}
    return list(rewards.values())


def check_reward_nonzero_std(args: PluginArgs, samples: Sequence[Sample], **_: object) -> DynamicFilterOutput:
    """Keep groups with different rewards, because equal rewards give zero advantages (DAPO, arXiv:2503.14476)."""
    rewards = rollout_rewards(samples, args.reward_key)
    if max(rewards) - min(rewards) > SAME_REWARD:
        return DynamicFilterOutput(True)
    return DynamicFilterOutput(False, f"zero_std_{round(rewards[0], 1)}")


def check_reward_nonzero_std_with_fallback(
    args: PluginArgs, samples: Sequence[Sample], **_: object
) -> DynamicFilterOutput:
    """Keep groups with different rewards. Keep others only if the batch would otherwise need another prompt."""
    return replace(check_reward_nonzero_std(args, samples), keep_when_insufficient=True)


def check_any_success(args: PluginArgs, samples: Sequence[Sample], **_: object) -> DynamicFilterOutput:
    """Keep groups in which at least one reward is above 0."""
    return DynamicFilterOutput(max(rollout_rewards(samples, args.reward_key)) > 0, "no_success")


def check_min_reward(
    args: PluginArgs, samples: Sequence[Sample], *, minimum: float = 0.1, **_: object
) -> DynamicFilterOutput:
    """Keep groups whose mean reward is at least ``minimum``."""
    rewards = rollout_rewards(samples, args.reward_key)
    return DynamicFilterOutput(math.fsum(rewards) / len(rewards) >= minimum, "low_reward")


def check_response_diversity(
    _args: PluginArgs, samples: Sequence[Sample], *, minimum: float = 0.5, **_: object
) -> DynamicFilterOutput:
    """Keep groups in which the share of distinct responses is at least ``minimum``."""
    different = {np.asarray(s.response_ids, np.int64).tobytes() for s in samples}
    return DynamicFilterOutput(len(different) >= minimum * len(samples), "low_diversity")


def check_reasonable_length(
    _args: PluginArgs, samples: Sequence[Sample], *, shortest: int = 1, cut: float = 0.5, **_: object
) -> DynamicFilterOutput:
    """Drop groups with a response below ``shortest`` tokens, or with a share of truncated responses above ``cut``."""
    if min(s.effective_response_length for s in samples) < shortest:
        return DynamicFilterOutput(False, "too_short")
    truncated = sum(s.status == Sample.Status.TRUNCATED for s in samples)
    return DynamicFilterOutput(truncated <= cut * len(samples), "truncated")


def all_of(*filters: Filter) -> Filter:
    """A filter that keeps a group only if all ``filters`` keep the group. If several filters drop a group, the first of
    them gives the reason."""

    def combined(args: PluginArgs, samples: Sequence[Sample]) -> DynamicFilterOutput:
        outputs = (verdict(f(args, samples), f"the filter {getattr(f, '__name__', f)}") for f in filters)
        return next((o for o in outputs if not o.keep), DynamicFilterOutput(True))

    return combined


def check_all(args: PluginArgs, samples: Sequence[Sample], **_: object) -> DynamicFilterOutput:
    """Keep groups that pass three filters: different rewards, reasonable length and response diversity."""
    return verdict(all_of(check_reward_nonzero_std, check_reasonable_length, check_response_diversity)(args, samples))


class DroppedGroups:
    """Counts the groups that a rollout does not train on. A few of these groups are saved, so the user can read them.
    The run ends after too many dropped or failed groups in a row.

    At most ``--keep-dropped`` groups of a rollout are saved, in ``dropped/`` of the run folder. When this number is
    reached, a group is still saved only if its reason is new, and another reason occurs in several saved groups. The
    last group with the most common reason is then removed.
    """

    def __init__(self, args: Args, rollout_id: int, counts: Mapping[str, float]) -> None:
        """``counts``: the counts of the rollout so far. An error includes them."""
        self._args = args
        self._rollout_id, self._counts = rollout_id, counts
        self._limit = args.keep_dropped if args.run_dir and args.rollouts_kept != 0 else 0
        self._path = Path(args.run_dir or "") / "dropped" / f"{rollout_id:07d}.parquet"
        self._kept: list[tuple[str, list[Sample]]] = []  # (kind of reason, samples)
        self._most_drops = max(16 * args.rollout_batch_size, 128)
        self._most_failures = max(args.rollout_batch_size, 4)
        self._warned = False
        self.accepted()

    def accepted(self) -> None:
        """A group was accepted, so set the counts of consecutive dropped and failed groups back to 0."""
        self._failures = 0
        self._reasons: Counter[str] = Counter()
        self._rewards: list[float] = []
        self._lengths: list[int] = []

    def keep(self, samples: list[Sample], kind: str, detail: str = "") -> None:
        """Store the group for `save`, if ``--keep-dropped`` allows it (see the class). In the stored samples,
        ``metadata["dropped"]`` is ``kind + detail``."""
        kinds = Counter(kind for kind, _ in self._kept)
        if len(self._kept) >= self._limit:
            commonest = max(kinds, key=kinds.__getitem__, default=kind)
            if kind in kinds or kinds[commonest] < 2:
                return
            del self._kept[max(i for i, (k, _) in enumerate(self._kept) if k == commonest)]
        self._kept.append((kind, [self._readable(sample, kind + detail) for sample in samples]))

    def _readable(self, sample: Sample, reason: str) -> Sample:
        try:
            sample.reward_value(self._args.reward_key)
            reward = sample.reward
        except ValueError:  # the reward failed, or the sample was not scored
            reward = math.nan
        return replace(sample, reward=reward, metadata={**sample.metadata, "dropped": reason})

    def save(self) -> str:
        """Write the stored groups to a file. Returns a part of a message, with the number of groups and the file, or ""
        if no groups are stored."""
        if not self._kept:
            return ""
        SampleTable.from_samples([samples for _, samples in self._kept], self._args.reward_key).to_parquet(self._path)
        return f"{len(self._kept)} of these groups, with responses and rewards, are in {self._path} (--keep-dropped)"

    def failed(self, error: Exception) -> None:
        """Count a group that could not be generated.

        Raises:
            RolloutError: too many groups failed in a row.
        """
        self._failures += 1
        if self._failures >= self._most_failures:
            path = self._args.custom_generate_function_path
            by = f" by {self._generator(path)}" if path else ""
            where = raised_at(error) if path and not isinstance(error, PluginError) else ""
            raise self._end(
                f"{self._failures} groups in a row could not be generated{by}; the last error: {error!r}{where}"
            ) from error

    def _generator(self, path: str) -> str:
        """The flag that chooses the user's generate function, with its value."""
        for name in ("environment", "agent_command"):
            if value := getattr(self._args, name):
                return f"--{name.replace('_', '-')} {masked(name, value)}"
        return f"--custom-generate-function-path {path}"

    def dropped(self, samples: list[Sample], reason: str) -> None:
        """Count a group that the filter dropped.

        Raises:
            RolloutError: too many groups were dropped in a row. The error message contains the reasons, and the rewards
                and lengths of the dropped responses.
        """
        self._failures = 0
        self._reasons[reason] += 1
        self._rewards += [s.reward_value(self._args.reward_key) for s in samples if "reward_error" not in s.metadata]
        self._lengths += [s.response_length for s in samples]
        drops = self._reasons.total()
        if self._reasons[NO_REWARD] == drops >= self._most_failures:
            check_scored(samples, f"--reward-error drop removed all samples of {drops} groups in a row")
        if drops == self._most_drops // 4 and not self._warned:
            self._warned = True
            logger.warning("%s; after %d dropped groups in a row the run ends", self._story(), self._most_drops)
        if drops >= self._most_drops:
            raise self._end(
                f"{self._story()}. Check the reward (--rm-type, --label-key), the difficulty of the task, the "
                "temperature (above 0) and --n-samples-per-prompt (above 1), or leave "
                "--dynamic-sampling-filter-path out."
            )

    def _end(self, message: str) -> RolloutError:
        counted = {f"rollout/{name}": float(number) for name, number in self._counts.items()}
        return RolloutError(message, {"rollout/step": self._rollout_id, **counted})

    def _story(self) -> str:
        rewards, lengths = self._rewards, self._lengths
        count = max(len(rewards), 1)
        where = self.save()
        return (
            f"--dynamic-sampling-filter-path {self._args.dynamic_sampling_filter_path} dropped {self._reasons.total()} "
            f"groups in a row and kept none; reasons {dict(self._reasons)}; "
            f"rewards from {min(rewards, default=0):g} to {max(rewards, default=0):g}, "
            f"mean {math.fsum(rewards) / count:.4g}; "
            f"responses of {sum(lengths) / count:.0f} tokens on average" + (f"; {where}" if where else "")
        )
