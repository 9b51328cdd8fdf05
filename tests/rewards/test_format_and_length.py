"""Format and length: the format rule, and what is added to the rewards of a training batch."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from slimelite.arguments import RewardArgs
from slimelite.rewards import Grader
from slimelite.rewards.format import is_think_answer
from slimelite.rewards.shaping import overlong_penalty
from slimelite.sample import Sample

GOOD = "<think>two and two</think>\n<answer>4</answer>"


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (GOOD, True),
        (f"  {GOOD}\n", True),
        ("<think>a</think><answer>b</answer>", True),
        (f"Sure! {GOOD}", False),
        (f"{GOOD} I hope this helps", False),
        ("<think>a</think> so <answer>b</answer>", False),
        ("<answer>b</answer><think>a</think>", False),
        ("<think></think><answer>b</answer>", False),
        ("<think>a</think><answer> </answer>", False),
        ("<think>a<think>b</think><answer>c</answer>", False),
        ("<think>a</think><answer>c", False),
        ("", False),
    ],
)
def test_think_and_answer(response: str, expected: bool) -> None:
    assert is_think_answer(response) is expected


def rewards(args: RewardArgs, *responses: str) -> tuple[list[Any], dict[str, float]]:
    grader = Grader(args, workers=1)
    samples = [Sample(index=i, group_index=0, response=r) for i, r in enumerate(responses)]
    asyncio.run(grader.grade(samples))
    metrics = grader.metrics()
    grader.close()
    return [s.reward for s in samples], metrics


def test_the_format_rule_reads_the_default_or_a_regex_of_the_whole_response() -> None:
    assert rewards(RewardArgs(rm_type="format"), GOOD, "4")[0] == [1.0, 0.0]
    regex = RewardArgs(rm_type="format", format_regex=r"Reason:.+Answer: \d+")
    assert rewards(regex, "Reason: two\nAnswer: 4\n", GOOD, "Reason: x Answer: 4 apples")[0] == [1.0, 0.0, 0.0]


def test_a_regex_without_end_is_a_timeout_and_not_a_hang() -> None:
    args = RewardArgs(rm_type="format", format_regex=r"(a+)+b", reward_timeout=1.0)
    assert rewards(args, "a" * 40) == ([0.0], {"rollout/reward_errors": 1.0, "rollout/reward_errors/timeout": 1.0})


def test_the_overlong_penalty_is_dapos_line() -> None:
    """Eq. 13 of the paper and verl's reward manager: 0, then (L_max − L_cache − |y|) / L_cache, then −1."""
    limit, buffer = 20480, 4096
    for length in (0, 100, 16384, 16385, 18432, 20479, 20480):
        paper = 0.0 if length <= limit - buffer else (limit - buffer - length) / buffer
        verl = min(-(length - (limit - buffer)) / buffer * 1.0, 0)
        assert overlong_penalty(length, limit, buffer, 1.0) == pytest.approx(paper) == pytest.approx(verl)
        assert overlong_penalty(length, limit, buffer, 0.5) == pytest.approx(0.5 * verl)
    assert overlong_penalty(18432, limit, buffer, 1.0) == -0.5
    assert overlong_penalty(30000, limit, buffer, 1.0) == -1.0


def shaping(args: RewardArgs, samples: list[Sample], max_length: int = 100) -> tuple[list[float], dict[str, float]]:
    grader = Grader(args, workers=1)
    result = asyncio.run(grader.shaping(samples, max_length))
    grader.close()
    return result


def test_what_training_adds_to_rewards() -> None:
    lengths = {60: GOOD, 90: GOOD, 100: "4"}
    samples = [
        Sample(index=i, group_index=0, response=r, response_length=n, tokens=[0] * n, reward=1.0)
        for i, (n, r) in enumerate(lengths.items())
    ]
    assert shaping(RewardArgs(), samples) == ([0.0, 0.0, 0.0], {})
    added, metrics = shaping(RewardArgs(overlong_buffer_len=20, overlong_penalty_factor=2.0), samples)
    assert added == pytest.approx([0.0, -1.0, -2.0])
    assert metrics == {"rollout/overlong_penalty": pytest.approx(-1.0)}
    added, metrics = shaping(RewardArgs(format_reward_coef=0.25), samples)
    assert added == [0.25, 0.25, 0.0]
    assert metrics == {"rollout/format_reward": pytest.approx(2 / 3)}
    added, metrics = shaping(RewardArgs(format_reward_coef=0.25, overlong_buffer_len=20), samples)
    assert added == pytest.approx([0.25, -0.25, -1.0])
    assert set(metrics) == {"rollout/format_reward", "rollout/overlong_penalty"}
    assert [s.reward for s in samples] == [1.0] * 3
