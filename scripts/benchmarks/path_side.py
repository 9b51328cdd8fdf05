"""The path of samples from engine to trainer, without engine and trainer: CPU-seconds and memory, as lines to --marks.

    python scripts/benchmarks/path_side.py plan --samples 65536 --marks F
    python scripts/benchmarks/path_side.py carry --samples 2048 --tokens 512 --model M --data D --marks F

*plan* splits a rollout into steps and packs its rows into micro-batches. *carry* sends samples through the rollout
worker with an engine that answers at once. Then it sends them through pickle 5, as Ray does, and into every
micro-batch. The peak of memory above the start, of the manager and of all parts, is shown next to the bytes of the
table's own columns. Data that a run has in two processes, such as the table and the trainer's columns, is in one
process here.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pickle
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def plan(given: argparse.Namespace) -> dict[str, float]:
    """Steps of all samples, and micro-batches on one rank, for short and for long rows. A prompt has eight samples."""
    from slimelite.samples.table import SampleTable
    from slimelite.training.planning import PackingLimits, deal, split_steps

    rng, found = np.random.default_rng(0), dict[str, float]()
    rows = np.arange(given.samples)
    for name, low, high in (("short", 20, 60), ("long", 100, 4000)):
        lengths = rng.integers(low, high, given.samples)
        prompts = np.repeat(rng.integers(low // 2, low, given.samples // 8 + 1), 8)[: given.samples]
        groups = [rng.integers(6, 110, size) for size in prompts[::8]]
        table = SampleTable(
            sample_id=rows,
            unit_id=rows,
            prompt_offsets=np.concatenate([[0], np.cumsum(prompts)]),
            response_offsets=np.concatenate([[0], np.cumsum(lengths - prompts)]),
            prompt_tokens=np.concatenate([groups[row // 8] for row in rows]).astype(np.int32),
            response_tokens=rng.integers(6, 110, int((lengths - prompts).sum()), dtype=np.int32),
        )
        start = time.process_time()
        for step in split_steps(rows, rows, given.samples):
            deal(table, step, 1, PackingLimits(16384), shares=True)
        found[f"plan_{name}_cpu"] = time.process_time() - start
    return found


def carry(given: argparse.Namespace) -> dict[str, float]:
    """The manager, the wire and the micro-batches."""

    from slimelite.arguments import parse_args
    from slimelite.data.tokenizer import load_tokenizer
    from slimelite.engines.protocol import EngineInfo, GenerateRequest, GenerateResult
    from slimelite.rollout.manager import RolloutManager
    from slimelite.samples.table import SampleTable
    from slimelite.training.batch import MicroBatch
    from slimelite.training.columns import TokenColumns

    rng = np.random.default_rng(0)
    # arrays, as the embedded engine has them; `packed` copies them, for each answer has its own
    answer: dict[str, Any] = {
        "output_ids": rng.integers(6, 110, given.tokens, np.int32),
        "log_probs": -rng.random(given.tokens, np.float32),
        "weight_versions": np.zeros(given.tokens, np.int32),
    }

    class Ready:
        """An engine that answers at once."""

        async def info(self) -> EngineInfo:
            return EngineInfo("ready", 0, 1 << 20, 1 << 12, seeds=True)

        async def generate(self, asked: Sequence[GenerateRequest]) -> list[GenerateResult]:
            await asyncio.sleep(0)
            return [GenerateResult(r.request_id, **answer, finish_reason="length").packed() for r in asked]

        async def abort(self, _: Any = None) -> None:
            return

        async def close(self) -> None:
            return

    groups = given.samples // 8
    flags = f"--hf-checkpoint {given.model} --prompt-data {given.data} --input-key messages --label-key label "
    flags += f"--apply-chat-template --rm-type random --num-rollout 2 --rollout-batch-size {groups} "
    flags += f"--n-samples-per-prompt 8 --rollout-max-response-len {given.tokens} --global-batch-size {given.samples} "
    flags += f"--use-dynamic-batch-size --max-tokens-per-gpu 16384 --launcher ray --run-dir {given.marks.parent}/unused"
    engines: list[Any] = [Ready()]
    args = parse_args(flags.split())
    manager = RolloutManager(args, engines, load_tokenizer(args.tokenizer))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    table: SampleTable = manager.generate(0).table
    managed, at_manager = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    buffers: list[Any] = []
    head = pickle.dumps(table.without_text(), 5, buffer_callback=buffers.append)
    sent = pickle.loads(head, buffers=[bytes(buffer) for buffer in buffers])
    wired = time.process_time()
    columns = TokenColumns.from_table(sent)
    for row in range(0, len(sent), 4):
        MicroBatch(columns, np.arange(row, min(row + 4, len(sent))), shares=True)
    batched = time.process_time()
    at_end = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    parts = [column for column in vars(table).values() if column is not None]
    own = sum(c.nbytes if isinstance(c, np.ndarray) else sum(map(len, filter(None, c))) for c in parts)
    manager.close()
    return {
        "manager_cpu": managed - start,
        "wire_cpu": wired - managed,
        "micro_batches_cpu": batched - wired,
        "carry_cpu": batched - start,
        "us_per_token": 1e6 * (batched - start) / (given.samples * given.tokens),
        "manager_over_table": 1024 * (at_manager - before) / own,
        "peak_over_table": 1024 * (at_end - before) / own,
    }


def main() -> None:
    """Write one line for each round. *carry* has one round, because memory has one peak."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["plan", "carry"])
    parser.add_argument("--marks", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--model")
    parser.add_argument("--data")
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    for _ in range(given.rounds):
        line = plan(given) if given.part == "plan" else carry(given)
        with given.marks.open("a") as file:
            file.write(json.dumps({"kind": "round", **line}) + "\n")


if __name__ == "__main__":
    main()
