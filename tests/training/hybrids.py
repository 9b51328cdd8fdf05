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
CONVOLUTION: dict[str, Any] = {"layer_types": ["conv", "full_attention"]}
MAMBA_2: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 4}
# every family of transformers with such layers, small
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": DELTA | EXPERTS,
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA | EXPERTS,
    "olmo_hybrid": DELTA,
    "lfm2": CONVOLUTION,
    "lfm2_moe": CONVOLUTION | EXPERTS | {"num_dense_layers": 1},
    "mamba": {"state_size": 4},
    "falcon_mamba": {"state_size": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 4, "mamba_dt_rank": 3},
    "mamba2": {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 16},
    "nemotron_h": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "attention", "moe"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 4,
        "chunk_size": 256,  # beyond a chunk transformers 5.12.1 computes something wrong on a CPU
        "head_dim": 8,
        "n_routed_experts": 4,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 24,
        "num_experts_per_tok": 2,
    },
    "bamba": MAMBA_2 | {"attn_layer_indices": [1]},
    "granitemoehybrid": MAMBA_2 | EXPERTS | {"layer_types": ["mamba", "attention"], "num_local_experts": 4},
    "falcon_h1": MAMBA_2 | {"head_dim": 8, "mamba_d_ssm": 64},
    "zamba2": {
        "num_key_value_heads": 4,
        "layers_block_type": ["mamba", "hybrid"],
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "mamba_ngroups": 2,
        "mamba_d_state": 4,
        "num_mem_blocks": 1,
        "use_mem_rope": True,
    },
    "zamba": {
        "num_key_value_heads": 4,
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "hybrid"],
        "n_mamba_heads": 2,
        "mamba_d_state": 4,
        "mamba_dt_rank": 3,
        "use_mamba_kernels": False,
    },
    "xlstm": {"hidden_size": 128, "num_heads": 4, "gate_soft_cap": 3.0, "output_logit_soft_cap": 3.0},
    "minimax": {
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 8,
        "block_size": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}


# families whose scores are capped, with sinks, or with another head
CAPS: dict[str, Any] = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
WINDOWED: dict[str, Any] = {"head_dim": 8, "sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}
ODD: dict[str, dict[str, Any]] = {
    "gemma2": WINDOWED | CAPS | {"query_pre_attn_scalar": 8},
    "vaultgemma": WINDOWED | CAPS | {"query_pre_attn_scalar": 8},
    "gemma3n_text": WINDOWED
    | {
        "final_logit_softcapping": 3.0,
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "activation_sparsity_pattern": None,
    },
    "nanochat": {"final_logit_softcapping": 3.0},
    "cohere": {"logit_scale": 0.3},
    "cohere2": WINDOWED | {"logit_scale": 0.3},
    "cohere2_moe": WINDOWED | EXPERTS | {"logit_scale": 0.3},
    "granite": {"logits_scaling": 3.0},
    "modernbert-decoder": {"local_attention": 12, "layer_types": ["sliding_attention", "full_attention"]},
    "phi": {"num_key_value_heads": 4},
    "gpt_oss": WINDOWED | {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def hybrid(family: str, attention: str = ATTENTION, **changes: Any) -> PreTrainedModel:
    """A small model of ``family`` whose layers act as strongly as trained ones; the same one for any attention."""
    register_attention()
    config = AutoConfig.for_model(family, **(SIZES | (HYBRIDS | ODD)[family] | changes))
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
        if double and func in (torch.Tensor.to, torch.Tensor.type):
            args = tuple(torch.float64 if x is torch.float32 else x for x in args)
        if double and kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)
