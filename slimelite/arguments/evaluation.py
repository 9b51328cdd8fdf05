"""Evaluation: its datasets, each with all its settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slimelite.arguments.conditions import EVALUATION, INFERENCE
from slimelite.arguments.flags import ALWAYS, flag, group_flags, resolved

# of a dataset's name; files have 255, with the number of the rollout
NAME_BYTES = 200


@dataclass(frozen=True)
class EvalDataset:
    """One evaluation dataset.

    Each setting is its own > ``eval.defaults`` of --eval-config > --eval-* > --rollout-*.
    """

    name: str = flag(None, "its metrics are called eval/<name>", needs=ALWAYS)
    path: str = flag(
        None, "it is this jsonl or parquet file, or hub dataset id; path@[a:b] takes a slice", needs=ALWAYS
    )
    input_key: str = flag("input", "this column has the prompt", needs=ALWAYS)
    label_key: str | None = flag(None, "this column has the label", needs=ALWAYS)
    tool_key: str = flag("tools", "this column has the tools", needs=ALWAYS)
    metadata_key: str = flag("metadata", "this column has a dict that the reward and plugins see", needs=ALWAYS)
    metadata_overrides: dict[str, Any] = flag({}, "these entries are set in the metadata of every sample", needs=ALWAYS)
    apply_chat_template: bool = flag(False, "the tokenizer's chat template turns messages into a prompt", needs=ALWAYS)
    apply_chat_template_kwargs: dict[str, Any] = flag({}, "the chat template gets these arguments", needs=ALWAYS)
    rm_type: str | None = flag(None, "this rule makes the reward", needs=ALWAYS)
    custom_rm_path: str | None = flag(None, "this plugin makes the reward", needs=ALWAYS)
    custom_generate_function_path: str | None = flag(None, "this plugin makes one response", needs=ALWAYS)
    n_samples_per_eval_prompt: int = flag(1, "each prompt gets this many responses", needs=ALWAYS, at_least=1)
    temperature: float = flag(1.0, "responses are sampled at this temperature; 0 is greedy", needs=ALWAYS, at_least=0)
    top_p: float = flag(
        1.0, "nucleus sampling takes the likeliest tokens up to this share", needs=ALWAYS, above=0, at_most=1
    )
    top_k: int = flag(
        -1, "only the k likeliest tokens are sampled; 1 is greedy", needs=ALWAYS, at_least=1, except_for=-1
    )
    max_response_len: int = flag(None, "a response has at most this length [tokens]", needs=ALWAYS, at_least=1)
    max_prompt_len: int | None = flag(None, "longer prompts are left out [tokens]", needs=ALWAYS, at_least=1)
    max_context_len: int | None = flag(
        None, "prompt and response together have at most this length [tokens]", needs=ALWAYS, at_least=1
    )
    min_new_tokens: int = flag(0, "a response has at least this length [tokens]", needs=ALWAYS, at_least=0)
    stop: list[str] = flag([], "these texts end a response", needs=ALWAYS)
    stop_token_ids: list[int] = flag([], "these token ids end a response", needs=ALWAYS)
    skip_special_tokens: bool = flag(False, "the response's text is without special tokens", needs=ALWAYS)

    def problems(self) -> Iterator[str]:
        """What its settings, from whichever flag or file, cannot be."""
        if len(self.name.encode()) > NAME_BYTES:
            name = f"{self.name[:40]}..."
            yield f"eval dataset {name}: its files are called after it: a name of {NAME_BYTES} bytes or less"
        if self.max_response_len is None:
            yield f"eval dataset {self.name}: give --eval-max-response-len"
        for setting in group_flags(EvalDataset):
            value = getattr(self, setting.name)
            if wrong := setting.wrong_number(value):
                yield f"eval dataset {self.name}: {setting.name} {value}: {wrong}"


@dataclass(frozen=True)
class EvalArgs:
    """Evaluation."""

    eval_interval: int | None = flag(
        None,
        "evaluation runs every this many rollouts, before the first and after the last",
        needs=INFERENCE,
        at_least=1,
    )
    eval_prompt_data: list[str] = flag(
        [],
        "these are the datasets: name path [name path ...]; path@[a:b] takes a slice",
        needs=EVALUATION,
        metavar="NAME PATH",
    )
    eval_config: str | None = flag(
        None,
        "this YAML has the datasets and their settings, instead of --eval-prompt-data",
        needs=EVALUATION,
        metavar="FILE",
    )
    skip_eval_before_train: bool = flag(False, "there is no evaluation before the first rollout", needs=EVALUATION)
    n_samples_per_eval_prompt: int = flag(1, "each prompt gets this many responses, for pass@k", needs=EVALUATION)
    eval_input_key: str | None = flag(None, "this column has the prompt", needs=EVALUATION, auto="--input-key")
    eval_label_key: str | None = flag(None, "this column has the label", needs=EVALUATION, auto="--label-key")
    eval_tool_key: str | None = flag(None, "this column has the tools", needs=EVALUATION, auto="--tool-key")
    eval_reward_key: str | None = flag(
        None, "this entry of a dict reward is the score", needs=EVALUATION, auto="--reward-key"
    )
    eval_temperature: float | None = flag(
        None, "responses are sampled at this temperature; 0 is greedy", needs=EVALUATION, auto="--rollout-temperature"
    )
    eval_top_p: float | None = flag(
        None, "nucleus sampling takes the likeliest tokens up to this share", needs=EVALUATION, auto="--rollout-top-p"
    )
    eval_top_k: int | None = flag(
        None, "only the k likeliest tokens are sampled; 1 is greedy", needs=EVALUATION, auto="--rollout-top-k"
    )
    eval_max_response_len: int | None = flag(
        None, "a response has at most this length [tokens]", needs=EVALUATION, auto="--rollout-max-response-len"
    )
    eval_max_prompt_len: int | None = flag(None, "longer prompts are left out [tokens]", needs=EVALUATION)
    eval_min_new_tokens: int | None = flag(None, "a response has at least this length [tokens]", needs=EVALUATION)
    eval_max_context_len: int | None = flag(
        None,
        "prompt and response together have at most this length [tokens]",
        needs=EVALUATION,
        auto="--rollout-max-context-len",
    )
    eval_function_path: str | None = flag(
        None, "this plugin does what --rollout-function-path does, for evaluation", needs=EVALUATION, metavar="PLUGIN"
    )
    custom_eval_rollout_log_function_path: str | None = flag(
        None,
        "this plugin, fn(rollout_id, args, data, metrics), logs an evaluation; true skips the default log",
        needs=EVALUATION,
        metavar="PLUGIN",
    )

    # every dataset with all its settings, whichever flag or file they came from
    eval_datasets: tuple[EvalDataset, ...] = resolved(())
