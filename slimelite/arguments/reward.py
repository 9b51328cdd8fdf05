"""Scoring responses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slimelite.arguments.base import flag, resolved


@dataclass(frozen=True)
class RewardArgs:
    """Reward."""

    rm_type: str | None = flag(
        None,
        "reward rule: math gsm8k deepscaler dapo f1 gpqa multiple_choice code ifbench ifbench_loose format random zero "
        "remote_rm reward_model; boxed_<rule> reads \\boxed{} first",
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
    code_timeout: float = flag(10.0, "code: all tests of a response must pass within this time [s]")
    code_memory_mb: int = flag(1024, "code: address space of the program under test [MiB]")
    reward_model_path: str | None = flag(
        None, "reward_model: Hugging Face sequence classification model with one output"
    )
    reward_model_device: Literal["auto", "cpu", "cuda"] = flag(
        "auto", "where the reward model runs; auto: on a GPU if its process sees one"
    )
    reward_model_batch_size: int = flag(8, "conversations that the reward model scores at once")
    format_regex: str | None = flag(
        None, "what format wants of a whole response; without it <think>...</think><answer>...</answer>"
    )
    format_reward_coef: float = flag(0.0, "in training, add this to the reward of a response that keeps to format")
    overlong_buffer_len: int | None = flag(
        None, "in training, punish responses that end within this distance of --rollout-max-response-len [tokens]"
    )
    overlong_penalty_factor: float = flag(1.0, "the punishment at the very end of the buffer; linear before")

    # whether a sample without a label gets the rule's 0, where it would be an error otherwise
    unlabelled_is_zero: bool = resolved(False)
