"""Useful operations of a training step, compared with the best rate of the model's own matrix products, in turn in one
process.

    python scripts/benchmarks/trainer_side.py --model M --marks F --groups 2 --prompt 512 --response 64

A step is `Trainer.train` on groups of 8 samples: log-probs, gradient, optimizer. Useful operations count a group's
prompt once, and recomputation not at all. They are 3 forward passes (forward, and backward twice): of the matrices over
every distinct token, of the head over the response tokens, and of attention over every pair that attends. The products
are x @ W.T for every shape of weights, with ``--rows`` rows. The rate of the best shape is the limit.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, PretrainedConfig

from slimelite.arguments import Args
from slimelite.samples.sample import Sample
from slimelite.samples.table import SampleTable
from slimelite.training.trainer import Trainer


def make_table(groups: int, size: int, prompt: int, response: int, vocab: int) -> SampleTable:
    """Random tokens. Rewards differ within every group."""
    rng = np.random.default_rng(0)
    samples = []
    for g in range(groups):
        tokens = rng.integers(6, vocab, prompt).tolist()
        group = [Sample(group_index=g, index=g * size + i, tokens=list(tokens), reward=float(i)) for i in range(size)]
        for sample in group:
            sample.append_response_tokens(rng.integers(6, vocab, response).tolist(), log_probs=[-1.0] * response)
        samples.append(group)
    table = SampleTable.from_samples(samples)
    table.advantage = rng.normal(size=len(table))
    return table


def useful_operations(config: PretrainedConfig, groups: int, size: int, prompt: int, response: int) -> float:
    """Floating-point operations of a step, see the module docstring (as in arXiv:2001.08361, section 2.1; prompts count
    once)."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = head_dim * config.num_attention_heads
    kept = head_dim * config.num_key_value_heads
    layer = config.hidden_size * (2 * width + 2 * kept + 3 * config.intermediate_size)
    tokens = prompt + size * response
    pairs = prompt * (prompt + 1) / 2 + size * (prompt * response + response * (response + 1) / 2)
    forward = 2.0 * layer * config.num_hidden_layers * tokens
    forward += 2.0 * config.hidden_size * config.vocab_size * size * response
    forward += 4.0 * width * config.num_hidden_layers * pairs
    return 3.0 * groups * forward


def cpu_seconds(work: Callable[[], object]) -> float:
    """Process time of one call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def repeat(x: torch.Tensor, weight: torch.Tensor, times: int) -> None:
    """Compute a product ``times`` times."""
    for _ in range(times):
        torch.nn.functional.linear(x, weight)


def best_rate(shapes: set[tuple[int, int]], rows: int) -> float:
    """Operations per CPU-second of the fastest product."""
    best = 0.0
    for outputs, inputs in shapes:
        weight, x = torch.randn(outputs, inputs), torch.randn(rows, inputs)
        operations = 2.0 * rows * outputs * inputs
        repeat(x, weight, 1)
        repeats = max(1, int(2e10 / operations))
        spent = cpu_seconds(partial(repeat, x, weight, repeats))
        best = max(best, repeats * operations / spent)
    return best


def main() -> None:
    """Measure both in every round, after a warm-up round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--marks", type=Path, required=True)
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--size", type=int, default=8, help="samples of a group")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--response", type=int, default=64)
    parser.add_argument("--rows", type=int, default=1024, help="rows of the products")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    config = AutoConfig.from_pretrained(given.model)
    sizes = (given.groups, given.size, given.prompt, given.response)
    table = make_table(*sizes, config.vocab_size)
    args = Args(
        hf_checkpoint=given.model,
        device="cpu",
        global_batch_size=len(table),
        num_rollout=100,
        num_steps_per_rollout=1,
        lr=1e-9,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=16384,
    )
    trainer = Trainer(args)
    shapes = {(p.shape[0], p.shape[1]) for p in trainer.model.parameters() if p.dim() == 2}
    work = useful_operations(config, *sizes)
    for turn in range(given.rounds + 1):
        spent = cpu_seconds(partial(trainer.train, turn, table))
        limit_rate = best_rate(shapes, given.rows)
        line = {"kind": "round", "step_cpu": spent, "gflops": work / spent / 1e9, "gemm_gflops": limit_rate / 1e9}
        with given.marks.open("a") as file:
            file.write(json.dumps(line) + "\n")
    trainer.close()


if __name__ == "__main__":
    main()
