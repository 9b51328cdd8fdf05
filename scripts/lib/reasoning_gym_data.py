"""A tiny model for reasoning-gym tasks: its tokenizer, its shape, and answers for a first training.

    python scripts/lib/reasoning_gym_data.py 'chain_sum?size=4000&levels=2&prompt=none' --out data/chain_sum

The texts that all questions of a task begin and end with are one token each. Every other character is a token too. The
share ``--right`` of the answers is right. The others are answers to other questions. Reinforcement learning should find
out which are right.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import arithmetic
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slimelite.base.version import add_version
from slimelite.contrib.reasoning_gym import rows

HEADERS = ("system\n", "user\n", "assistant\n")


def build_tokenizer(texts: list[str], phrases: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each phrase, chat header and character of ``texts``."""
    words = [*HEADERS, *phrases]
    vocabulary = dict.fromkeys([*arithmetic.SPECIALS, *words, *sorted({c for text in texts for c in text} | {"\n"})])
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<|unk|>"))
    literal = "|".join(
        "".join(c if c.isalnum() else f"[{c}]" if c not in "\\^[]" else f"\\{c}" for c in w) for w in words
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{literal}|[\\s\\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(arithmetic.SPECIALS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|unk|>",
        chat_template=arithmetic.CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _begin(texts: list[str]) -> str:
    """The common beginning of all texts."""
    first, last = min(texts), max(texts)
    same = (n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    return first[: next(same, min(len(first), len(last)))]


def main() -> None:
    """The program of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_version(parser)
    parser.add_argument("spec", help="the text after reasoning-gym: in --environment, with prompt=none")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--right", type=float, default=0.35)
    options = parser.parse_args()
    found = list(rows(options.spec))
    chance = random.Random(0)
    by_task: dict[str, list[dict[str, Any]]] = {}
    for row in found:
        by_task.setdefault(row["metadata"]["task"], []).append(row)
    phrases = []
    for part in by_task.values():
        questions = [row["input"][-1]["content"] for row in part]
        ends = [text[::-1] for text in questions]
        phrases += [_begin(questions), _begin(ends)[::-1]]
    sft = []
    for row in found:
        other = chance.choice(by_task[row["metadata"]["task"]])["label"]
        answer = row["label"] if chance.random() < options.right else other
        sft.append({"messages": [*row["input"], {"role": "assistant", "content": answer}]})
    texts = [message["content"] for row in sft for message in row["messages"]]
    tokenizer = build_tokenizer(texts, [phrase for phrase in phrases if len(phrase) > 1])
    model = options.out / "model"
    tokenizer.save_pretrained(model)
    (model / "config.json").write_text(json.dumps(arithmetic.model_config(tokenizer), indent=2) + "\n")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.eos_token_id}) + "\n")
    pq.write_table(pa.Table.from_pylist(sft), options.out / "sft.parquet")
    longest = max(len(tokenizer.apply_chat_template(row["messages"], tokenize=True)["input_ids"]) for row in sft)
    print(f"{len(sft)} answers, {len(tokenizer)} tokens, the longest conversation has {longest}")


if __name__ == "__main__":
    main()
