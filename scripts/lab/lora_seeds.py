"""The quickstart with adapters of rank 16 compared with all weights: the ten-seed table of docs/lora.md.

    python scripts/lab/lora_seeds.py 0 1 2 (none: ten seeds)

Runs are kept in runs/lora-seeds/. A seed whose run is there is not run again. For each seed both kinds start from the
same SFT model. Each is one process (``--launcher local``), so its peak of resident memory is the run's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from slimelite.base.version import answer_version

ROOT = Path(__file__).resolve().parents[2]
KINDS = {"full": [], "lora": ["--lora-rank", "16", "--lora-alpha", "32"]}
COLUMNS = ("eval/heldout", "CPU-s", "peak GB", "bytes of a sync")


def run(folder: Path, seed: int, model: str, flags: list[str]) -> None:
    """Run the quickstart, from ``model`` or with its SFT. The kernel's figures of its processes go to usage.json."""
    env = os.environ | {"SEED": str(seed), "OUT": str(folder), "MODEL": model}
    process = subprocess.Popen(["bash", "scripts/quickstart.sh", *flags], cwd=ROOT, env=env)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{folder} ended with status {status}")
    spent = {"CPU-s": usage.ru_utime + usage.ru_stime, "peak GB": usage.ru_maxrss * 1024 / 1e9}
    (folder / "usage.json").write_text(json.dumps(spent))


def row(folder: Path) -> list[float]:
    """The figures of ``COLUMNS``: the last evaluation and the last weight sync of a run."""
    lines = [json.loads(line) for line in (folder / "grpo" / "metrics.jsonl").read_text().splitlines()]
    last = {name: value for line in lines for name, value in line.items()}
    usage = json.loads((folder / "usage.json").read_text())
    return [last["eval/heldout"], usage["CPU-s"], usage["peak GB"], last["perf/update_weights_bytes"]]


def main() -> None:
    """Run the missing seeds, then print the table."""
    seeds = [int(word) for word in sys.argv[1:]] or list(range(10))
    print("| seed | " + " | ".join(f"{column}, {kind}" for kind in KINDS for column in COLUMNS) + " |")
    print("|---:" * (1 + len(KINDS) * len(COLUMNS)) + "|")
    for seed in seeds:
        place = ROOT / "runs" / "lora-seeds" / f"seed-{seed}"
        model = place / "start" / "sft-model"
        if not model.exists():
            run(place / "start", seed, "", ["--launcher", "local", "--num-rollout", "1"])
        for kind, flags in KINDS.items():
            if not (place / kind / "usage.json").exists():
                run(place / kind, seed, str(model), ["--launcher", "local", *flags])
        cells = [f"{value:.4g}" for kind in KINDS for value in row(place / kind)]
        print(f"| {seed} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    answer_version()
    main()
