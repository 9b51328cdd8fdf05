"""How fast this trainer trains on a CPU, beside padded batches with full logits (as TRL computes them).

    OMP_NUM_THREADS=1 python scripts/benchmark_training.py                  # SmolLM2-135M's shape, random weights
    OMP_NUM_THREADS=1 python scripts/benchmark_training.py --shape tiny     # the quickstart's model

Both sides run forward and backward of the policy gradient on the same 16 samples (256 for ``tiny``) in turns, in one
process, so that a busy machine slows both alike. Seconds are CPU seconds of this process; tokens are real tokens.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM

from slimelite.arguments import Args
from slimelite.sample import Sample
from slimelite.table import SampleTable
from slimelite.training.planning import Step
from slimelite.training.sums import MetricSums
from slimelite.training.trainer import Trainer

SHAPES = {
    "smollm2": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "model_type": "qwen2",
        "vocab_size": 130,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
}
# groups, samples in a group, prompt tokens, shortest and longest response, tokens of a micro-batch
BATCHES = {"smollm2": (4, 4, 40, 10, 64, 100_000), "tiny": (32, 8, 10, 5, 44, 4096)}


def make_table(shape: str) -> SampleTable:
    """Random tokens of the shape's lengths."""
    groups, size, prompt, shortest, longest, _ = BATCHES[shape]
    vocabulary = int(str(SHAPES[shape]["vocab_size"]))
    rng = np.random.default_rng(0)
    samples = []
    for g in range(groups):
        tokens = rng.integers(0, vocabulary, prompt).tolist()
        samples.append([Sample(group_index=g, index=g * size + i, tokens=tokens, reward=0.0) for i in range(size)])
        for sample in samples[-1]:
            n = int(rng.integers(shortest, longest + 1))
            sample.append_response_tokens(rng.integers(0, vocabulary, n).tolist(), log_probs=[-1.0] * n)
    table = SampleTable.from_samples(samples)
    table.advantage = rng.normal(size=len(table))
    return table


def packed(trainer: Trainer, table: SampleTable) -> Callable[[], None]:
    """Forward and backward of one optimizer step of this trainer."""
    rows = np.arange(len(table))
    columns = trainer._columns(table, [rows])
    step = Step(rows, trainer._deal(table, rows))

    def run() -> None:
        trainer.gradient(table, columns, step, MetricSums(trainer.world))
        trainer.model.zero_grad()

    return run


def padded(folder: str, table: SampleTable) -> Callable[[], None]:
    """The same gradient from one padded batch and its full logits."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    rows = range(len(table))
    pieces = [(table.row_slice("prompt_tokens", r), table.row_slice("response_tokens", r)) for r in rows]
    ids = pad_sequence([torch.tensor(np.concatenate(p), dtype=torch.int64) for p in pieces], batch_first=True)
    attended = pad_sequence([torch.ones(len(p) + len(q), dtype=torch.int64) for p, q in pieces], batch_first=True)
    trained = pad_sequence([torch.tensor([0.0] * len(p) + [1.0] * len(q)) for p, q in pieces], batch_first=True)
    advantages = torch.tensor(table.advantage, dtype=torch.float32)[:, None]
    weights = trained / trained.sum(1, keepdim=True) / len(table)

    def run() -> None:
        logits = model(ids, attention_mask=attended, use_cache=False).logits[:, :-1]
        log_probs = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[:, :, 0]
        ratio = (log_probs - log_probs.detach()).exp()
        (-(ratio * advantages) * weights[:, 1:]).sum().backward()
        model.zero_grad()

    return run


def main() -> None:
    """Measure both in turns and print one line each, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds, after one to warm up")
    options = parser.parse_args()
    table = make_table(options.shape)
    tokens = int(table.total_lengths.sum())
    with tempfile.TemporaryDirectory() as folder:
        config = dict(SHAPES[options.shape])
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).save_pretrained(folder)
        limit = BATCHES[options.shape][-1]
        args = Args(hf_checkpoint=folder, device="cpu", use_dynamic_batch_size=True, max_tokens_per_gpu=limit)
        trainer = Trainer(args)
        runs = {"slimelite: packed, chunked head": packed(trainer, table), "padded, full logits": padded(folder, table)}
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(options.rounds + 1):
            for name, run in runs.items():
                start = time.process_time()
                run()
                seconds[name].append(time.process_time() - start)
        trainer.close()
    best = {name: min(times[1:]) for name, times in seconds.items()}
    print(f"{options.shape}: {len(table)} samples, {tokens} tokens, {torch.get_num_threads()} thread(s)")
    for name, spent in best.items():
        print(f"{name:34s} {spent:8.3f} cpu-s {tokens / spent:10.0f} tokens/cpu-s")
    ours, theirs = best.values()
    print(f"ratio {theirs / ours:.2f}")
    print(json.dumps({"shape": options.shape, "tokens": tokens, "cpu_seconds": best, "ratio": theirs / ours}))


if __name__ == "__main__":
    main()
