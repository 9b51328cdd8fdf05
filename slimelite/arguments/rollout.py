"""Prompts, responses to them, their rewards, and evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from slimelite.arguments.flags import flag, resolved
from slimelite.engines.registry import Backends
from slimelite.families import LOSS_MASKS


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
    loss_mask_type: str = flag(
        "auto",
        "how SFT finds the assistant's tokens; auto reads them off the chat template, which fits all the others",
        choices=LOSS_MASKS,
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


@dataclass(frozen=True)
class RolloutArgs:
    """Rollout."""

    rollout_backend: str = flag(
        "auto",
        "inference engine",
        choices=Backends(),
        auto="sglang on GPUs where it is installed, else embedded",
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


# setting -> the lowest value that makes sense
AT_LEAST = {
    **dict.fromkeys(["n_samples_per_eval_prompt", "max_response_len", "max_prompt_len", "max_context_len"], 1),
    **dict.fromkeys(["temperature", "min_new_tokens"], 0),
}
# of a dataset's name; files have 255, with the number of the rollout
NAME_BYTES = 200


@dataclass(frozen=True)
class EvalDataset:
    """One evaluation dataset.

    Each setting is its own > ``eval.defaults`` of --eval-config > --eval-* > --rollout-*.
    """

    name: str = flag(None, "what its metrics are called: eval/<name>")
    path: str = flag(None, "jsonl or parquet file, or hub dataset id; path@[a:b] takes a slice")
    input_key: str = flag("input", "column of the prompt")
    label_key: str | None = flag(None, "column of the label")
    tool_key: str = flag("tools", "column of the tools")
    metadata_key: str = flag("metadata", "column of a dict that the reward and plugins see")
    metadata_overrides: dict[str, Any] = flag({}, "entries set in the metadata of every sample")
    apply_chat_template: bool = flag(False, "turn messages into a prompt with the tokenizer's chat template")
    apply_chat_template_kwargs: dict[str, Any] = flag({}, "arguments of the chat template")
    rm_type: str | None = flag(None, "reward rule")
    custom_rm_path: str | None = flag(None, "plugin: the reward")
    custom_generate_function_path: str | None = flag(None, "plugin: one response")
    n_samples_per_eval_prompt: int = flag(1, "responses to each prompt")
    temperature: float = flag(1.0, "sampling temperature; 0 is greedy")
    top_p: float = flag(1.0, "nucleus sampling")
    top_k: int = flag(-1, "sample from the k likeliest tokens; 1 is greedy")
    max_response_len: int = flag(None, "longest response [tokens]")
    max_prompt_len: int | None = flag(None, "longer prompts are left out [tokens]")
    max_context_len: int | None = flag(None, "prompt and response together [tokens]")
    min_new_tokens: int = flag(0, "shortest response [tokens]")
    stop: list[str] = flag([], "texts that end a response")
    stop_token_ids: list[int] = flag([], "token ids that end a response")
    skip_special_tokens: bool = flag(False, "leave special tokens out of the response's text")

    def problems(self) -> Iterator[str]:
        """What its settings, from whichever flag or file, cannot be."""
        where = f"eval dataset {self.name}:"
        if len(self.name.encode()) > NAME_BYTES:
            name = f"{self.name[:40]}..."
            yield f"eval dataset {name}: its files are called after it: a name of {NAME_BYTES} bytes or less"
        if self.max_response_len is None:
            yield f"{where} give --eval-max-response-len"
        for name, low in AT_LEAST.items():
            value = getattr(self, name)
            if value is not None and value < low:
                yield f"{where} {name} {value}: must be at least {low}"
        if not 0 < self.top_p <= 1:
            yield f"{where} top_p {self.top_p}: must be above 0 and at most 1"
        if self.top_k == 0 or self.top_k < -1:
            yield f"{where} top_k {self.top_k}: is -1 (all tokens) or at least 1"


@dataclass(frozen=True)
class EvalArgs:
    """Evaluation."""

    eval_interval: int | None = flag(None, "evaluate every this many rollouts, before the first and after the last")
    eval_prompt_data: list[str] = flag([], "name path [name path ...]; path@[a:b] takes a slice", metavar="NAME PATH")
    eval_config: str | None = flag(
        None, "YAML of datasets and their settings, instead of --eval-prompt-data", metavar="FILE"
    )
    skip_eval_before_train: bool = flag(False, "no evaluation before the first rollout")
    n_samples_per_eval_prompt: int = flag(1, "responses to each prompt, for pass@k")
    eval_input_key: str | None = flag(None, "column of the prompt", auto="--input-key")
    eval_label_key: str | None = flag(None, "column of the label", auto="--label-key")
    eval_tool_key: str | None = flag(None, "column of the tools", auto="--tool-key")
    eval_reward_key: str | None = flag(None, "which entry of a dict reward is the score", auto="--reward-key")
    eval_temperature: float | None = flag(None, "sampling temperature; 0 is greedy", auto="--rollout-temperature")
    eval_top_p: float | None = flag(None, "nucleus sampling", auto="--rollout-top-p")
    eval_top_k: int | None = flag(None, "sample from the k likeliest tokens; 1 is greedy", auto="--rollout-top-k")
    eval_max_response_len: int | None = flag(None, "longest response [tokens]", auto="--rollout-max-response-len")
    eval_max_prompt_len: int | None = flag(None, "longer prompts are left out [tokens]")
    eval_min_new_tokens: int | None = flag(None, "shortest response [tokens]")
    eval_max_context_len: int | None = flag(
        None, "prompt and response together [tokens]", auto="--rollout-max-context-len"
    )
    eval_function_path: str | None = flag(None, "plugin: as --rollout-function-path, for evaluation", metavar="PLUGIN")
    custom_eval_rollout_log_function_path: str | None = flag(
        None, "plugin: fn(rollout_id, args, data, metrics); true skips the default log", metavar="PLUGIN"
    )

    # every dataset with all its settings, whichever flag or file they came from
    eval_datasets: tuple[EvalDataset, ...] = resolved(())
