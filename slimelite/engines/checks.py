"""What engines check alike: requests, and whether a weight update is whole."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slimelite.engines.protocol import GenerateRequest


def check_request(request: GenerateRequest, vocab_size: int, max_context_len: int) -> None:
    """Refuse what can never be served.

    Raises:
        ValueError: tokens that the model has not, no prompt, parameters out of range, or more than the context holds.
    """
    params, name, ids = request.params, f"request {request.request_id}", request.input_ids
    if not ids or min(ids) < 0 or max(ids) >= vocab_size:
        raise ValueError(f"{name}: input_ids must be one or more of the model's tokens 0 to {vocab_size - 1}")
    if not 0 <= request.position < len(ids):
        raise ValueError(f"{name}: position {request.position} leaves no prompt in {len(ids)} input_ids")
    if params.max_new_tokens < 1 or params.temperature < 0 or not 0 < params.top_p <= 1 or "" in params.stop:
        raise ValueError(
            f"{name}: needs max_new_tokens >= 1, temperature >= 0, 0 < top_p <= 1 and no empty stop, got {params}"
        )
    if len(ids) + params.max_new_tokens > max_context_len:
        raise ValueError(
            f"{name}: {len(ids)} input tokens and max_new_tokens {params.max_new_tokens} exceed the engine's "
            f"context of {max_context_len} tokens; shorten either, or raise --rollout-max-context-len"
        )


def weight_shapes(model_path: str) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of each weight of the model at ``model_path``, tied ones once."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_path))
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
