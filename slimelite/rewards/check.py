"""The reward, tried once before a run starts."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from slimelite.arguments import RewardArgs
from slimelite.plugins import PACKAGE
from slimelite.rewards.grader import Grader, answer_of, route_of
from slimelite.rewards.registry import BOXED, find_rule
from slimelite.rewards.rule import Reward, Settings
from slimelite.sample import Sample, label_text


class Trial(NamedTuple):
    """The reward of one row, and what stood for the response: "the right answer", "the bare label" or the like."""

    reward: Reward
    response: str


def check_reward(args: RewardArgs, sample: Sample, group_size: int = 1) -> Trial:
    """Score one real row as the run will; ``sample`` itself is left alone.

    A sample without a response gets the one that its label deserves 1 for (a custom function or a server gets the
    label itself), so that a label the rule cannot read is found too. Under --group-rm there are ``group_size`` of it.
    --reward-error does not apply: what fails here would fail on every row.

    Raises:
        ValueError: the reward cannot be had, or even the right answer does not get 1.
    """
    trial = replace(sample, metadata=dict(sample.metadata or {}))
    grader = Grader(replace(args, reward_error="zero"), workers=1, remote_attempts=2, warns=False)
    try:
        route = route_of(trial, args.custom_rm_path, args.rm_type)
        rule = None if route.custom else find_rule(route.name)
        example = rule.example if rule is not None and trial.label is not None and not trial.response else None
        stood = (
            "the sample's response"
            if trial.response
            else "the bare label"
            if label_text(trial.label)
            else "an empty response"
        )
        if example is not None:
            stood = "the right answer"
            right = example(answer_of(trial, "", Settings()))
            trial.response = f"\\boxed{{{right}}}" if route.name.startswith(BOXED) else right
        elif not trial.response:
            trial.response = label_text(trial.label)
        siblings = (
            [replace(trial, index=i, metadata=dict(trial.metadata)) for i in range(1, group_size)]
            if args.group_rm
            else []
        )
        asyncio.run(grader.grade([trial, *siblings]))
    finally:
        grader.close()
    if grader.error_reports:
        report = grader.error_reports[0]
        places = re.findall(r'File "(.+)", line (\d+), in (\S+)', report.failure.traceback)
        theirs = [place for place in places if not Path(place[0]).is_relative_to(PACKAGE)]
        where = " ({}, line {}, in {})".format(*theirs[-1]) if route.custom and theirs else ""
        if where in report.failure.message:  # an error of the plugin's call says it itself
            where = ""
        raise ValueError(
            f"the reward {report.reward} fails on the first row, which no --reward-error excuses: "
            f"{report.failure.kind}: {report.failure.message}{where} (label {report.label!r}, response "
            f"{report.response!r})"
        )
    if example is not None and trial.reward_value(args.reward_key) != 1.0:
        raise ValueError(
            f"--rm-type {route.name} gives the right answer to the first row {trial.reward}, not 1: check --label-key "
            f"and the labels (label {str(trial.label)[-200:]!r}, response {trial.response[-200:]!r})"
        )
    assert trial.reward is not None
    return Trial(trial.reward, stood)
