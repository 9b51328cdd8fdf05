"""Dynamic sampling filters: ``fn(args, samples)`` says whether a scored group is worth training on.

Name one with ``--dynamic-sampling-filter-path slimelite.rollout.filters.<name>``, or write your own that calls these:
it returns a bool or a `DynamicFilterOutput`, and may be built of several with `all_of`. In a fan-out, siblings share
their rollout's reward and count once.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slimelite.arguments import Args
from slimelite.plugins import PluginError, raised_at
from slimelite.rollout.groups import check_scored
from slimelite.sample import Sample
from slimelite.table import SampleTable

logger = logging.getLogger(__name__)

FILTER_FLAG = "--dynamic-sampling-filter-path"
# why --reward-error drop leaves nothing of a group
NO_REWARD = "no_reward"
# rewards that differ by less are equal: graders add floats in different orders
SAME_REWARD = 1e-6


@dataclass(frozen=True)
class DynamicFilterOutput:
    """``keep`` the group or drop it for ``reason``.

    ``keep_when_insufficient``: a dropped group is kept after all where dropping it would mean sampling another prompt.
    """

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


Filter = Callable[[Any, Sequence[Sample]], bool | DynamicFilterOutput]


def verdict(output: bool | DynamicFilterOutput, name: str = "the filter") -> DynamicFilterOutput:
    """What a filter returned (a bool, also numpy's or torch's, or slime's object) as a `DynamicFilterOutput`.

    Raises:
        ValueError: it is anything else, such as the text "no", which Python takes for true; ``name`` is in the message.
    """
    said: Any = getattr(output, "keep", output)
    said = said.item() if getattr(said, "shape", None) == () else said
    if not isinstance(said, bool | int) or said not in (0, 1):
        raise ValueError(
            f"{name} returned {output!r:.100}; a filter returns True to keep the group, False to drop it, or a "
            "DynamicFilterOutput(keep, reason)"
        )
    keep = bool(said)
    reason = None if keep else getattr(output, "reason", None) or "filter"
    return DynamicFilterOutput(keep, reason, bool(getattr(output, "keep_when_insufficient", False)))


def rollout_rewards(samples: Sequence[Sample], reward_key: str | None) -> list[float]:
    """One reward for each rollout of the group (the last sibling's, for a fan-out)."""
    rewards = {s.index if s.rollout_id is None else s.rollout_id: s.reward_value(reward_key) for s in samples}
    return list(rewards.values())


def check_reward_nonzero_std(args: Any, samples: Sequence[Sample], **_: Any) -> DynamicFilterOutput:
    """Keep groups whose rewards differ: only they have an advantage (DAPO, arXiv:2503.14476, dynamic sampling)."""
    rewards = rollout_rewards(samples, args.reward_key)
    if max(rewards) - min(rewards) > SAME_REWARD:
        return DynamicFilterOutput(True)
    return DynamicFilterOutput(False, f"zero_std_{round(rewards[0], 1)}")


def check_reward_nonzero_std_with_fallback(args: Any, samples: Sequence[Sample], **_: Any) -> DynamicFilterOutput:
    """Prefer groups whose rewards differ, without sampling another prompt for their sake."""
    return replace(check_reward_nonzero_std(args, samples), keep_when_insufficient=True)


def check_any_success(args: Any, samples: Sequence[Sample], **_: Any) -> DynamicFilterOutput:
    """Keep groups in which a reward is above 0."""
    return DynamicFilterOutput(max(rollout_rewards(samples, args.reward_key)) > 0, "no_success")


def check_min_reward(args: Any, samples: Sequence[Sample], *, minimum: float = 0.1, **_: Any) -> DynamicFilterOutput:
    """Keep groups whose mean reward is at least ``minimum``."""
    rewards = rollout_rewards(samples, args.reward_key)
    return DynamicFilterOutput(math.fsum(rewards) / len(rewards) >= minimum, "low_reward")


def check_response_diversity(
    _args: Any, samples: Sequence[Sample], *, minimum: float = 0.5, **_: Any
) -> DynamicFilterOutput:
    """Keep groups in which at least ``minimum`` of the responses are different token sequences."""
    different = {tuple(s.tokens[s.prompt_length :]) for s in samples}
    return DynamicFilterOutput(len(different) >= minimum * len(samples), "low_diversity")


def check_reasonable_length(
    _args: Any, samples: Sequence[Sample], *, shortest: int = 1, cut: float = 0.5, **_: Any
) -> DynamicFilterOutput:
    """Keep groups without a response below ``shortest`` tokens, and with at most ``cut`` of them at the limit."""
    if min(s.effective_response_length for s in samples) < shortest:
        return DynamicFilterOutput(False, "too_short")
    truncated = sum(s.status == Sample.Status.TRUNCATED for s in samples)
    return DynamicFilterOutput(truncated <= cut * len(samples), "truncated")


def all_of(*filters: Filter) -> Filter:
    """A filter that keeps what every one of ``filters`` keeps; the first that does not gives the reason."""

    def combined(args: Any, samples: Sequence[Sample]) -> DynamicFilterOutput:
        outputs = (verdict(f(args, samples), f"the filter {getattr(f, '__name__', f)}") for f in filters)
        return next((o for o in outputs if not o.keep), DynamicFilterOutput(True))

    return combined


def check_all(args: Any, samples: Sequence[Sample], **_: Any) -> DynamicFilterOutput:
    """Rewards differ, lengths are reasonable and responses diverse."""
    return verdict(all_of(check_reward_nonzero_std, check_reasonable_length, check_response_diversity)(args, samples))


class DroppedGroups:
    """At most ``--keep-dropped`` groups of a rollout, in ``dropped/`` of the run folder.

    The first ones stay, but a new reason takes the place of the last group of the commonest one.
    """

    def __init__(self, args: Args, rollout_id: int) -> None:
        self._limit = args.keep_dropped if args.run_dir else 0
        self._key = args.reward_key
        self._path = Path(args.run_dir or "") / "dropped" / f"{rollout_id:07d}.parquet"
        self._groups: list[tuple[str, list[Sample]]] = []  # kind of reason, samples

    def add(self, samples: list[Sample], kind: str, detail: str = "") -> None:
        """Keep the group, if there is room: ``metadata["dropped"]`` of its samples is ``kind`` and ``detail``."""
        kinds = Counter(kind for kind, _ in self._groups)
        if len(self._groups) >= self._limit:
            commonest = max(kinds, key=kinds.__getitem__, default=kind)
            if kind in kinds or kinds[commonest] < 2:
                return
            del self._groups[max(i for i, (k, _) in enumerate(self._groups) if k == commonest)]
        self._groups.append((kind, [self._readable(sample, kind + detail) for sample in samples]))

    def save(self) -> str:
        """Write what was kept; how many there are and where, as the end of a sentence ("" where there are none)."""
        if not self._groups:
            return ""
        SampleTable.from_samples([samples for _, samples in self._groups], self._key).to_parquet(self._path)
        return f"{len(self._groups)} of these groups, with responses and rewards, are in {self._path} (--keep-dropped)"

    def _readable(self, sample: Sample, reason: str) -> Sample:
        try:
            sample.reward_value(self._key)
            reward = sample.reward
        except ValueError:  # it failed, or was never scored
            reward = math.nan
        return replace(sample, reward=reward, metadata={**sample.metadata, "dropped": reason})


class Patience:
    """Ends a rollout that cannot succeed, with what is known about why."""

    def __init__(self, args: Args, kept: DroppedGroups) -> None:
        self.kept = kept
        self.filter_path = args.dynamic_sampling_filter_path
        self.generate_path = args.custom_generate_function_path
        self.reward_key = args.reward_key
        self.most_drops = max(16 * args.rollout_batch_size, 128)
        self.most_failures = max(args.rollout_batch_size, 4)
        self.reasons: Counter[str] = Counter()
        self.rewards: list[float] = []
        self.lengths: list[int] = []
        self.failures = 0
        self.warned = False

    def accepted(self) -> None:
        """Start counting anew."""
        self.reasons.clear()
        self.rewards.clear()
        self.lengths.clear()
        self.failures = 0

    def failed(self, error: Exception) -> None:
        """Another group failed.

        Raises:
            ValueError: nothing else happened for too long.
        """
        self.failures += 1
        if self.failures >= self.most_failures:
            by = f" by --custom-generate-function-path {self.generate_path}" if self.generate_path else ""
            where = raised_at(error) if self.generate_path and not isinstance(error, PluginError) else ""
            raise ValueError(
                f"{self.failures} groups in a row could not be generated{by}; the last one: {error!r}{where}"
            ) from error

    def dropped(self, samples: list[Sample], reason: str) -> None:
        """Another group was dropped.

        Raises:
            ValueError: nothing was accepted for too long.
        """
        self.failures = 0
        self.reasons[reason] += 1
        self.rewards += [s.reward_value(self.reward_key) for s in samples if "reward_error" not in s.metadata]
        self.lengths += [s.response_length for s in samples]
        drops = self.reasons.total()
        if self.reasons[NO_REWARD] == drops >= self.most_failures:
            check_scored(samples, f"--reward-error drop left nothing of {drops} groups in a row")
        if drops == self.most_drops // 4 and not self.warned:
            self.warned = True
            logger.warning("%s; the run ends at %d", self._story(), self.most_drops)
        if drops >= self.most_drops:
            raise ValueError(
                f"{self._story()}. Is the reward right (--rm-type, --label-key), the task within the model's reach, "
                "the temperature above 0, --n-samples-per-prompt above 1? Or leave --dynamic-sampling-filter-path out."
            )

    def _story(self) -> str:
        count = max(len(self.rewards), 1)
        where = self.kept.save()
        return (
            f"{FILTER_FLAG} {self.filter_path} dropped {self.reasons.total()} groups in a row and kept none: reasons "
            f"{dict(self.reasons)}; rewards from {min(self.rewards, default=0):g} to {max(self.rewards, default=0):g}, "
            f"mean {math.fsum(self.rewards) / count:.4g}; responses of {sum(self.lengths) / count:.0f} tokens on "
            "average" + (f"; {where}" if where else "")
        )
