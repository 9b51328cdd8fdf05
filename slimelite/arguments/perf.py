"""Speed and memory of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slimelite.arguments.base import flag


@dataclass(frozen=True)
class PerfArgs:
    """Performance."""

    gradient_checkpointing: bool = flag(False, "recompute activations in the backward pass: slower, far less memory")
    recompute_granularity: Literal["full", "selective"] | None = flag(
        None, "Megatron's spelling: full is --gradient-checkpointing"
    )
    log_probs_chunk_size: int = flag(-1, "rows of hidden states the LM head takes at a time; -1: chosen by vocabulary")
    fsdp_cpu_offload: bool = flag(False, "keep parameters and optimizer state in host memory")
    optimizer_cpu_offload: bool = flag(False, "Megatron's spelling of --fsdp-cpu-offload")
    dp_replicate_size: int = flag(1, "copies of the sharded model (HSDP): ranks / this many shards each")
    deterministic_mode: bool = flag(False, "repeatable to the bit: deterministic kernels and submission order")
