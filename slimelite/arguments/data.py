"""Prompts and batch sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from slimelite.arguments.base import flag


@dataclass(frozen=True)
class DataArgs:
    """Data."""

    prompt_data: list[str] = flag(
        [], "jsonl or parquet files, or hub dataset ids; path@[a:b] takes a slice", metavar="PATH"
    )
    prompt_data_weights: list[float] = flag([], "share of the prompts drawn from each path", auto="by their sizes")
    input_key: str = flag("input", "column of the prompt: text or messages")
    label_key: str | None = flag(None, "column of the label that the reward compares with")
    metadata_key: str = flag(
        "metadata", "column of a dict that the reward and plugins see; it may be absent, unless named here"
    )
    tool_key: str = flag(
        "tools", "column of the tools that the chat template shows; it may be absent, unless named here"
    )
    apply_chat_template: bool = flag(False, "turn messages into a prompt with the tokenizer's chat template")
    apply_chat_template_kwargs: dict[str, Any] = flag(
        {}, 'arguments of the chat template, JSON: {"enable_thinking": false}'
    )
    rollout_max_prompt_len: int | None = flag(
        None, "longer prompts are left out [tokens]", auto="--rollout-max-context-len less 1"
    )
    rollout_shuffle: bool = flag(False, "shuffle the prompts anew in every epoch")
    rollout_seed: int = flag(42, "seed of shuffling and of sampling")
    rollout_global_dataset: bool = flag(
        True,
        "one dataset for the run; off: the data source plugin finds its own",
        negative="--disable-rollout-global-dataset",
    )
    data_source_path: str | None = flag(None, "plugin: a data source class of your own", metavar="PLUGIN")
    skip_bad_rows: bool = flag(False, "leave malformed rows out, counted and reported, instead of stopping")
    loss_mask_type: Literal["auto", "qwen", "qwen3", "qwen3_5", "distill_qwen"] = flag(
        "auto", "how SFT finds the assistant's tokens; auto reads them off the chat template, which fits all the others"
    )

    num_rollout: int = flag(
        None, "rollouts in this run; wins over --num-epoch", auto="--num-epoch times prompts / --rollout-batch-size"
    )
    num_epoch: int | None = flag(None, "passes over the prompts")
    rollout_batch_size: int = flag(None, "prompts in a rollout (required)")
    n_samples_per_prompt: int = flag(1, "responses to each prompt")
    global_batch_size: int = flag(
        None, "samples in an optimizer step", auto="all samples of the rollout, or those over --num-steps-per-rollout"
    )
    num_steps_per_rollout: int = flag(
        None, "optimizer steps in a rollout", auto="samples / --global-batch-size, rounded up"
    )
    micro_batch_size: int = flag(1, "samples in a forward pass without --use-dynamic-batch-size")
    use_dynamic_batch_size: bool = flag(False, "fill each forward pass with samples up to --max-tokens-per-gpu")
    max_tokens_per_gpu: int | None = flag(None, "tokens in a forward and backward pass")
    log_probs_max_tokens_per_gpu: int | None = flag(
        None, "tokens in a pass that only computes log-probs", auto="--max-tokens-per-gpu"
    )
