"""A short complete command line, and a model folder and data on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from slimelite.arguments import Args, ArgumentError, make_args
from slimelite.plan.devices import Machine

CPU = Machine(gpus=0)
COMPLETE = (
    "--hf-checkpoint owner/model --prompt-data p.jsonl --num-rollout 2 --rollout-batch-size 4 --n-samples-per-prompt 2 "
    "--rollout-max-response-len 16"
)
QWEN = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "eos_token_id": 257,
}
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Make = Callable[..., Args]
Problems = Callable[..., list[str]]


@pytest.fixture
def make() -> Make:
    """Words behind `COMPLETE` -> arguments, on a machine without GPUs unless told."""
    return lambda words="", machine=CPU: make_args([*COMPLETE.split(), *words.split()], machine=machine)


@pytest.fixture
def problems(make: Make) -> Problems:
    """Words behind `COMPLETE` -> the problems they make."""

    def find(words: str, machine: Machine = CPU) -> list[str]:
        try:
            make(words, machine)
        except ArgumentError as error:
            return error.problems
        return []

    return find


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with the config of `QWEN`, a byte-level tokenizer and no weights."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path / "model"
    folder.mkdir()
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": CHAT}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(QWEN))
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Sums with their answers, as messages."""
    path = tmp_path / "sums.jsonl"
    rows = [{"messages": [{"role": "user", "content": f"{i} + {i} ="}], "label": str(2 * i)} for i in range(100)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path
