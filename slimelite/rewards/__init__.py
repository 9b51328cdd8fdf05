"""Rewards: a sample in, a number out."""

from slimelite.rewards.check import check_reward
from slimelite.rewards.grader import ErrorReport, Grader, RewardError

__all__ = ["ErrorReport", "Grader", "RewardError", "check_reward"]
