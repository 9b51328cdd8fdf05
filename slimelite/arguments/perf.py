"""Speed and memory of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slimelite.arguments.base import flag, resolved


@dataclass(frozen=True)
class PerfArgs:
    """Performance."""

    gradient_checkpointing: bool = flag(
        None,
        "recompute activations in the backward pass: slower, far less memory",
        auto="on where the model's shapes and the GPUs' memory need it; off on a CPU",
    )
    recompute_granularity: Literal["full", "selective"] | None = flag(
        None, "Megatron's spelling: full is --gradient-checkpointing"
    )
    log_probs_chunk_size: int = flag(-1, "rows of hidden states the LM head takes at a time; -1: chosen by vocabulary")
    fsdp_cpu_offload: bool = flag(False, "keep parameters and optimizer state in host memory")
    optimizer_cpu_offload: bool = flag(False, "Megatron's spelling of --fsdp-cpu-offload")
    dp_replicate_size: int = flag(1, "copies of the sharded model (HSDP): ranks / this many shards each")
    deterministic_mode: bool = flag(False, "repeatable to the bit: deterministic kernels and submission order")

    # ranks add up their gradients after the last micro-batch of a step, and hold whole ones until then; else after each
    reduce_once_a_step: bool = resolved(True)
