"""Evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from slimelite.arguments.base import flag, resolved
from slimelite.arguments.eval_datasets import EvalDataset


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
