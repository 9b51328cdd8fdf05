"""The filter hub: what each filter keeps, and why it drops."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slimelite.rollout import filters
from slimelite.rollout.filters import DynamicFilterOutput, all_of, verdict
from slimelite.sample import Sample, Status

ARGS = SimpleNamespace(reward_key=None)


def group(rewards: list[float], *, lengths: list[int] | None = None, **fields: Any) -> list[Sample]:
    lengths = lengths or [3] * len(rewards)
    samples = []
    for i, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        sample = Sample(index=i, group_index=0, tokens=[1, 2], reward=reward, **fields)
        sample.append_response_tokens([10 + i] * length, [-1.0] * length)
        samples.append(sample)
    return samples


@pytest.mark.parametrize(
    ("name", "samples", "reason"),
    [
        ("check_reward_nonzero_std", group([0, 1, 1]), None),
        ("check_reward_nonzero_std", group([1.0, 1.0, 1.0]), "zero_std_1.0"),
        ("check_reward_nonzero_std", group([0.3, 0.1 + 0.2]), "zero_std_0.3"),  # float noise
        ("check_reward_nonzero_std", group([1.0]), "zero_std_1.0"),  # slime: NaN, which never ends
        ("check_any_success", group([0, 0.5]), None),
        ("check_any_success", group([0, -1]), "no_success"),
        ("check_min_reward", group([0, 0.5]), None),
        ("check_min_reward", group([0, 0.1]), "low_reward"),
        ("check_response_diversity", group([0, 0]), None),
        ("check_reasonable_length", group([0, 0], lengths=[3, 0]), "too_short"),
        ("check_reasonable_length", group([0, 0]), None),
        ("check_reasonable_length", group([0, 0], status=Status.TRUNCATED), "truncated"),
        ("check_all", group([0, 1]), None),
        ("check_all", group([0.0, 0.0]), "zero_std_0.0"),
        ("check_all", group([0, 1], status=Status.TRUNCATED), "truncated"),
    ],
)
def test_filters(name: str, samples: list[Sample], reason: str | None) -> None:
    output = verdict(getattr(filters, name)(ARGS, samples))
    assert (output.keep, output.reason) == (reason is None, reason)


def test_equal_responses_are_not_diverse() -> None:
    samples = group([0, 1, 0, 1])
    for sample in samples[1:]:
        sample.tokens = samples[0].tokens
    assert verdict(filters.check_response_diversity(ARGS, samples)).reason == "low_diversity"
    assert verdict(filters.check_all(ARGS, samples)).reason == "low_diversity"


def test_siblings_of_a_fan_out_count_once() -> None:
    samples = group([0, 1, 1, 1])
    for sample in samples[1:]:
        sample.rollout_id = 1
    assert filters.check_min_reward(ARGS, samples, minimum=0.5).keep
    assert not filters.check_min_reward(ARGS, samples, minimum=0.6).keep


def test_dict_rewards_are_read_by_key() -> None:
    samples = group([0, 1])
    for sample in samples:
        sample.reward = {"score": sample.reward}
    assert filters.check_reward_nonzero_std(SimpleNamespace(reward_key="score"), samples).keep


def test_a_verdict_understands_bools_tensors_and_slimes_objects() -> None:
    assert verdict(True) == DynamicFilterOutput(True)
    assert verdict(False) == DynamicFilterOutput(False, "filter")
    theirs: Any = SimpleNamespace(keep=0, reason="boring")
    assert verdict(theirs) == DynamicFilterOutput(False, "boring")


def test_a_combination_drops_for_the_first_reason() -> None:
    def long_enough(_args: Any, samples: Any) -> bool:
        return len(samples) > 2

    combined = all_of(filters.check_any_success, long_enough)
    assert verdict(combined(ARGS, group([0, 0]))).reason == "no_success"
    assert verdict(combined(ARGS, group([0, 1]))).reason == "filter"
    assert verdict(combined(ARGS, group([0, 1, 0]))).keep
