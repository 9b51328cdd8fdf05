"""Dynamic sampling filters: ``fn(args, samples)`` says whether a scored group is worth training on.

Name one with ``--dynamic-sampling-filter-path slimelite.rollout.filters.<name>``, or write your own that calls these:
it returns a bool or a `DynamicFilterOutput`, and may be built of several with `all_of`. In a fan-out, siblings share
their rollout's reward and count once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slimelite.sample import Sample

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
