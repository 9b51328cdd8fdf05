"""Makes the material of the benchmarks: models of two shapes, prompts of given lengths, the quickstart's task.

    python scripts/benchmarks/materials.py FOLDER     # all of it but the quickstart's SFT model, which `run.py` trains

Speed does not depend on the values of weights, so they are random. The tokenizer has one token for each word, so every
length is exact. Random weights end a response with a probability of one over the vocabulary. So responses of SmolLM2's
shape have the requested length on every side.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

from slimelite.base.version import add_version

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "user", "assistant", "system"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {{ m['content'] }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
# tokens that the template adds to a prompt of one message
AROUND = 5
SHAPES: dict[str, dict[str, Any]] = {
    "smollm2": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "model_type": "qwen2",
        "vocab_size": 168,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
}


def model(folder: Path, shape: str) -> Path:
    """A Hugging Face folder with random fp32 weights of a shape of `SHAPES`, and its tokenizer."""
    if (folder / "model.safetensors").is_file():
        return folder
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = AutoConfig.for_model(**SHAPES[shape], eos_token_id=2, pad_token_id=0, bos_token_id=None)
    words = SPECIAL + [f"w{i}" for i in range(config.vocab_size - len(SPECIAL))]
    plain = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=SPECIAL[0]))
    plain.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<|im_end|>", pad_token=SPECIAL[0])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def rows(path: Path, count: int, prompt: tuple[int, int], reply: tuple[int, int], vocabulary: int) -> Path:
    """A parquet file of ``count`` conversations. ``prompt`` and ``reply``: the least and the most tokens of each.

    Columns: ``messages`` (the prompt), ``label``, ``conversation`` (with the reply), ``chosen`` and ``rejected`` (two
    replies). A prompt's length includes the tokens of the chat template.
    """
    if path.is_file():
        return path
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = random.Random(0)

    def words(low: int, high: int) -> str:
        return " ".join(f"w{rng.randrange(vocabulary - len(SPECIAL))}" for _ in range(rng.randint(low, high)))

    table = []
    for index in range(count):
        asked = [{"role": "user", "content": words(prompt[0] - AROUND, prompt[1] - AROUND)}]
        replies = [[{"role": "assistant", "content": words(*reply)}] for _ in range(2)]
        row = {"messages": asked, "label": str(index), "conversation": asked + replies[0]}
        table.append({**row, "chosen": replies[0], "rejected": replies[1]})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(table), path)
    return path


def main() -> None:
    """Write models and prompts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_version(parser)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    for shape, config in SHAPES.items():
        vocabulary = config["vocab_size"]
        print(model(folder / shape, shape))
        # GSM8K's questions have 40 to 220 tokens with a template around them
        for name, prompt in (("questions", (40, 220)), ("long", (512, 512))):
            print(rows(folder / f"{shape}-{name}.parquet", 256, prompt, (60, 200), vocabulary))


if __name__ == "__main__":
    main()
