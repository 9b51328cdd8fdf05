"""Scoring responses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slimelite.arguments.base import flag


@dataclass(frozen=True)
class RewardArgs:
    """Reward."""

    rm_type: str | None = flag(
        None, "reward rule: math gsm8k deepscaler dapo f1 random zero remote_rm; boxed_<rule> reads \\boxed{} first"
    )
    reward_key: str | None = flag(None, "which entry of a dict reward is the reward")
    group_rm: bool = flag(False, "score a whole group in one call of --custom-rm-path")
    rm_url: str | None = flag(None, "address of remote_rm, or of the teacher of --opd-type sglang", metavar="URL")
    custom_rm_path: str | None = flag(None, "plugin: async fn(args, sample) -> reward", metavar="PLUGIN")
    custom_reward_post_process_path: str | None = flag(
        None,
        "plugin: fn(args, samples) -> (raw rewards, rewards), instead of the group normalisation",
        metavar="PLUGIN",
    )
    reward_error: Literal["zero", "drop", "fail"] = flag(
        "zero", "a reward that raises, times out or is not finite: reward 0, leave the sample out, or stop"
    )
    reward_timeout: float = flag(30.0, "a reward that takes longer is an error [s]")
