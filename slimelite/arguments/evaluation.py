"""Evaluation: its datasets, each with all its settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slimelite.arguments.conditions import EVALUATION, INFERENCE
from slimelite.arguments.flags import ALWAYS, flag, group_flags, plugin, resolved

# of a dataset's name; files have 255, with the number of the rollout
NAME_BYTES = 200


@dataclass(frozen=True)
class EvalDataset:
    """One evaluation dataset.

    Each setting is its own > ``eval.defaults`` of --eval-config > --eval-* > --rollout-*.
    """

    name: str = flag(None, "its metrics are called eval/<name>", ALWAYS)
    path: str = flag(None, "it is this jsonl or parquet file, or hub dataset id; path@[a:b] takes a slice", ALWAYS)
    input_key: str = flag("input", "this column has the prompt", ALWAYS)
    label_key: str | None = flag(None, "this column has the label", ALWAYS)
    tool_key: str = flag("tools", "this column has the tools", ALWAYS)
    metadata_key: str = flag("metadata", "this column has a dict that the reward and plugins see", ALWAYS)
    metadata_overrides: dict[str, Any] = flag({}, "these entries are set in the metadata of every sample", ALWAYS)
    apply_chat_template: bool = flag(False, "the tokenizer's chat template turns messages into a prompt", ALWAYS)
    apply_chat_template_kwargs: dict[str, Any] = flag({}, "the chat template gets these arguments", ALWAYS)
    rm_type: str | None = flag(None, "this rule makes the reward", ALWAYS)
    custom_rm_path: str | None = flag(None, "this plugin makes the reward", ALWAYS)
    custom_generate_function_path: str | None = flag(None, "this plugin makes one response", ALWAYS)
    n_samples_per_eval_prompt: int = flag(1, "each prompt gets this many responses", ALWAYS, at_least=1)
    temperature: float = flag(1.0, "responses are sampled at this temperature; 0 is greedy", ALWAYS, at_least=0)
    top_p: float = flag(1.0, "nucleus sampling takes the likeliest tokens up to this share", ALWAYS, above=0, at_most=1)
    top_k: int = flag(-1, "only the k likeliest tokens are sampled; 1 is greedy", ALWAYS, at_least=1, except_for=-1)
    max_response_len: int = flag(None, "a response has at most this length [tokens]", ALWAYS, at_least=1)
    max_prompt_len: int | None = flag(None, "longer prompts are left out [tokens]", ALWAYS, at_least=1)
    max_context_len: int | None = flag(
        None, "prompt and response together have at most this length [tokens]", ALWAYS, at_least=1
    )
    min_new_tokens: int = flag(0, "a response has at least this length [tokens]", ALWAYS, at_least=0)
    stop: list[str] = flag([], "these texts end a response", ALWAYS)
    stop_token_ids: list[int] = flag([], "these token ids end a response", ALWAYS)
    skip_special_tokens: bool = flag(False, "the response's text is without special tokens", ALWAYS)

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


def _setting(name: str, auto: str | None = None) -> Any:
    """A flag for what every dataset has, where it does not say ``name`` itself; the datasets are checked."""
    help = next(setting.help for setting in group_flags(EvalDataset) if setting.name == name)
    return flag(None, help, EVALUATION, auto=auto)


@dataclass(frozen=True)
class EvalArgs:
    """Evaluation."""

    eval_interval: int | None = flag(
        None,
        "evaluation runs every this many rollouts, before the first and after the last",
        INFERENCE,
        at_least=1,
    )
    eval_prompt_data: list[str] = flag(
        [],
        "these are the datasets, each a name and a path, as in gsm8k test.parquet; path@[a:b] takes a slice",
        EVALUATION,
        metavar="NAME PATH",
    )
    eval_config: str | None = flag(
        None,
        "this YAML has the datasets and their settings, instead of --eval-prompt-data",
        EVALUATION,
        metavar="FILE",
    )
    skip_eval_before_train: bool = flag(False, "the run does not evaluate before the first rollout", EVALUATION)
    n_samples_per_eval_prompt: int = flag(1, "each prompt gets this many responses, for pass@k", EVALUATION)
    eval_input_key: str | None = _setting("input_key", auto="--input-key")
    eval_label_key: str | None = _setting("label_key", auto="--label-key")
    eval_tool_key: str | None = _setting("tool_key", auto="--tool-key")
    eval_reward_key: str | None = flag(
        None, "of a reward that is a dict, this entry is the score", EVALUATION, auto="--reward-key"
    )
    eval_temperature: float | None = _setting("temperature", auto="--rollout-temperature")
    eval_top_p: float | None = _setting("top_p", auto="--rollout-top-p")
    eval_top_k: int | None = _setting("top_k", auto="--rollout-top-k")
    eval_max_response_len: int | None = _setting("max_response_len", auto="--rollout-max-response-len")
    eval_max_prompt_len: int | None = _setting("max_prompt_len")
    eval_min_new_tokens: int | None = _setting("min_new_tokens")
    eval_max_context_len: int | None = _setting("max_context_len", auto="--rollout-max-context-len")
    eval_function_path: str | None = plugin("does what --rollout-function-path does, for evaluation", EVALUATION)
    custom_eval_rollout_log_function_path: str | None = plugin(
        "logs an evaluation, and by returning true leaves out the default log: fn(rollout_id, args, data, metrics)",
        EVALUATION,
    )

    # every dataset with all its settings, whichever flag or file they came from
    eval_datasets: tuple[EvalDataset, ...] = resolved(())
