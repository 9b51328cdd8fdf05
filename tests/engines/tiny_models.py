"""Tiny random models with a word-level tokenizer, and what transformers computes for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

VOCAB = 96
EOS = 1
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "eos_token_id": EOS,
    "bos_token_id": None,
}


def build_model(folder: Path, model_type: str = "qwen2", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Save a random model and its tokenizer to ``folder``; biases and norms are random too, so that each matters."""
    # larger weights would make the gated delta rule multiply rounding: by 0.25, transformers' fp32 is off by up to 1e-3
    noise = 0.1 if "linear_num_key_heads" in changes else 0.25
    config = AutoConfig.for_model(model_type, **{**SIZES, "tie_word_embeddings": model_type != "llama", **changes})
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * noise)
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{token:02}": token for token in range(VOCAB)}, unk_token="w00"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f"w{EOS:02}").save_pretrained(folder)
    return model.eval()


@torch.no_grad()
def greedy(model: PreTrainedModel, prompt: Sequence[int], count: int, banned: Sequence[int] = ()) -> list[int]:
    """``count`` tokens by argmax, one full forward pass each, never one of ``banned``."""
    tokens = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([tokens])).logits[0, -1]
        logits[list(banned)] = -torch.inf
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@torch.no_grad()
def log_probs(
    model: PreTrainedModel, prompt: Sequence[int], output: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """[output tokens] of log softmax(logits / temperature)."""
    tokens = torch.tensor([[*prompt, *output]])
    scores = (model(tokens).logits[0, :-1] / temperature).log_softmax(-1)
    return scores.gather(-1, tokens[0, 1:, None])[len(prompt) - 1 :, 0]


@torch.no_grad()
def next_token_probs(model: PreTrainedModel, prompt: Sequence[int]) -> torch.Tensor:
    """[vocab] distribution of the token after ``prompt``."""
    return model(torch.tensor([list(prompt)])).logits[0, -1].softmax(-1)
