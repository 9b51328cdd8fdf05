"""A task small enough to learn on a laptop: add four digits, with a tokenizer and a model shape made for it.

The answer to the prompt ``3+5+2+9=?`` may show the working, ``3+5=8 8+2=10 10+9=19`` and ``#### 19``, or be a bare
guess, ``#### 17``. A model that is first trained on a mix of both mostly guesses. Reinforcement learning then teaches
it to show the working. Numbers, chat headers and the answer mark are one token each, so an example has about forty
tokens.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TERMS = 4
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unk|>")
WORDS = ("system\n", "user\n", "assistant\n", "#### ", "\n", " ", "+", "=", "?")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

Row = dict[str, Any]
Numbers = tuple[int, ...]


def all_questions() -> list[Numbers]:
    """All 10,000 questions, of four digits each."""
    return list(itertools.product(range(10), repeat=TERMS))


def question(numbers: Numbers) -> str:
    """The text of a question, such as ``3+5+2+9=?``."""
    return "+".join(map(str, numbers)) + "=?"


def worked_answer(numbers: Numbers) -> str:
    """The partial sums, then ``#### `` and their total."""
    totals = list(itertools.accumulate(numbers))
    steps = [f"{a}+{b}={c}" for a, b, c in zip(totals, numbers[1:], totals[1:], strict=False)]
    return f"{' '.join(steps)}\n#### {totals[-1]}"


def guessed_answer(numbers: Numbers, rng: random.Random) -> str:
    """A bare total that is off by at most 5; about one in eleven is right."""
    return f"#### {abs(sum(numbers) + rng.randint(-5, 5))}"


def prompt_row(numbers: Numbers) -> Row:
    """A row for reinforcement learning and evaluation."""
    return {"messages": [{"role": "user", "content": question(numbers)}], "label": str(sum(numbers))}


def conversation_row(numbers: Numbers, rng: random.Random, worked_share: float) -> Row:
    """A row for supervised training; the share ``worked_share`` of rows shows its working."""
    answer = worked_answer(numbers) if rng.random() < worked_share else guessed_answer(numbers, rng)
    row = prompt_row(numbers)
    return {**row, "messages": [*row["messages"], {"role": "assistant", "content": answer}]}


def pair_row(numbers: Numbers, rng: random.Random) -> Row:
    """A row for preference training: the working, and a wrong bare guess."""
    guesses = iter(lambda: guessed_answer(numbers, rng), None)
    wrong = next(guess for guess in guesses if guess != f"#### {sum(numbers)}")
    replies = {"chosen": worked_answer(numbers), "rejected": wrong}
    return {
        "messages": prompt_row(numbers)["messages"],
        **{name: [{"role": "assistant", "content": answer}] for name, answer in replies.items()},
    }


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each number from 0 to 99, chat word and operator. Decoding restores the task's
    text."""
    vocabulary = [*SPECIALS, *WORDS, *map(str, range(100))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<|unk|>"))
    pattern = Regex(r"(?:system|user|assistant)\n|#### |[0-9]{1,2}|[\s\S]")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIALS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|unk|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def model_config(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """``config.json`` of a Qwen2 of about 110,000 parameters."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }


def write_model_folder(folder: Path) -> None:
    """A ``--hf-checkpoint`` folder without weights. Tokenizer, config and generation config define a new model."""
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(model_config(tokenizer), indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.eos_token_id}) + "\n")
