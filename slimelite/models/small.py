"""Configs of small copies of models, with all layers and tiny widths. With such a copy, a family is tested within a
second."""

from __future__ import annotations

import copy
from typing import Any

from transformers import PretrainedConfig

VOCABULARY = 80
WINDOW = 5
CONTEXT = 10

HIDDEN = 64
HEAD = 16
# small value -> fields that get this value unless they are 0 or None. The values fit together: 4 heads of width 16 have
# the hidden size 64, and 8 Mamba heads of width 16 have 2 · 64. The chunks of a scan are longer than every row, because
# transformers 5.12.1 on a CPU computes wrong results for the second and later chunks of Nemotron-H
_SMALL: dict[int, str] = {
    HIDDEN: "hidden_size hidden_size_global d_model n_embd embedding_size embedding_dim emb_dim lru_width "
    "word_embed_proj_dim input_embedding_size output_embedding_size hidden_size_per_layer_input",
    48: "intermediate_size moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size ffn_dim "
    "decoder_ffn_dim encoder_ffn_dim n_inner ffn_hidden_size expert_ffn_hidden_size intermediate_size_mlp "
    "moe_shared_expert_intermediate_size dense_intermediate_size dff dim_ff feed_forward_size d_inner",
    HEAD: "head_dim kv_channels dim_head d_head q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim "
    "global_head_dim linear_key_head_dim linear_value_head_dim mamba_d_state state_size ssm_state_size mamba_d_head "
    "mamba_head_dim attention_head_size rotary_dim index_head_dim",
    # if index_n_heads is small, many tokens have the score 0. Then the row's length decides which of them are selected
    2 * HEAD: "attention_head_dim qk_head_dim mamba_chunk_size chunk_size linear_chunk_size index_n_heads",
    8: "mamba_n_heads mamba_num_heads",
    # chunks of Reformer: with one chunk for the whole row, it would not use hashes
    4: "lsh_attn_chunk_length local_attn_chunk_length "
    "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads attention_heads "
    "num_experts num_local_experts n_routed_experts moe_num_experts linear_num_value_heads zero_expert_num",
    2: "num_experts_per_tok moe_topk moe_k top_k_experts linear_num_key_heads n_mamba_heads",
    1: "n_group topk_group n_groups mamba_n_groups mamba_ngroups num_codebooks",
    WINDOW: "sliding_window attention_window_size attention_chunk_size index_topk",
    CONTEXT: "floor_scale",
    VOCABULARY: "vocab_size encoder_hash_byte_group_vocab vocab_size_per_layer_input",
}
SMALL = {name: value for value, names in _SMALL.items() for name in names.split()}
# fields that, if set, are multiples of the hidden size
PROPORTIONAL = ("attention_hidden_size", "mamba_d_ssm")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads")


def small_config(config: PretrainedConfig) -> PretrainedConfig:
    """A copy of ``config`` with all its layers, 4 heads, tiny widths, `VOCABULARY` tokens and a window of `WINDOW`
    tokens. If the rotary embedding depends on the length of a row, the embedding of the copy changes after `CONTEXT`
    tokens.
    """
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    for part in [getattr(config, name, None) for name in config.sub_configs]:
        if isinstance(part, PretrainedConfig):
            _shrink(part)
    _shrink(config)
    whole: Any = getattr(config, "global_config", None)
    if hasattr(whole, "encoder_cross_output_size"):  # BLT
        whole.encoder_cross_output_size = config.encoder_config.hidden_size * config.cross_attn_k
    return config


def _shrink(config: PretrainedConfig) -> None:
    fields = vars(config)
    hidden, heads = fields.get("hidden_size"), fields.get("num_attention_heads")
    for name in set(KV_HEADS) & set(fields):
        setattr(config, name, _small(fields[name], 4 if fields[name] == heads else 2))
    for name in set(SMALL) & set(fields):
        setattr(config, name, _small(fields[name], SMALL[name]))
    for name in set(PROPORTIONAL) & set(fields):
        if isinstance(fields[name], int) and hidden:
            setattr(config, name, fields[name] * config.hidden_size // hidden)
    if "head_dim" in fields:
        config.head_dim = HEAD  # also if head_dim is None, which means hidden size / heads
    if fields.get("expand") and fields.get("num_heads") and "head_dim" in fields:
        config.head_dim = fields["expand"] * config.hidden_size // config.num_heads  # Mamba 2
    if fields.get("mamba_expand") and fields.get("n_mamba_heads") and "mamba_headdim" in fields:
        config.mamba_headdim = fields["mamba_expand"] * config.hidden_size // config.n_mamba_heads  # Zamba 2
    if fields.get("mamba_expand") and fields.get("mamba_n_heads") and "mamba_d_head" in fields:
        inner = fields.get("mamba_d_ssm") or fields["mamba_expand"] * config.hidden_size
        config.mamba_d_head = inner // config.mamba_n_heads
    for name, value in fields.items():
        if name.endswith("token_id") and isinstance(value, int):
            setattr(config, name, 0)
    if fields.get("qk_dim_factor") and hidden and not hidden * fields["qk_dim_factor"] % HIDDEN:
        # the cache of xLSTM only supports multiples of 64
        config.hidden_size = config.embedding_dim = 2 * HIDDEN
    if isinstance(rates := fields.get("compress_rates"), dict):  # DeepSeek-V4: each kind must compress even a short row
        config.compress_rates = {kind: min(rate, WINDOW) for kind, rate in rates.items()}
    _shrink_rope(config)


def _small(value: object, small: int) -> object:
    """``small`` if ``value`` is an int other than 0, else ``value``. Lists are changed item by item. If ``small`` is 1
    or 2, it replaces only larger ints."""
    if isinstance(value, list):
        return [_small(item, small) for item in value]
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    return min(value, small) if small <= 2 else small * bool(value)


def _shrink_rope(config: PretrainedConfig) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    for part in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if part.get("rope_type") not in ("dynamic", "longrope"):
            continue
        config.max_position_embeddings = 2 * CONTEXT if part["rope_type"] == "longrope" else CONTEXT
        for place in (part, vars(config)):
            if "original_max_position_embeddings" in place:
                place["original_max_position_embeddings"] = CONTEXT
        for name in ("short_factor", "long_factor"):
            if name in part:
                width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
                part[name] = part[name][: int(width * part.get("partial_rotary_factor", 1.0)) // 2]
