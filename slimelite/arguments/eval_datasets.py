"""One evaluation dataset with all its settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from slimelite.arguments.base import flag

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
