"""Checks of gpu_check.sh about sharing a GPU: the reference next to the policy, other processes, a card of 24 GB."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing

import numpy as np
import torch
from gpu_lab import Lab, Number, Numbers

from slimelite.engines.sglang.sync import pickled
from slimelite.training.weights import buckets

CARD_GB = 24.0
# what the driver and the CUDA context keep of a card [GB]
CONTEXT_GB = 1.0
# Another process opens a bucket as SGLang's servers do: it finds the GPU by its UUID, and reads memory that is ours.
CHILD = """
import io, pickle, sys, torch
from torch.multiprocessing import reductions
def rebuild(*arguments):
    uuid = arguments[6]
    names = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    return reductions.rebuild_cuda_tensor(*arguments[:6], names.index(uuid), *arguments[7:])
class Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        return rebuild if name == "rebuild_cuda_tensor" else super().find_class(module, name)
found = Unpickler(sys.stdin.buffer).load()
flat = found["flattened_tensor"]
for part in found["metadata"]:
    tensor = flat[part.start_idx:part.end_idx].view(part.dtype).view(part.shape)
    print(part.name, flat.device.type, float(tensor.double().sum()))
"""


def reference_is_policy(lab: Lab) -> Numbers:
    """Before the first step, policy and reference have the same weights. This is checked in bf16, also at position
    1,000 and beyond."""
    table = lab.table(lab.size(8, 3), lab.size(1024, 8), lab.size(512, 4), lab.size(1024, 16))
    with closing(lab.trainer(use_reference=True, use_kl_loss=True, kl_loss_coef=0.1)) as trainer:
        metrics = trainer.train(0, table)
    return {
        "kl_loss of the first step": Number(abs(metrics["train/kl_loss"]), 1e-6),
        "mean log-prob gap": Number(abs(metrics["rollout/kl"]), 1e-6),
    }


def another_process_reads(lab: Lab) -> Numbers:
    """Send a bucket through CUDA IPC to another process. On a CPU it is sent by value."""
    rng = np.random.default_rng(0)
    shapes = [(lab.size(4096, 8), 896), (896,), (lab.size(151936, 16), 64)]
    tensors = [torch.from_numpy(rng.normal(size=shape)).to(lab.device, torch.bfloat16) for shape in shapes]
    names = [f"weight.{i}" for i in range(len(shapes))]
    (bucket,) = buckets(zip(names, map(torch.nn.Parameter, tensors), strict=True), 1 << 40)
    blob = pickled(bucket)
    child = subprocess.run([sys.executable, "-c", CHILD], input=blob, capture_output=True, check=False)
    if child.returncode:
        raise RuntimeError(child.stderr.decode().strip().splitlines()[-1])
    lines = [line.split() for line in child.stdout.decode().splitlines()]
    there = {name: float(total) for name, _, total in lines}
    gaps = [abs(there[name] - float(tensor.double().sum())) for name, tensor in zip(names, tensors, strict=True)]
    on_gpu = sum(device == "cuda" for _, device, _ in lines)
    return {
        "tensors that arrived": Number(len(lines), low=len(shapes)),
        "of them in our GPU memory": Number(on_gpu, low=len(shapes) if lab.cuda else 0),
        "largest gap of a sum": Number(max(gaps), 1e-6),
        "MB of the message": Number(len(blob) / 1e6, 0.1 if lab.cuda else float("inf")),
    }


def fits_a_small_card(lab: Lab) -> Numbers:
    """The example script's 9,216 tokens for each micro-batch, on a card of 24 GB: weights, AdamW, reference,
    checkpointing."""
    share = (CARD_GB - CONTEXT_GB) * 1e9 / torch.cuda.mem_get_info()[1] if lab.cuda else 1.0
    table = lab.table(lab.size(12, 3), lab.size(512, 8), lab.size(1024, 4), lab.size(1024, 16))
    try:
        if lab.cuda:
            torch.cuda.set_per_process_memory_fraction(min(1.0, share))
        given = {"max_tokens_per_gpu": lab.size(9216, 64), "gradient_checkpointing": True, "use_reference": True}
        with closing(lab.trainer(**given, use_kl_loss=True, kl_loss_coef=0.1)) as trainer:
            lab.gigabytes()
            for rollout_id in range(2):  # AdamW's moments come with the first step
                trainer.train(rollout_id, table)
            peak = lab.gigabytes(peak=True)
    finally:
        if lab.cuda:
            torch.cuda.set_per_process_memory_fraction(1.0)
            torch.cuda.empty_cache()
    return {"peak GB": Number(peak, CARD_GB - CONTEXT_GB)}
