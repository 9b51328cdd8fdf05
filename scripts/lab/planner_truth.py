"""Predictions compared with measurements, as in docs/planner.md: python scripts/lab/planner_truth.py memory | host

``memory``: three models with four settings. Their trainers run on one of eight simulated GPUs (tests/gpu_sim; its guard
needs a C++ compiler). ``host``: three smaller models on this machine's CPU. It shows the peak of resident memory, and
the CPU-seconds of a step after a calibration of two seconds. A model's name and a setting's name may follow.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "gpu_sim"))

import fake_cuda

from slimelite.arguments import Args
from slimelite.base.version import answer_version
from slimelite.plan.memory import Load, Shapes, total
from slimelite.plan.time import Work, measured_cpu, train
from slimelite.samples.sample import Sample
from slimelite.samples.table import SampleTable

ROOT = Path(__file__).resolve().parents[2]
RANK, ROWS, PROMPT, RESPONSE = 16, 6, 512, 1024
HERE = 128  # tokens of a prompt and of a response on this machine's CPU
SETTINGS: dict[str, dict[str, Any]] = {
    "full": {},
    "checkpointing": {"gradient_checkpointing": True},
    "LoRA": {"gradient_checkpointing": True, "lora_rank": RANK},
    "offload": {"gradient_checkpointing": True, "fsdp_cpu_offload": True},
}
# on a CPU nothing can be offloaded: weights and moments are in host memory
ON_CPU = {name: flags for name, flags in SETTINGS.items() if name != "offload"}
ON_CPU["LoRA, no checkpointing"] = {"lora_rank": RANK}
# layers, hidden, inner, heads, key/value heads, vocabulary of models that a CPU trains in seconds: SmolLM2-135M and two
SMALL = {"SmolLM2-135M": (30, 576, 1536, 9, 3, 49152), "8 x 512": (8, 512, 2048, 8, 4, 32000)}
SMALL["4 x 1024"] = (4, 1024, 2816, 16, 4, 16000)


def load_of(shapes: Shapes, tokens: int, flags: dict[str, Any], **more: Any) -> Load:
    """The planner's load for a case."""
    return Load(
        shapes,
        tokens,
        checkpointing=flags.get("gradient_checkpointing", False),
        on_host=flags.get("fsdp_cpu_offload", False),
        lora=shapes.adapter(RANK) if "lora_rank" in flags else 0,
        **more,
    )


def memory(only: str = "") -> None:
    """The table of simulated GPUs with two micro-batches in each step, or its rows for one model."""
    layers = {"0.5B": 12, "4B": 6, "7B": 6}
    tokens = ROWS // 2 * (PROMPT + RESPONSE)
    common = {"ranks": 8, "again": True, "tokens": [PROMPT, RESPONSE], "max_tokens_per_gpu": tokens}
    guard = str(fake_cuda.build(Path(tempfile.mkdtemp())))
    env = os.environ | {"PYTHONPATH": str(ROOT), "LD_PRELOAD": guard}
    print("| model (layers) | setting | predicted GB | measured GB | ratio |\n|---|---|---:|---:|---:|")
    for shape, count in layers.items():
        if only not in ("", shape):
            continue
        for name, flags in SETTINGS.items():
            case = common | {"shape": shape, "layers": count} | flags
            command = [sys.executable, str(ROOT / "tests" / "gpu_sim" / "simulate.py"), json.dumps([case])]
            found = json.loads(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)
            shapes = Shapes.of(fake_cuda.model_config(shape, count))
            assert shapes is not None
            load = load_of(shapes, tokens, flags, shards=8, whole_grads=True)
            row(f"{shape} ({count})", name, total(load.train()) / 1e9, found["peaks"]["actor_train"] / 1e9)


def host(only: str = "", setting: str = "") -> None:
    """The table of this machine's CPU, or its rows for one model and setting. Each case has its own process."""
    print("| model | setting | predicted GB | peak GB | ratio | predicted s | CPU-s | ratio |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for model in [only] if only else SMALL:
        for name in [setting] if setting else ON_CPU:
            device = measured_cpu(1, 1.0)
            load = load_of(small(model), ROWS // 2 * (HERE + HERE), ON_CPU[name], width=4, plain=True)
            seconds = train(load, Work(ROWS, 1, HERE, HERE, 1, shares=False), 1, device).seconds(device)
            command = [sys.executable, __file__, "one", model, name]
            spent, resident = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-2:]
            row(model, name, (total(load.train()) + load.process()) / 1e9, float(resident), seconds, float(spent))


def one(model: str, setting: str) -> None:
    """Print CPU-seconds of the second step and peak resident GB of this process."""
    import torch

    from slimelite.training.trainer import Trainer

    torch.set_num_threads(1)
    rng, samples = np.random.default_rng(0), []
    for index in range(ROWS):
        sample = Sample(group_index=index, index=index, reward=0.0, tokens=rng.integers(0, 1000, HERE).tolist())
        sample.append_response_tokens(rng.integers(0, 1000, HERE).tolist(), log_probs=[-1.0] * HERE)
        samples.append([sample])
    table = SampleTable.from_samples(samples)
    table.advantage = rng.normal(size=ROWS)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config(model)))
        args = Args(
            hf_checkpoint=folder,
            device="cpu",
            num_rollout=9,
            num_steps_per_rollout=1,
            global_batch_size=ROWS,
            rollout_max_response_len=HERE,
            rollout_temperature=1.0,
            use_dynamic_batch_size=True,
            max_tokens_per_gpu=ROWS // 2 * 2 * HERE,
            reduce_once_a_step=False,
            token_stats="none",
            **ON_CPU[setting],
        )
        with closing(Trainer(args)) as trainer:
            trainer.train(0, table)
            began = time.process_time()
            trainer.train(1, table)
            print(time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9)


def config(model: str) -> dict[str, Any]:
    """The config.json of a model of ``SMALL``."""
    layers, hidden, inner, heads, groups, vocab = SMALL[model]
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner, "vocab_size": vocab}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": groups}
    return {"model_type": "llama", "tie_word_embeddings": True, "bos_token_id": 1, **sizes, **heads_of}


def small(model: str) -> Shapes:
    """Its shapes."""
    shapes = Shapes.of(config(model))
    assert shapes is not None
    return shapes


def row(model: str, setting: str, *pairs: float) -> None:
    """A line of a table, with the ratio of each pair of predicted and measured."""
    cells = [f"{a:.2f} | {b:.2f} | {a / b:.2f}" for a, b in zip(pairs[::2], pairs[1::2], strict=True)]
    print(f"| {model} | {setting} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    answer_version()
    {"memory": memory, "host": host, "one": one}[sys.argv[1]](*sys.argv[2:])
