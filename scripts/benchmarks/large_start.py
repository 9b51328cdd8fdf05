"""Measure the host memory of ranks that load a model, and how long training waits for a checkpoint.

    python scripts/benchmarks/large_start.py --ranks 4 --hidden 1024 --layers 12

The model is random, in bf16 files; the ranks are processes on this machine's CPU. Memory is the most that a process has
while it loads, minus what it had before, divided by the bytes of its part of the weights.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import AutoConfig, AutoModelForCausalLM

from slimelite.arguments import Args
from slimelite.base.version import add_version
from slimelite.models.checkpoints import part_file
from slimelite.training.loading import build_policy
from slimelite.training.parallel import local
from slimelite.training.trainer import Trainer


def peak_memory() -> int:
    """The most resident memory of this process since it was reset [bytes]."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def work(rank: int, ranks: int, folder: str, tiny: str) -> None:
    """The program of a rank. It loads the model, and rank 0 saves it twice."""
    torch.set_num_threads(1)
    batch = {"global_batch_size": 8, "num_steps_per_rollout": 1, "num_rollout": 1, "max_tokens_per_gpu": 128}
    args = Args(hf_checkpoint=tiny, device="cpu", lr=1e-3, save=folder, async_save=True, **batch)
    store = dist.FileStore(f"{folder}/meet", ranks)
    trainer = Trainer(args, rank=rank, world_size=ranks, store=store)
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")
    begin = time.monotonic()
    model = build_policy(args, trainer.world, f"{folder}/model", trainable=True)
    seconds, taken = time.monotonic() - begin, peak_memory() - before
    part = sum(local(parameter).nbytes for parameter in model.parameters())
    print(
        f"rank {rank} of {ranks}: {part / 1e6:.0f} MB of weights in {seconds:.1f} s; at most {taken / 1e6:.0f} MB "
        f"more, {taken / part:.2f} of its part",
        flush=True,
    )
    trainer.model = model
    trainer.world.all_reduce(torch.zeros(1))
    waits = list[tuple[float, float]]()
    for number in range(5):
        times = []
        for way in (trainer.save, trainer.begin_save):
            place = Path(folder) / f"{way.__name__}{number}"
            place.mkdir(exist_ok=True)
            trainer.world.all_reduce(torch.zeros(1))
            begin = time.monotonic()
            way(str(place), 0)
            times.append(time.monotonic() - begin)
        while not part_file(place, rank).is_file():
            time.sleep(0.01)
        waits.append((times[0], times[1]))
    whole, stall = (statistics.median(each) for each in zip(*waits, strict=True))
    if rank == 0:
        print(f"medians of 5: save {whole:.2f} s, --async-save {stall:.3f} s, {stall / whole:.1%}", flush=True)
    trainer.close()


def main() -> None:
    """Make the models and start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_version(parser)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    options = parser.parse_args()
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 16384, "tie_word_embeddings": False}
    with tempfile.TemporaryDirectory() as folder:
        for name, hidden, layers in (("model", options.hidden, options.layers), ("tiny", 64, 1)):
            sizes |= {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
            config = AutoConfig.for_model("qwen2", **sizes)
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(f"{folder}/{name}")
        mp.start_processes(work, (options.ranks, folder, f"{folder}/tiny"), nprocs=options.ranks, start_method="spawn")


if __name__ == "__main__":
    main()
