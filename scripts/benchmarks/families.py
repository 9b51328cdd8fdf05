"""Model families: the embedded engine compared with generate(), and packed training compared with one sequence for each
forward pass.

    python scripts/benchmarks/families.py engine qwen3_moe qwen3_5_text gemma3_text lfm2
    python scripts/benchmarks/families.py trainer qwen3_5_text lfm2 mamba2

The models are random, in fp32, with hidden size 256. One thread runs both sides in turn in one process, after a warm-up
round. Figures are ratios of CPU-seconds, the median of the rounds. ``engine``: rows x prompt tokens x new tokens,
without an end token. ``trainer``: a step on eight answers of 64 tokens to a prompt of 512.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from trainer_side import cpu_seconds, make_table
from transformers import AutoConfig, AutoModelForCausalLM

from slimelite.arguments import Args
from slimelite.base.version import add_version
from slimelite.training import loading
from slimelite.training.packing import Packing
from slimelite.training.trainer import Trainer

HERE = Path(__file__).parent
CASES = ("16x64x48", "64x64x32")
SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "eos_token_id": 1,
    "bos_token_id": None,
    "tie_word_embeddings": True,
}
MAMBA_2: dict[str, Any] = {"mamba_n_heads": 16, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 32, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128},
    "qwen3_5_text": {
        "head_dim": 32,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
    "gemma3_text": {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 64},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "mamba2": {"state_size": 32, "num_heads": 16, "head_dim": 32, "n_groups": 1, "chunk_size": 64},
    "bamba": MAMBA_2 | {"attn_layer_indices": [1, 3]},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
    },
    "deepseek_v3": {
        "num_key_value_heads": 8,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 128,
        "first_k_dense_replace": 1,
    },
    "olmoe": {"num_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 128},
    "recurrent_gemma": {
        "num_hidden_layers": 6,
        "lru_width": 256,
        "head_dim": 32,
        "attention_window_size": 64,
        "num_key_value_heads": 1,
    },
    "xlstm": {"num_heads": 4},
    "openai-gpt": {"n_embd": 256, "n_layer": 4, "n_head": 8, "n_positions": 2048},
}


def save(family: str, folder: Path) -> None:
    """A random model."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(SIZES | FAMILIES[family]))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def engine(family: str, folder: Path, rounds: int) -> None:
    """generate() divided by the engine, in the cases of `CASES`."""
    marks = folder / "marks.jsonl"
    flags = ["--model", str(folder), "--marks", str(marks), "--rounds", str(rounds)]
    subprocess.run(
        [sys.executable, str(HERE / "engine_side.py"), *CASES, *flags], check=True, stderr=subprocess.DEVNULL
    )
    lines = [json.loads(line) for line in marks.read_text().splitlines()][1:]
    ratios = [[line[f"generate {case}"] / line[f"engine {case}"] for line in lines] for case in CASES]
    print(f"| {family} | {' | '.join(summary(case) for case in ratios)} |", flush=True)


def trainer(family: str, folder: Path, rounds: int) -> None:
    """One sequence for each forward pass, divided by packed sequences that share their prompt."""
    table = make_table(1, 8, 512, 64, SIZES["vocab_size"])
    flags: dict[str, Any] = {"hf_checkpoint": str(folder), "device": "cpu", "global_batch_size": 8, "num_rollout": 100}
    flags |= {"num_steps_per_rollout": 1, "lr": 1e-9, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 16384}
    packed = Trainer(Args(**flags))
    with mock.patch.object(loading, "may_pack", return_value=Packing.ALONE):
        alone = Trainer(Args(**flags))
    assert packed.model.shares
    assert not alone.model.packed
    ratios = []
    for turn in range(rounds + 1):
        one, other = (cpu_seconds(partial(side.train, turn, table)) for side in (packed, alone))
        ratios.append(other / one)
    print(f"| {family} | {summary(ratios[1:])} |", flush=True)


def summary(ratios: list[float]) -> str:
    """The median, and the range of the rounds."""
    return f"{median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"


def main() -> None:
    """The program of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_version(parser)
    parser.add_argument("side", choices=["engine", "trainer"])
    parser.add_argument("family", nargs="+", choices=FAMILIES)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for family in args.family:
        with tempfile.TemporaryDirectory() as folder:
            save(family, Path(folder))
            (engine if args.side == "engine" else trainer)(family, Path(folder), args.rounds)


if __name__ == "__main__":
    main()
