"""Contracts of what chooses: dynamic filters, buffer filters, sample filters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from rollout.conftest import MakeArgs

from slimelite.rollout.filters import DynamicFilterOutput, verdict
from slimelite.samples.sample import Sample, Status
from slimelite.slime.plugins import load_function

from .conftest import Given


def group(number: int, rewards: list[float], **fields: Any) -> list[Sample]:
    samples = []
    for place, reward in enumerate(rewards):
        sample = Sample(index=4 * number + place, group_index=number, tokens=[5, 6], label="1", reward=reward)
        sample.append_response_tokens([7 + place, 2], [-0.5, -0.1], text="7")
        sample.status = Status.COMPLETED
        for name, value in fields.items():
            setattr(sample, name, value)
        samples.append(sample)
    return samples


@pytest.mark.parametrize(
    "samples",
    [
        group(0, [0.0, 1.0, 1.0, 0.0]),
        group(1, [0.0] * 4),
        group(2, [1.0] * 4, status=Status.TRUNCATED),
        group(3, [1.0]),
        group(4, [0.0, 1.0, 1.0], rollout_id=16),
    ],
    ids=["mixed", "equal", "truncated", "one", "fan-out"],
)
def test_dynamic_filter(given: Given, make_args: MakeArgs, samples: list[Sample]) -> None:
    """``fn(args, samples)`` -> bool, or a DynamicFilterOutput; it changes nothing."""
    before = copy.deepcopy(samples)
    output = load_function(given("--dynamic-sampling-filter-path"))(make_args(), samples)
    assert isinstance(output, bool | DynamicFilterOutput) or hasattr(output, "keep")
    said = verdict(output)
    assert said.keep or said.reason
    assert samples == before


@pytest.mark.parametrize(("waiting", "wanted"), [(5, 2), (2, 5), (3, 3), (0, 2)])
def test_buffer_filter(given: Given, make_args: MakeArgs, waiting: int, wanted: int) -> None:
    """``fn(args, rollout_id, buffer, n)`` takes at most n groups out of ``buffer``, which it changes in place."""
    groups = [group(number, [0.0, 1.0]) for number in range(waiting)]
    buffer = list(groups)
    taken = load_function(given("--buffer-filter-path"))(make_args(), None, buffer, wanted)
    assert len(taken) <= wanted
    numbers = [g[0].group_index for g in [*taken, *buffer]]
    assert len(set(numbers)) == len(numbers), "a group that is taken is not left behind"
    assert set(numbers) <= set(range(waiting))


def test_sample_filter(given: Given, make_args: MakeArgs) -> None:
    """``fn(args, groups)`` sets ``remove_sample`` and leaves the groups as they are."""
    groups = [group(0, [0.0, 1.0]), group(1, [1.0, 1.0], status=Status.TRUNCATED)]
    before = copy.deepcopy(groups)
    load_function(given("--rollout-sample-filter-path"))(make_args(), groups)
    pairs = [pair for group, was in zip(groups, before, strict=True) for pair in zip(group, was, strict=True)]
    for sample, was in pairs:
        sample.remove_sample, was.remove_sample = bool(sample.remove_sample), bool(sample.remove_sample)
        assert sample == was
