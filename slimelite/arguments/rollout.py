"""Generating responses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slimelite.arguments.base import flag


@dataclass(frozen=True)
class RolloutArgs:
    """Rollout."""

    rollout_backend: Literal["auto", "embedded", "sglang", "vllm"] = flag(
        "auto", "inference engine", auto="sglang on GPUs where it is installed, else embedded"
    )
    rollout_temperature: float = flag(1.0, "sampling temperature; training divides the logits by it too")
    rollout_top_p: float = flag(1.0, "nucleus sampling; below 1 needs --allow-truncated-sampling")
    rollout_top_k: int = flag(-1, "sample from the k likeliest tokens only; not -1 needs --allow-truncated-sampling")
    allow_truncated_sampling: bool = flag(
        False, "train on top-p or top-k samples although their log-probs are those of the untruncated distribution"
    )
    rollout_max_context_len: int | None = flag(None, "prompt and response together [tokens]")
    rollout_max_response_len: int = flag(None, "longest response [tokens] (required to generate)")
    rollout_skip_special_tokens: bool = flag(False, "leave special tokens out of the response's text")
    rollout_stop: list[str] = flag([], "texts that end a response")
    rollout_stop_token_ids: list[int] = flag([], "token ids that end a response")

    over_sampling_batch_size: int = flag(None, "prompts kept in flight", auto="--rollout-batch-size")
    dynamic_sampling_filter_path: str | None = flag(
        None, "plugin: fn(args, samples) says whether to keep a group", metavar="PLUGIN"
    )
    keep_dropped: int = flag(
        4,
        "groups a rollout that were filtered out, too stale or failed, kept in the run folder with the reason; 0 keeps "
        "none",
    )
    partial_rollout: bool = flag(False, "go on with unfinished responses in the next rollout instead of dropping them")
    mask_offpolicy_in_partial_rollout: bool = flag(
        False,
        "train only on the tokens of the current weights: of resumed responses and of finished ones kept for later",
    )
    max_weight_staleness: int | None = flag(None, "drop samples with tokens from weights older than this many updates")

    async_rollout: bool = flag(
        False, "generate the next rollout while training on this one (slime's train_async.py): its weights are older"
    )
    update_weights_interval: int = flag(1, "rollouts trained on between weight syncs, with --async-rollout")

    rollout_function_path: str | None = flag(
        None, "plugin: fn(args, rollout_id, data_source, evaluation=False), the whole rollout", metavar="PLUGIN"
    )
    custom_generate_function_path: str | None = flag(
        None, "plugin: async fn(args, sample, sampling_params), one response", metavar="PLUGIN"
    )
    generate_timeout: float = flag(
        3600.0, "longest call of a custom generate function [s]; beyond it the call failed, and is tried again"
    )
    rollout_sample_hook_path: list[str] = flag(
        [], "plugin: fn(args, sample) before the reward; may be given several times", metavar="PLUGIN", repeat=True
    )
    rollout_sample_filter_path: str | None = flag(
        None, "plugin: fn(args, groups) sets remove_sample on what the loss must not see", metavar="PLUGIN"
    )
    rollout_all_samples_process_path: str | None = flag(
        None, "plugin: fn(args, groups, data_source) sees every finished group, dropped ones too", metavar="PLUGIN"
    )
    buffer_filter_path: str | None = flag(
        None,
        "plugin: fn(args, rollout_id, buffer, n) picks returned groups",
        metavar="PLUGIN",
        auto="first in, first out",
    )
    custom_rollout_log_function_path: str | None = flag(
        None, "plugin: fn(rollout_id, args, samples, metrics, seconds); true skips the default log", metavar="PLUGIN"
    )
