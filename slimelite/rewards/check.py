"""The reward, tried once before a run starts."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from slimelite.arguments import RewardArgs
from slimelite.rewards.grader import Grader, RewardError, answer_of, rule_of
from slimelite.rewards.registry import BOXED
from slimelite.rewards.rule import Reward
from slimelite.sample import Sample


def check_reward(args: RewardArgs, sample: Sample) -> Reward:
    r"""Score one real row as the run will, and return its reward. ``sample`` itself is left alone.

    A sample without a response gets the one its label deserves 1 for (a custom function gets the label), so that a
    label the rule cannot read is found too.

    Raises:
        ValueError: the reward cannot be had, or even the right answer does not get 1.
    """
    trial = replace(sample, metadata=dict(sample.metadata or {}))
    rule = rule_of(args, trial)
    perfect = not trial.response and rule is not None and rule.example is not None and (trial.label is not None or not rule.needs_label)
    if not trial.response:
        trial.response = str(trial.label or "")
    if perfect:
        assert rule is not None
        assert rule.example is not None
        trial.response = rule.example(answer_of(trial, ""))
        ...
    grader = Grader(replace(args, reward_error="fail"), workers=1, remote_attempts=2)
