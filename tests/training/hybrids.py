"""Small models with layers that carry a state, and float64 throughout."""

from __future__ import annotations

from typing import Any

import torch
from tiny import VOCAB
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from slimelite.training.attention import ATTENTION, register_attention

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
DELTA: dict[str, Any] = {
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
# every family of transformers with such layers, small
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": DELTA | EXPERTS,
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA | EXPERTS,
    "olmo_hybrid": DELTA,
}


def hybrid(family: str, attention: str = ATTENTION, **changes: Any) -> PreTrainedModel:
    """A small model of ``family`` whose layers act as strongly as trained ones; the same one for any attention."""
    register_attention()
    config = AutoConfig.for_model(family, **(SIZES | HYBRIDS[family] | changes))
    torch.manual_seed(0)
    # "eager" experts: the others have no float64
    options = {"attn_implementation": attention, "experts_implementation": "eager", "dtype": torch.float32}
    model = AutoModelForCausalLM.from_config(config, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


class Exact(TorchFunctionMode):
    """In it float64 stays float64: transformers computes norms, routers and decays in fp32 whatever a model's dtype."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        double = bool(args) and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64
        if func is torch.Tensor.float and args[0].dtype != torch.float32:
            return args[0].double()
        if double and func is torch.Tensor.to:
            args = tuple(torch.float64 if x is torch.float32 else x for x in args)
        if double and kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)
