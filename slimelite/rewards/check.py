"""The reward, tried once before a run starts."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from slimelite.arguments import RewardArgs
from slimelite.rewards.grader import Grader, RewardError, answer_of, route_of
from slimelite.rewards.registry import BOXED, find_rule
from slimelite.rewards.rule import Reward, Settings
from slimelite.sample import Sample


def check_reward(args: RewardArgs, sample: Sample) -> Reward:
    """Score one real row as the run will, and return its reward; ``sample`` itself is left alone.

    A sample without a response gets the one that its label deserves 1 for (a custom function or a server gets the
    label itself), so that a label the rule cannot read is found too.

    Raises:
        ValueError: the reward cannot be had, or even the right answer does not get 1.
    """
    trial = replace(sample, metadata=dict(sample.metadata or {}))
    grader = Grader(replace(args, reward_error="fail"), workers=1, remote_attempts=2)
    try:
        route = route_of(trial, args.custom_rm_path, args.rm_type)
        rule = None if route.custom else find_rule(route.name)
        example = rule.example if rule is not None and trial.label is not None and not trial.response else None
        if example is not None:
            right = example(answer_of(trial, "", Settings()))
            trial.response = f"\\boxed{{{right}}}" if route.name.startswith(BOXED) else right
        elif not trial.response:
            trial.response = str(trial.label or "")
        asyncio.run(grader.grade([trial]))
    except RewardError as error:
        raise ValueError(f"the reward fails on the first row: {error}") from error
    finally:
        grader.close()
    if example is not None and trial.reward_value(args.reward_key) != 1.0:
        raise ValueError(
            f"--rm-type {route.name} gives the right answer to the first row {trial.reward}, not 1: check --label-key "
            f"and the labels (label {str(trial.label)[-200:]!r}, response {trial.response[-200:]!r})"
        )
    assert trial.reward is not None
    return trial.reward
