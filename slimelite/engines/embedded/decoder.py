"""The forward pass of a dense Qwen2, Qwen3 or Llama decoder over packed tokens, without autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from slimelite.engines.embedded.attention import AttentionPlan
from slimelite.engines.embedded.weights import DecoderWeights


class Decoder:
    """Hidden states and logits of packed tokens; keys and values go through an `AttentionPlan`."""

    def __init__(self, weights: DecoderWeights, config: PretrainedConfig, max_context_len: int) -> None:
        self.weights = weights
        embed = weights.embed
        # the three families compute rope alike; transformers knows the scaling variants (linear, llama3, yarn)
        rotary = LlamaRotaryEmbedding(config)
        cos, sin = rotary(torch.zeros(1), torch.arange(max_context_len)[None])
        half = sin.shape[-1] // 2
        # rotate_half(x) * sin == roll(x, half) * (-sin, sin)
        sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)
        self._cos = cos[0, :, None].to(embed.device, embed.dtype)
        self._sin = sin[:, None].to(embed.device, embed.dtype)

    def forward(self, tokens: torch.Tensor, plan: AttentionPlan, *, cache_only: bool = False) -> torch.Tensor:
        """Run ``tokens`` [T] at the positions of ``plan`` and write their keys and values to the cache.

        Returns:
            [T, hidden] after the final norm. With ``cache_only`` the last layer stops once its keys and
            values are written: use the cache then, not the result.
        """
        w, shape = self.weights, self.weights.shape
        hidden = (shape.hidden_size,)
        cos, sin = self._cos[plan.positions], self._sin[plan.positions]
        x = F.embedding(tokens, w.embed)
        for index, layer in enumerate(w.layers):
            normed = F.rms_norm(x, hidden, layer.input_norm, shape.norm_eps)
            heads = F.linear(normed, layer.qkv, layer.qkv_bias).view(len(tokens), -1, shape.head_dim)
            query, key_value = heads[:, : shape.num_heads], heads[:, shape.num_heads :]
            if layer.q_norm is not None:
                key = key_value[:, : shape.num_kv_heads]
                query.copy_(F.rms_norm(query, (shape.head_dim,), layer.q_norm, shape.norm_eps))
                key.copy_(F.rms_norm(key, (shape.head_dim,), layer.k_norm, shape.norm_eps))
            rotated = heads[:, : shape.num_heads + shape.num_kv_heads]
            rolled = rotated.roll(shape.head_dim // 2, -1)
            rotated.mul_(cos).addcmul_(rolled, sin)
            plan.write(index, key_value)
            if cache_only and index == shape.num_layers - 1:
                break
            x += F.linear(plan.attend(index, query), layer.out, layer.out_bias)
            normed = F.rms_norm(x, hidden, layer.mlp_norm, shape.norm_eps)
            gate, up = F.linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
            x += F.linear(F.silu(gate) * up, layer.down, layer.down_bias)
        return F.rms_norm(x, hidden, w.norm, shape.norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, vocab] in fp32."""
        return F.linear(hidden, self.weights.head).float()
