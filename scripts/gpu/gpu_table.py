"""The check of gpu_check.sh that compares the planner's prediction with a measured step."""

from __future__ import annotations

import gc
import json
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
from gpu_lab import Lab, Number, Numbers
from transformers import AutoConfig, AutoModelForCausalLM

from slimelite.arguments import Args
from slimelite.plan.devices import recognized
from slimelite.plan.memory import Load, Shapes, total
from slimelite.plan.time import Work, measured_cpu, train
from slimelite.training.trainer import Trainer

CHECKPOINTED = {"gradient_checkpointing": True}
BOTH = CHECKPOINTED | {"compile": True}
LORA = CHECKPOINTED | {"lora_rank": 16}


@dataclass(frozen=True)
class Point:
    """A model with ``layers`` layers (0: all of them), micro-batches of ``tokens`` tokens, and flags of the trainer."""

    model: str
    layers: int
    tokens: int
    flags: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        flags = " ".join(["compiled"] * ("compile" in self.flags) + ["LoRA"] * ("lora_rank" in self.flags))
        recomputed = "recomputed" if "gradient_checkpointing" in self.flags else "plain"
        return " ".join(filter(None, [self.model, f"{self.tokens // 1024}k", recomputed, flags]))


# config.json of the models: layers, hidden, inner, heads, key/value heads, vocabulary
MODELS: dict[str, tuple[int, int, int, int, int, int]] = {
    "0.5B": (24, 896, 4864, 14, 2, 151936),
    "1.5B": (28, 1536, 8960, 12, 2, 151936),
    "4B": (36, 2560, 9728, 32, 8, 151936),
    "7B": (28, 3584, 18944, 28, 4, 152064),
    "32B, 8 layers": (8, 5120, 27648, 40, 8, 152064),
    "tiny": (2, 64, 96, 4, 2, 151),
}
POINTS = [
    *(Point("0.5B", 0, tokens, flags) for tokens in (4096, 9216, 16384) for flags in ({}, CHECKPOINTED, BOTH)),
    *(Point("0.5B", 0, 32768, flags) for flags in (CHECKPOINTED, BOTH)),
    *(Point("1.5B", 0, tokens, flags) for tokens in (9216, 32768) for flags in (CHECKPOINTED, BOTH)),
    *(Point("4B", 0, 9216, flags) for flags in (CHECKPOINTED, BOTH)),
    *(Point("7B", 0, 9216, flags) for flags in (LORA, LORA | BOTH)),
    Point("32B, 8 layers", 8, 9216, CHECKPOINTED),
]
TINY = [Point("tiny", 0, 64, flags) for flags in ({}, CHECKPOINTED, LORA)]
PROMPT, RESPONSES = 512, 8  # of a group; a row has 1,024 tokens
HEADER = "| point | predicted s | measured s | MFU | predicted GB | allocated GB | reserved GB |"


def shape(point: Point) -> dict[str, Any]:
    """The config.json of a point's model."""
    layers, hidden, inner, heads, groups, vocabulary = MODELS[point.model]
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner, "vocab_size": vocabulary}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": groups}
    return {"model_type": "qwen2", "tie_word_embeddings": hidden < 3000, "eos_token_id": 2, **sizes, **heads_of}


def predicted_beside_measured(lab: Lab) -> Numbers:
    """A row for each point: seconds of a step of two micro-batches, and its peak. A point that does not fit says so."""
    name = torch.cuda.get_device_name() if lab.cuda else ""
    device = recognized(name) if lab.cuda else measured_cpu(1)
    if device is None:
        raise RuntimeError(f"plan/gpus.toml does not know {name}")
    ratios: list[float] = []
    print(f"{HEADER}\n|{'---|' * 7}", flush=True)
    for point in TINY if lab.tiny else POINTS:
        length = lab.size(PROMPT, 8)
        rows = max(RESPONSES, 2 * point.tokens // (2 * length))
        shapes = Shapes.of(shape(point))
        assert shapes is not None
        lora = shapes.adapter(16) if "lora_rank" in point.flags else 0
        kinds = {"checkpointing": "gradient_checkpointing" in point.flags, "compiled": "compile" in point.flags}
        load = Load(shapes, point.tokens, lora=lora, width=2 if lab.cuda else 4, plain=not lab.cuda, **kinds)
        work = Work(rows // RESPONSES, RESPONSES, length, length, 1, shares=False)
        cost = train(load, work, 1, device)
        seconds, memory = cost.seconds(device), total(load.train()) / 1e9
        try:
            took, allocated, reserved = measured(lab, point, rows, length)
        except torch.OutOfMemoryError:
            print(f"| {point.name} | {seconds:.3f} | does not fit | | {memory:.1f} | | |", flush=True)
            continue
        ratios.append(took / seconds)
        mfu = cost.operations / took / device.rate
        said = [f"{seconds:.3f}", f"{took:.3f}", f"{mfu:.3f}", *(f"{x:.1f}" for x in (memory, allocated, reserved))]
        print(f"| {point.name} | {' | '.join(said)} |", flush=True)
    return {
        "points": Number(len(ratios), low=len(TINY) if lab.tiny else 12),
        "measured / predicted seconds, smallest": Number(min(ratios)),
        "largest": Number(max(ratios)),
    }


def measured(lab: Lab, point: Point, rows: int, length: int) -> tuple[float, float, float]:
    """Seconds of a step, and the peaks of allocated and reserved memory [GB]."""
    folder = lab.work / point.model.replace(" ", "-")
    folder.mkdir(exist_ok=True)
    config = shape(point)
    if not (folder / "config.json").exists():
        (folder / "config.json").write_text(json.dumps(config))
        with torch.device(lab.device):  # on a CPU the random weights of all points would take ten minutes
            made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
        made.save_pretrained(folder)
        del made
    flags = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": point.tokens, "global_batch_size": 4096}
    flags |= {"lr": 1e-5, "num_rollout": 9, "num_steps_per_rollout": 1, "share_prefixes": False}
    args = Args(hf_checkpoint=str(folder), device=lab.device, **(flags | point.flags))
    table = lab.table(rows, length, length, length, group=RESPONSES)
    table.prompt_tokens[:] %= config["vocab_size"]
    table.response_tokens[:] %= config["vocab_size"]
    lab.empty()
    try:
        with closing(Trainer(args)) as trainer:
            lab.gigabytes(peak=True)
            took = lab.seconds(lambda: trainer.train(0, table), times=1)
            reserved = torch.cuda.max_memory_reserved() / 1e9 if lab.cuda else 0.0
            return took, lab.gigabytes(peak=True), reserved
    finally:
        gc.collect()
        lab.empty()
