"""The optimizer, its schedule, and speed and memory of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slimelite.arguments.flags import flag, resolved


@dataclass(frozen=True)
class OptimizerArgs:
    """Optimizer."""

    optimizer: Literal["adam", "adamw", "muon"] = flag(
        "adam", "adam and adamw are AdamW; muon: Muon for matrices, AdamW for the rest"
    )
    lr: float = flag(1e-6, "peak learning rate")
    weight_decay: float = flag(0.0, "decoupled weight decay; not on norms and biases")
    adam_beta1: float = flag(0.9, "decay of the first moment")
    adam_beta2: float = flag(0.95, "decay of the second moment")
    adam_eps: float = flag(1e-8, "added to the denominator")
    muon_lr: float = flag(0.02, "peak learning rate of the matrices under Muon")
    muon_momentum: float = flag(0.95, "momentum of Muon")
    clip_grad: float = flag(1.0, "longest gradient (2-norm); 0: no clipping")
    nonfinite_grad: Literal["skip", "fail"] = flag(
        "skip", "a loss or gradient with inf or nan: leave the step out, or stop"
    )
    reset_optimizer_states: bool = flag(False, "forget the optimizer's moments at the start of every rollout")

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = flag(
        "constant", "schedule after warm-up"
    )
    lr_warmup_iters: int = flag(0, "optimizer steps of warm-up")
    lr_warmup_fraction: float | None = flag(None, "share of --lr-decay-iters that is warm-up")
    lr_warmup_init: float = flag(0.0, "learning rate at the first step of warm-up")
    lr_decay_iters: int | None = flag(None, "optimizer steps until --min-lr", auto="all steps of the run")
    min_lr: float = flag(0.0, "lowest learning rate of the schedule")
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = flag(
        "exponential", "last phase of WSD"
    )
    lr_wsd_decay_iters: int | None = flag(None, "optimizer steps of the last phase of WSD (required there)")


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
