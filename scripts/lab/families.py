"""The quickstart's task with models of other families, for the table of docs/benchmarks.md.

python scripts/lab/families.py                        # four families, seeds 0, 1, 2
python scripts/lab/families.py lfm2 --seeds 0 3       # some; --table prints the table of the runs that are there

Each run is scripts/quickstart.sh (SFT from random weights, then GRPO) in one process, with the quickstart's tokenizer.
Runs are collected in runs/families/FAMILY/seed-N.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "lib")]

from arithmetic import build_tokenizer, model_config, write_model_folder  # noqa: E402

from slimelite.base.version import add_version  # noqa: E402
from slimelite.tracking.metrics_file import read_metrics  # noqa: E402

RUNS, DATA = ROOT / "runs" / "families", ROOT / "data" / "quickstart"
ROLLOUTS, EVALUATE = 20, 10
# Adam's learning rate of GRPO where the quickstart's 1e-3 is too high
RATES = {"qwen3_5_text": 3e-4}
# what the quickstart's Qwen2 has not; every kind of layer is there
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "num_hidden_layers": 4,  # three of linear attention, one of full
        "head_dim": 16,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "gemma3_text": {
        "num_hidden_layers": 3,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "qwen3_moe": {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "lfm2": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "conv", "full_attention"],
        "norm_eps": 1e-6,
        "block_auto_adjust_ff_dim": False,
    },
}


def write_data(family: str, folder: Path) -> None:
    """The quickstart's data, with a model of ``family`` that has no weights."""
    if not (DATA / "train.parquet").is_file():
        make = [sys.executable, "scripts/prepare_data.py", "quickstart", "--out", str(DATA)]
        subprocess.run(make, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    (folder / "model").mkdir(parents=True, exist_ok=True)
    for file in DATA.glob("*.parquet"):
        (folder / file.name).unlink(missing_ok=True)
        (folder / file.name).symlink_to(file)
    write_model_folder(folder / "model")
    config = {**model_config(build_tokenizer()), "model_type": family, **FAMILIES[family]}
    del config["architectures"]
    (folder / "model" / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def run(family: str, seed: int) -> None:
    """SFT and GRPO of one seed."""
    out = RUNS / family / f"seed-{seed}"
    write_data(family, RUNS / family / "data")
    environment = {**os.environ, "SEED": str(seed), "DATA": str(RUNS / family / "data"), "OUT": str(out)}
    flags = f"--launcher local --rollout-backend embedded --num-rollout {ROLLOUTS} --eval-interval {EVALUATE}"
    flags += f" --lr {RATES[family]}" if family in RATES else ""
    subprocess.run(["bash", "scripts/quickstart.sh", *flags.split()], cwd=ROOT, env=environment, check=True)


def table(families: list[str]) -> None:
    """Print the table of the finished runs."""
    print(
        "| family | seed | reward of the first rollout | of the last | rise | held out: before | after | CPU-seconds |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for family in families:
        for out in sorted((RUNS / family).glob("seed-*"), key=lambda path: int(path.name.split("-")[1])):
            metrics = list(read_metrics(out / "grpo")) if (out / "grpo" / "metrics.jsonl").is_file() else []
            rewards = [line["rollout/raw_reward"] for line in metrics if "rollout/raw_reward" in line]
            if len(rewards) < ROLLOUTS:
                continue
            held_out = [line["eval/heldout"] for line in metrics if "eval/heldout" in line]
            seconds = sum(
                [line["perf/cpu_seconds"] for line in read_metrics(out / part) if "perf/cpu_seconds" in line][-1]
                for part in ("sft", "grpo")
            )
            figures = (rewards[0], rewards[-1], rewards[-1] - rewards[0], held_out[0], held_out[-1])
            cells = " | ".join(f"{figure:.3f}" for figure in figures)
            print(f"| {family} | {out.name.split('-')[1]} | {cells} | {seconds:.0f} |")


def main() -> None:
    """The program of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_version(parser)
    parser.add_argument("family", nargs="*", choices=[[], *FAMILIES], help="default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--table", action="store_true", help="run nothing")
    args = parser.parse_args()
    families = args.family or list(FAMILIES)
    for seed in [] if args.table else args.seeds:
        for family in families:
            run(family, seed)
    table(families)


if __name__ == "__main__":
    main()
