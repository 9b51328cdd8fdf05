"""Tokens per second of processor time of pretraining here and of a plain PyTorch loop, in turns, on the same sequences.

    python scripts/lab/plain_loop_speed.py --texts data/texts/train.jsonl --tokenizer data/tokenizer --hidden-size 128

The plain loop is one that a user would write by hand. Rows are padded to one length. The model of transformers uses its
fused attention, which continues across documents. Then come cross-entropy of all logits, clipping and AdamW. Both run
with one thread, in fp32.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from slimelite.arguments import Args
from slimelite.base.version import add_version
from slimelite.data.documents import Documents
from slimelite.samples.table import SampleTable
from slimelite.training.trainer import Trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_version(parser)
    add = parser.add_argument
    add("--texts", required=True, help="jsonl with a column text")
    add("--tokenizer", required=True)
    add("--hidden-size", type=int, default=128)
    add("--layers", type=int, default=3)
    add("--seq-length", type=int, default=512)
    add("--batch", type=int, default=4, help="sequences of an optimizer step")
    add("--steps", type=int, default=8, help="of a turn")
    add("--turns", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        config = AutoConfig.for_model(
            "qwen3",
            vocab_size=len(AutoTokenizer.from_pretrained(given.tokenizer)),
            hidden_size=given.hidden_size,
            intermediate_size=3 * given.hidden_size,
            num_hidden_layers=given.layers,
            num_attention_heads=given.hidden_size // 32,
            num_key_value_heads=given.hidden_size // 32,
            head_dim=32,
            tie_word_embeddings=True,
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        args = Args(
            hf_checkpoint=folder,
            device="cpu",
            launcher="local",
            loss_type="pretrain_loss",
            prompt_data=[given.texts],
            token_cache=str(Path(folder) / "tokens"),
            tokenizer_workers=1,
            seq_length=given.seq_length,
            global_batch_size=given.batch,
            num_steps_per_rollout=given.steps,
            num_rollout=given.turns + 1,
            lr=1e-3,
            use_dynamic_batch_size=True,
            max_tokens_per_gpu=given.batch * given.seq_length,
        )
        source, trainer = Documents(args, given.tokenizer), Trainer(args)
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0, fused=True)
        rates: dict[str, list[float]] = {"here": [], "plain": []}
        for turn in range(given.turns + 1):
            table, _ = source.take(given.batch * given.steps)
            size = int(table.total_lengths.sum())
            rates["here"].append(size / seconds(lambda turn=turn, table=table: trainer.train(turn, table)))
            rates["plain"].append(size / seconds(lambda table=table: plain(model, optimizer, table, given.batch)))
        # the first turn warms up
        print(json.dumps({name: round(median(several[1:])) for name, several in rates.items()}))


def seconds(work: Callable[[], object]) -> float:
    """Processor seconds of ``work``."""
    began = time.process_time()
    work()
    return time.process_time() - began


def plain(model: PreTrainedModel, optimizer: torch.optim.Optimizer, table: SampleTable, batch: int) -> None:
    """An optimizer step for every ``batch`` rows."""
    rows = [
        np.concatenate([table.row_slice("prompt_tokens", row), table.row_slice("response_tokens", row)])
        for row in range(len(table))
    ]
    for first in range(0, len(rows), batch):
        some = [torch.from_numpy(row.astype(np.int64)) for row in rows[first : first + batch]]
        ids = torch.nn.utils.rnn.pad_sequence(some, batch_first=True)
        targets = torch.nn.utils.rnn.pad_sequence([row[1:] for row in some], batch_first=True, padding_value=-100)
        logits = model(ids[:, :-1], use_cache=False).logits
        cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
