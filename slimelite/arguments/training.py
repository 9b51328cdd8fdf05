"""The optimizer, its schedule, and speed and memory of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slimelite.arguments.conditions import DECAY, END_OF_DECAY, GPUS, MUON, TRAINING, WARMUP, WARMUP_SHARE, WSD, when
from slimelite.arguments.flags import ALWAYS, flag, resolved
from slimelite.arguments.model import ClusterArgs


@dataclass(frozen=True)
class OptimizerArgs:
    """Optimizer."""

    optimizer: Literal["adam", "adamw", "muon"] = flag(
        "adam",
        "AdamW (adam, adamw) trains all weights; with muon, Muon trains the matrices and AdamW the rest",
        TRAINING,
    )
    lr: float = flag(1e-6, "the learning rate rises to this value", TRAINING, at_least=0)
    weight_decay: float = flag(
        0.0,
        "weights shrink by this share of the learning rate in each step; norms and biases do not",
        TRAINING,
        at_least=0,
    )
    adam_beta1: float = flag(
        0.9, "the first moment keeps this share of itself in each step", TRAINING, at_least=0, at_most=1
    )
    adam_beta2: float = flag(
        0.95, "the second moment keeps this share of itself in each step", TRAINING, at_least=0, at_most=1
    )
    adam_eps: float = flag(1e-8, "AdamW adds this to the denominator of its step", TRAINING, at_least=0)
    muon_lr: float = flag(0.02, "the learning rate of the matrices under Muon rises to this value", MUON, at_least=0)
    muon_momentum: float = flag(
        0.95, "the momentum of Muon keeps this share of itself in each step", MUON, at_least=0, at_most=1
    )
    clip_grad: float = flag(
        1.0,
        "a gradient with a larger 2-norm is scaled down to this; 0 clips nothing",
        TRAINING,
        at_least=0,
        infinite=True,
    )
    nonfinite_grad: Literal["skip", "fail"] = flag(
        "skip", "when a loss or gradient has inf or nan, skip leaves the step out and fail ends the run", TRAINING
    )
    reset_optimizer_states: bool = flag(
        False, "the optimizer's moments are forgotten at the start of every rollout", TRAINING
    )

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = flag(
        "constant", "the learning rate falls in this way after warm-up", TRAINING
    )
    lr_warmup_iters: int = flag(0, "the learning rate rises for this many optimizer steps", TRAINING, at_least=0)
    lr_warmup_fraction: float | None = flag(
        None, "warm-up is this share of --lr-decay-iters", TRAINING, at_least=0, at_most=1
    )
    lr_warmup_init: float = flag(0.0, "warm-up starts from this learning rate", WARMUP, at_least=0)
    lr_decay_iters: int | None = flag(
        None,
        "the learning rate reaches --min-lr after this many optimizer steps",
        END_OF_DECAY | WARMUP_SHARE,
        at_least=1,
        auto="all steps of the run",
    )
    min_lr: float = flag(0.0, "the learning rate falls no lower than this", DECAY, at_least=0)
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = flag(
        "exponential", "the last phase of WSD falls in this way", WSD
    )
    lr_wsd_decay_iters: int | None = flag(
        None, "the last phase of WSD takes this many optimizer steps", WSD, required=True, at_least=1
    )


@dataclass(frozen=True)
class PerfArgs(ClusterArgs):
    """Performance."""

    gradient_checkpointing: bool = flag(
        None,
        "the backward pass computes activations again: it is slower and takes far less memory",
        TRAINING,
        auto="on where the model's shapes and the GPUs' memory need it; off on a CPU",
    )
    recompute_granularity: Literal["full", "selective"] | None = flag(
        None,
        "full is Megatron's spelling of --gradient-checkpointing; with selective, what matrix products and attention "
        "return is kept and the rest computed again",
        TRAINING & when("the value full with --compile", lambda a: a.recompute_granularity == "full" or not a.compile),
    )
    compile: bool = flag(
        False,
        "torch.compile fuses what layers and LM head do between matrix products: for GPUs; on a CPU it does not pay",
        TRAINING,
    )
    log_probs_chunk_size: int = flag(
        -1, "the LM head takes this many rows of hidden states at a time; -1 chooses by the vocabulary", TRAINING
    )
    fsdp_cpu_offload: bool = flag(False, "parameters and optimizer state stay in host memory", TRAINING & GPUS)
    optimizer_cpu_offload: bool = flag(False, "this is Megatron's spelling of --fsdp-cpu-offload", TRAINING & GPUS)
    dp_replicate_size: int = flag(
        1,
        "there are this many copies of the sharded model (HSDP), each with ranks / this many shards",
        TRAINING,
        at_least=1,
    )
    deterministic_mode: bool = flag(
        False, "the run repeats to the bit: it takes deterministic kernels and keeps submission order", ALWAYS
    )

    # whether ranks reduce gradients only after the last micro-batch of a step, and hold whole gradients until then
    reduce_once_a_step: bool = resolved(True)

    @property
    def recomputes_selectively(self) -> bool:
        """Whether recomputation leaves out matrix products and attention; compiled code hides which they are."""
        return bool(self.gradient_checkpointing) and self.recompute_granularity == "selective" and not self.compile
