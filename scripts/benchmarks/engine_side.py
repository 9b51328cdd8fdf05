"""The embedded engine compared with transformers' generate() and generate_batch(), in turn in one process. It writes
lines to --marks.

    python scripts/benchmarks/engine_side.py --model M --marks F 1x40x32 64x40x32x1 64x40x32x8

A case is sequences x prompt tokens x new tokens x how many sequences share a prompt (default 1). Figures are
CPU-seconds of this process with prefill: random tokens, no end token, sampled at temperature 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from slimelite.engines.embedded import EmbeddedEngine
from slimelite.engines.protocol import GenerateRequest, SamplingParams


def cpu_seconds(work: Callable[[], object]) -> float:
    """Process time of one call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def requests(case: tuple[int, int, int, int], vocab: int, turn: int) -> list[GenerateRequest]:
    """The requests of a case, with prompts that no earlier turn had."""
    count, prompt, new, share = case
    rng = np.random.default_rng([turn, *case])
    found: list[GenerateRequest] = []
    for index in range(count):
        if index % share == 0:
            ids = tuple(rng.integers(6, vocab, prompt).tolist())
        key = f"{turn}-{case}-{index // share}"
        params = SamplingParams(new, ignore_eos=True, seed=index)
        found.append(GenerateRequest(f"{turn}-{case}-{index}", ids, params, prefix_key=key))
    return found


def run_engine(engine: EmbeddedEngine, asked: list[GenerateRequest]) -> None:
    """All requests in one call."""
    asyncio.run(engine.generate(asked))


def main() -> None:
    """Measure every case in every round, after a warm-up round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--model", required=True)
    parser.add_argument("--marks", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", action="store_true", help="generate_batch too")
    given = parser.parse_args()
    torch.set_num_threads(1)
    cases = {}
    for text in given.cases:
        count, prompt, new, *share = map(int, text.split("x"))
        cases[text] = (count, prompt, new, share[0] if share else 1)
    model: Any = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig(pad_token_id=0)  # else generate() takes the end token from there
    vocab = model.config.vocab_size
    engines = {
        text: EmbeddedEngine(given.model, max_running_requests=case[0], max_context_len=case[1] + case[2])
        for text, case in cases.items()
    }
    for turn in range(given.rounds + 1):
        line: dict[str, object] = {"kind": "round"}
        for text, case in cases.items():
            asked = requests(case, vocab, turn)
            ids = torch.tensor([request.input_ids for request in asked])
            options: dict[str, Any] = {"max_new_tokens": case[2], "do_sample": True, "top_k": 0, "top_p": 1.0}
            plain = GenerationConfig(**options, eos_token_id=None, pad_token_id=0)
            line[f"engine {text}"] = cpu_seconds(partial(run_engine, engines[text], asked))
            padded = {"attention_mask": torch.ones_like(ids), "generation_config": plain}
            line[f"generate {text}"] = cpu_seconds(partial(model.generate, ids, **padded))
            if given.batch:
                paged = GenerationConfig(**options, eos_token_id=-1, pad_token_id=0, max_batch_tokens=4096)
                quiet = {"generation_config": paged, "progress_bar": False, "warmup": False}
                line[f"generate_batch {text}"] = cpu_seconds(partial(model.generate_batch, ids.tolist(), **quiet))
        with given.marks.open("a") as file:
            file.write(json.dumps(line) + "\n")
    for engine in engines.values():
        asyncio.run(engine.close())


if __name__ == "__main__":
    main()
