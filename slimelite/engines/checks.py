"""Checks that every engine makes: of a request, and of whether a weight update brought every weight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slimelite.engines.protocol import GenerateRequest, SamplingParams

# logits divided by less than this overflow fp32; 0 is greedy
LOWEST_TEMPERATURE = 1e-6
LARGEST = 1e30
MOST_STOPS = 256
INT32 = 2**31


def check_request(request: GenerateRequest, vocab_size: int, max_context_len: int) -> None:
    """Refuse what can never be served, whatever is in it: what gets past here shares its batch with other requests.

    Raises:
        ValueError: tokens that the model has not, no prompt, parameters of a wrong type or out of range, or more than
            the context holds.
    """
    params, name, ids = request.params, f"request {request.request_id}", request.input_ids
    if not isinstance(request.request_id, str) or not request.request_id:
        raise ValueError(f"{name}: its id must be text")
    check_tokens(ids, vocab_size, name)
    if not is_whole(request.position, 0, len(ids) - 1):
        raise ValueError(f"{name}: position {request.position!r} leaves no prompt in {len(ids)} input_ids")
    for problem in _problems(params):
        raise ValueError(f"{name}: {problem}")
    if len(ids) + params.max_new_tokens > max_context_len:
        raise ValueError(
            f"{name}: {len(ids)} input tokens and max_new_tokens {params.max_new_tokens} exceed the engine's "
            f"context of {max_context_len} tokens; shorten either, or raise --rollout-max-context-len"
        )


def check_tokens(ids: Sequence[int], vocab_size: int, name: str) -> None:
    """Refuse anything but one sequence of the model's tokens.

    Raises:
        ValueError: with ``name`` in it.
    """
    try:
        array = np.asarray(ids)
    except (ValueError, OverflowError):  # lists of different lengths, numbers of more than 64 bits
        array = np.zeros(0)
    if array.ndim != 1 or array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= vocab_size:
        raise ValueError(f"{name}: input_ids must be one or more of the model's tokens 0 to {vocab_size - 1}")


def is_whole(value: Any, low: int, high: int) -> bool:
    """Whether ``value`` is an integer from ``low`` to ``high``."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and low <= int(value) <= high


def is_number(value: Any) -> bool:
    """Whether ``value`` is a number that fp32 can hold, and so finite."""
    if not isinstance(value, int | float | np.integer | np.floating) or isinstance(value, bool):
        return False
    return bool(-LARGEST <= value <= LARGEST)


def is_temperature(value: Any, *, greedy: bool) -> bool:
    """Whether logits can be divided by ``value``; ``greedy``: or it is 0."""
    return is_number(value) and (value >= LOWEST_TEMPERATURE or (greedy and value == 0))


def _problems(params: SamplingParams) -> Iterator[str]:
    if not is_whole(params.max_new_tokens, 1, INT32):
        yield f"max_new_tokens must be an integer of at least 1, not {params.max_new_tokens!r:.60}"
    if not is_whole(params.min_new_tokens, 0, params.max_new_tokens):
        yield f"min_new_tokens must be an integer from 0 to max_new_tokens, not {params.min_new_tokens!r:.60}"
    if not is_temperature(params.temperature, greedy=True):
        yield f"temperature must be 0, or at least {LOWEST_TEMPERATURE:g} and finite, not {params.temperature!r:.60}"
    if not is_number(params.top_p) or not 0 < params.top_p <= 1:
        yield f"top_p must be above 0 and at most 1, not {params.top_p!r:.60}"
    if not is_whole(params.top_k, -1, INT32):
        yield f"top_k must be an integer, -1 for all tokens, not {params.top_k!r:.60}"
    if params.seed is not None and not is_whole(params.seed, -(2**63), 2**64):
        yield f"the seed (sampling_seed) must be an integer, not {params.seed!r:.60}"
    for switch in ("ignore_eos", "skip_special_tokens"):
        if not isinstance(getattr(params, switch), bool):
            yield f"{switch} must be true or false, not {getattr(params, switch)!r:.60}"
    if not all(is_text(stop) and stop for stop in params.stop) or len(params.stop) > MOST_STOPS:
        yield f"stop must be at most {MOST_STOPS} texts, none of them empty, not {params.stop!r:.60}"
    ids = params.stop_token_ids
    if not all(is_whole(token, -INT32, INT32) for token in ids) or len(ids) > MOST_STOPS:
        yield f"stop_token_ids must be at most {MOST_STOPS} token ids, not {ids!r:.60}"


def is_text(value: Any) -> bool:
    """Whether ``value`` is text that has bytes: JSON can say half a surrogate pair, which has none."""
    try:
        return isinstance(value, str) and bool(value.encode() or True)
    except UnicodeEncodeError:
        return False


def weight_shapes(model_path: str) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of each weight of the model at ``model_path``, tied ones once."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_path))
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
