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
from slimelite.rollout.context import PluginArgs
from slimelite.rollout.groups import check_scored
from slimelite.sample import Sample
from slimelite.table import SampleTable

logger = logging.getLogger(__name__)

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


Filter = Callable[[PluginArgs, Sequence[Sample]], bool | DynamicFilterOutput]


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


def check_reward_nonzero_std(args: PluginArgs, samples: Sequence[Sample], **_: Any) -> DynamicFilterOutput:
    """Keep groups whose rewards differ: only they have an advantage (DAPO, arXiv:2503.14476, dynamic sampling)."""
    rewards = rollout_rewards(samples, args.reward_key)
    if max(rewards) - min(rewards) > SAME_REWARD:
        return DynamicFilterOutput(True)
    return DynamicFilterOutput(False, f"zero_std_{round(rewards[0], 1)}")


def check_reward_nonzero_std_with_fallback(
    args: PluginArgs, samples: Sequence[Sample], **_: Any
) -> DynamicFilterOutput:
    """Prefer groups whose rewards differ, without sampling another prompt for their sake."""
    return replace(check_reward_nonzero_std(args, samples), keep_when_insufficient=True)


def check_any_success(args: PluginArgs, samples: Sequence[Sample], **_: Any) -> DynamicFilterOutput:
    """Keep groups in which a reward is above 0."""
    return DynamicFilterOutput(max(rollout_rewards(samples, args.reward_key)) > 0, "no_success")


def check_min_reward(
    args: PluginArgs, samples: Sequence[Sample], *, minimum: float = 0.1, **_: Any
) -> DynamicFilterOutput:
    """Keep groups whose mean reward is at least ``minimum``."""
    rewards = rollout_rewards(samples, args.reward_key)
    return DynamicFilterOutput(math.fsum(rewards) / len(rewards) >= minimum, "low_reward")


def check_response_diversity(
    _args: PluginArgs, samples: Sequence[Sample], *, minimum: float = 0.5, **_: Any
) -> DynamicFilterOutput:
    """Keep groups in which at least ``minimum`` of the responses are different token sequences."""
    different = {tuple(s.tokens[s.prompt_length :]) for s in samples}
    return DynamicFilterOutput(len(different) >= minimum * len(samples), "low_diversity")


def check_reasonable_length(
    _args: PluginArgs, samples: Sequence[Sample], *, shortest: int = 1, cut: float = 0.5, **_: Any
) -> DynamicFilterOutput:
    """Keep groups without a response below ``shortest`` tokens, and with at most ``cut`` of them at the limit."""
    if min(s.effective_response_length for s in samples) < shortest:
        return DynamicFilterOutput(False, "too_short")
    truncated = sum(s.status == Sample.Status.TRUNCATED for s in samples)
    return DynamicFilterOutput(truncated <= cut * len(samples), "truncated")


def all_of(*filters: Filter) -> Filter:
    """A filter that keeps what every one of ``filters`` keeps; the first that does not gives the reason."""

    def combined(args: PluginArgs, samples: Sequence[Sample]) -> DynamicFilterOutput:
        outputs = (verdict(f(args, samples), f"the filter {getattr(f, '__name__', f)}") for f in filters)
        return next((o for o in outputs if not o.keep), DynamicFilterOutput(True))

    return combined


def check_all(args: PluginArgs, samples: Sequence[Sample], **_: Any) -> DynamicFilterOutput:
    """Rewards differ, lengths are reasonable and responses diverse."""
    return verdict(all_of(check_reward_nonzero_std, check_reasonable_length, check_response_diversity)(args, samples))


class DroppedGroups:
    """What a rollout does not train on: a few groups are kept for a person to read, and too many in a row end it.

    At most ``--keep-dropped`` are kept, in ``dropped/`` of the run folder. The first ones stay, but a new reason takes
    the place of the last group of the commonest one.
    """

    def __init__(self, args: Args, rollout_id: int) -> None:
        self._args = args
        self._limit = args.keep_dropped if args.run_dir else 0
        self._path = Path(args.run_dir or "") / "dropped" / f"{rollout_id:07d}.parquet"
        self._kept: list[tuple[str, list[Sample]]] = []  # kind of reason, samples
        self._most_drops = max(16 * args.rollout_batch_size, 128)
        self._most_failures = max(args.rollout_batch_size, 4)
        self._warned = False
        self.accepted()

    def accepted(self) -> None:
        """A group was accepted: those in a row are counted anew."""
        self._failures = 0
        self._reasons: Counter[str] = Counter()
        self._rewards: list[float] = []
        self._lengths: list[int] = []

    def keep(self, samples: list[Sample], kind: str, detail: str = "") -> None:
        """Keep the group, if there is room: ``metadata["dropped"]`` of its samples is ``kind`` and ``detail``."""
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
        except ValueError:  # it failed, or was never scored
            reward = math.nan
        return replace(sample, reward=reward, metadata={**sample.metadata, "dropped": reason})

    def save(self) -> str:
        """Write what was kept; how many there are and where, as the end of a sentence ("" where there are none)."""
        if not self._kept:
            return ""
        SampleTable.from_samples([samples for _, samples in self._kept], self._args.reward_key).to_parquet(self._path)
        return f"{len(self._kept)} of these groups, with responses and rewards, are in {self._path} (--keep-dropped)"

    def failed(self, error: Exception) -> None:
        """Count a group that could not be generated.

        Raises:
            ValueError: nothing else happened for too long.
        """
        self._failures += 1
        if self._failures >= self._most_failures:
            path = self._args.custom_generate_function_path
            by = f" by --custom-generate-function-path {path}" if path else ""
            where = raised_at(error) if path and not isinstance(error, PluginError) else ""
            raise ValueError(
                f"{self._failures} groups in a row could not be generated{by}; the last one: {error!r}{where}"
            ) from error

    def dropped(self, samples: list[Sample], reason: str) -> None:
        """Count a group that the filter dropped.

        Raises:
            ValueError: nothing was accepted for too long; says what is known about why.
        """
        self._failures = 0
        self._reasons[reason] += 1
        self._rewards += [s.reward_value(self._args.reward_key) for s in samples if "reward_error" not in s.metadata]
        self._lengths += [s.response_length for s in samples]
        drops = self._reasons.total()
        if self._reasons[NO_REWARD] == drops >= self._most_failures:
            check_scored(samples, f"--reward-error drop left nothing of {drops} groups in a row")
        if drops == self._most_drops // 4 and not self._warned:
            self._warned = True
            logger.warning("%s; the run ends at %d", self._story(), self._most_drops)
        if drops >= self._most_drops:
            raise ValueError(
                f"{self._story()}. Is the reward right (--rm-type, --label-key), the task within the model's reach, "
                "the temperature above 0, --n-samples-per-prompt above 1? Or leave --dynamic-sampling-filter-path out."
            )

    def _story(self) -> str:
        rewards, lengths = self._rewards, self._lengths
        count = max(len(rewards), 1)
        where = self.save()
        return (
            f"--dynamic-sampling-filter-path {self._args.dynamic_sampling_filter_path} dropped {self._reasons.total()} "
            f"groups in a row and kept none: reasons {dict(self._reasons)}; "
            f"rewards from {min(rewards, default=0):g} to {max(rewards, default=0):g}, "
            f"mean {math.fsum(rewards) / count:.4g}; "
            f"responses of {sum(lengths) / count:.0f} tokens on average" + (f"; {where}" if where else "")
        )
