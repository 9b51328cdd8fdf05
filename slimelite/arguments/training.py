"""The optimizer, its schedule, speed and memory of training, LoRA, and the settings in a peft adapter."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import inf, sqrt
from pathlib import Path
from typing import Any, Literal

from slimelite.arguments.conditions import (
    CRITIC,
    DECAY,
    END_OF_DECAY,
    GPUS,
    INFERENCE,
    LORA,
    MUON,
    TRAINING,
    WARMUP,
    WARMUP_SHARE,
    WSD,
    use_of,
    when,
)
from slimelite.arguments.flags import ALWAYS, flag, resolved
from slimelite.arguments.model import CheckpointArgs, ClusterArgs, ModelArgs


@dataclass(frozen=True)
class OptimizerArgs:
    """Optimizer."""

    optimizer: Literal["adam", "adamw", "muon"] = flag(
        "adam",
        "AdamW (adam, adamw) trains all weights; with muon, Muon trains the matrices and AdamW the rest",
        TRAINING,
    )
    lr: float = flag(1e-6, "peak learning rate", TRAINING, at_least=0)
    weight_decay: float = flag(
        0.0,
        "weight decay of AdamW. Norms and biases are not decayed",
        TRAINING,
        at_least=0,
    )
    adam_beta1: float = flag(0.9, "decay rate of AdamW's first moment (beta 1)", TRAINING, at_least=0, at_most=1)
    adam_beta2: float = flag(0.95, "decay rate of AdamW's second moment (beta 2)", TRAINING, at_least=0, at_most=1)
    adam_eps: float = flag(1e-8, "epsilon that AdamW adds to the denominator of its step", TRAINING, at_least=0)
    muon_lr: float = flag(0.02, "peak learning rate of the matrices that Muon trains", MUON, at_least=0)
    muon_momentum: float = flag(0.95, "momentum of Muon", MUON, at_least=0, at_most=1)
    clip_grad: float = flag(
        1.0,
        "gradients with a larger norm are scaled down to this norm; 0 turns clipping off",
        TRAINING,
        at_least=0,
        infinite=True,
    )
    nonfinite_grad: Literal["skip", "fail"] = flag(
        "skip",
        "if a loss or gradient is inf or nan, the step is left out (skip), or the run ends (fail)",
        TRAINING,
    )
    reset_optimizer_states: bool = flag(
        False, "the optimizer's moments are reset at the start of every rollout", TRAINING
    )

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = flag(
        "constant", "schedule of the learning rate after warm-up", TRAINING
    )
    lr_warmup_iters: int = flag(0, "the learning rate warms up over this many optimizer steps", TRAINING, at_least=0)
    lr_warmup_fraction: float | None = flag(
        None, "warm-up takes this fraction of --lr-decay-iters", TRAINING, at_least=0, at_most=1
    )
    lr_warmup_init: float = flag(0.0, "warm-up starts from this learning rate", WARMUP, at_least=0)
    lr_decay_iters: int | None = flag(
        None,
        "the learning rate reaches --min-lr after this many optimizer steps",
        END_OF_DECAY | WARMUP_SHARE,
        at_least=1,
        auto="all steps of the run",
    )
    min_lr: float = flag(0.0, "lowest learning rate of the schedule", DECAY, at_least=0)
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = flag(
        "exponential", "in the last phase of WSD, the learning rate decays with this shape", WSD
    )
    lr_wsd_decay_iters: int | None = flag(
        None, "the last phase of WSD takes this many optimizer steps", WSD, required=True, at_least=1
    )


@dataclass(frozen=True)
class PerfArgs(ClusterArgs):
    """Performance."""

    gradient_checkpointing: bool = flag(
        None,
        "the backward pass recomputes activations. Recomputation is slower, but needs far less memory",
        TRAINING,
        auto="on if training may not fit the GPUs' memory without it; off on a CPU",
    )
    recompute_granularity: Literal["full", "selective"] | None = flag(
        None,
        "the value full is Megatron's name for --gradient-checkpointing. The value selective keeps the outputs of "
        "matrix products and attention, and recomputes the rest",
        TRAINING
        & when(
            "the value full, or a run without --compile", lambda a: a.recompute_granularity == "full" or not a.compile
        ),
    )
    compile: bool = flag(
        False,
        "the operations between matrix products in layers and LM head are fused by torch.compile. This makes GPUs "
        "faster, but not a CPU",
        TRAINING,
    )
    log_probs_chunk_size: int = flag(
        -1,
        "the LM head processes this many rows of hidden states at a time. With -1, the number depends on the "
        "vocabulary size",
        TRAINING,
    )
    fsdp_cpu_offload: bool = flag(False, "parameters and optimizer state stay in host memory", TRAINING & GPUS)
    optimizer_cpu_offload: bool = flag(False, "Megatron's name for --fsdp-cpu-offload", TRAINING & GPUS)
    dp_replicate_size: int = flag(
        1,
        "the training ranks form this many groups of equal size. Each group has a replica of the model, sharded over "
        "the ranks of the group (HSDP)",
        TRAINING,
        at_least=1,
    )
    deterministic_mode: bool = flag(
        False,
        "the run is reproducible bit for bit: it uses deterministic kernels, and keeps samples in the order of their "
        "submission",
        ALWAYS,
    )

    # whether ranks reduce gradients only after the last micro-batch of a step, and hold whole gradients until then
    reduce_once_a_step: bool = resolved(True)

    @property
    def recomputes_selectively(self) -> bool:
        """Whether recomputation skips matrix products and attention. In compiled code, these operations cannot be
        recognised."""
        return bool(self.gradient_checkpointing) and self.recompute_granularity == "selective" and not self.compile


ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ALL_LINEAR = "all-linear"
# names in miles and Megatron that mean several modules
GROUPS = {
    "attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "unembed": ("lm_head",),
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
INNER = (*GROUPS["attn"], *GROUPS["mlp"])
# fields of an adapter_config.json that are supported here only if they are empty
UNKNOWN_TO_US = (
    *("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "layers_to_transform", "fan_in_fan_out"),
    *("lora_bias", "megatron_config", "trainable_token_indices", "layer_replication"),
    *("use_qalora", "alora_invocation_tokens"),
)
# initializations that also change the frozen weights: with the original weights, the adapter is a different model
CHANGES_BASE = ("pissa", "olora", "corda", "loftq")


@dataclass(frozen=True)
class LoraArgs(CheckpointArgs, ModelArgs):
    """LoRA.

    Low-rank adapters are trained, and the model's own weights stay unchanged. See docs/lora.md.
    """

    lora_rank: int = flag(
        0,
        "the run trains adapters of this rank instead of the weights; 0 trains the weights",
        TRAINING,
        at_least=0,
    )
    lora_alpha: float = flag(
        16.0, "an adapter's output is multiplied by this value divided by the adapter's rank", LORA, above=0
    )
    lora_dropout: float = flag(
        0.0,
        "dropout rate of an adapter's inputs in training. With a rate above 0, the policy in training differs from the "
        "policy that generated the responses",
        LORA,
        at_least=0,
        below=1,
    )
    lora_type: Literal["lora", "canonical_lora", "rslora"] = flag(
        "lora",
        "the scale of an adapter's output. lora: alpha divided by the rank. rslora: alpha divided by the square root "
        "of the rank. canonical_lora, Megatron's name for one adapter per matrix, is the same as lora",
        LORA,
    )
    lora_target_modules: list[str] = flag(
        [],
        "modules with these names get an adapter: names such as q_proj, the groups attn, mlp and unembed, or "
        "Megatron's names such as linear_qkv. Separate the names by spaces or commas",
        LORA,
        auto=f"{ALL_LINEAR}: every linear layer except the LM head",
        aliases=("--target-modules",),
    )
    lora_exclude_modules: list[str] = flag(
        [], "modules with these names get no adapter", LORA, aliases=("--exclude-modules",)
    )
    lora_adapter_path: str | None = flag(
        None,
        "training starts from the adapter in this folder, in peft's format. The run uses the rank, alpha, type and "
        "modules of this adapter",
        TRAINING,
        metavar="DIR",
    )
    lora_merge: bool = flag(
        False,
        "--save-hf writes the whole model with the adapter merged into it, and not only the adapter",
        LORA & use_of("--save-hf"),
    )
    lora_sync: Literal["adapter", "merged"] | None = flag(
        None,
        "what a weight sync sends. adapter: only the adapter, which the engines apply to the frozen weights. merged: "
        "the changed matrices, with the adapter merged into them",
        LORA & INFERENCE,
        auto="adapter, if (1) the run starts SGLang servers, (2) no adapter is on the embedding or LM head and (3) "
        "--load-in-4bit is off; else merged",
    )
    load_in_4bit: bool = flag(
        False,
        "QLoRA: the frozen linear layers are stored in 4 bits (NF4 with quantized scales, by bitsandbytes)",
        LORA,
    )
    critic_lora_rank: int = flag(
        0,
        "the critic is trained with adapters of this rank: only the adapters and its head are trained, and its other "
        "weights are frozen",
        CRITIC,
        at_least=0,
    )

    # names of modules that get an adapter, and of modules that get none, from the flags or from the adapter's config
    lora_targets: tuple[str, ...] = resolved((ALL_LINEAR,))
    lora_excluded: tuple[str, ...] = resolved(())

    @property
    def lora_modules(self) -> tuple[str, ...]:
        """The modules that may get an adapter, by the last part of their names, such as ``q_proj``. This is correct for
        layers with Llama's names."""
        named = [INNER if name == ALL_LINEAR else GROUPS.get(name, (name,)) for name in self.lora_targets]
        return tuple(dict.fromkeys(name.rpartition(".")[2] for names in named for name in names))

    @property
    def sends_adapter(self) -> bool:
        """Whether a weight sync sends only the adapter."""
        return self.lora_rank > 0 and self.lora_sync == "adapter"

    @property
    def lora_scaling(self) -> float:
        """The factor of B·A: alpha / rank, or alpha / √rank (rsLoRA, arXiv:2312.03732)."""
        return self.lora_alpha / (sqrt(self.lora_rank) if self.lora_type == "rslora" else self.lora_rank)


def words(texts: list[str]) -> tuple[str, ...]:
    """The names in ``texts``, separated by spaces or commas."""
    return tuple(name for text in texts for name in text.replace(",", " ").split())


def read_adapter(folder: str) -> dict[str, Any]:
    """The flags with which the adapter in ``folder`` was trained: field name -> value.

    Raises:
        ValueError: there is no adapter, or it is of a kind that is not supported here.
    """
    file = Path(folder) / ADAPTER_CONFIG
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        kind, rank = config["peft_type"], int(config["r"])
        alpha, rslora = float(config["lora_alpha"]), bool(config.get("use_rslora"))
        if not 0 < alpha < inf:
            raise ValueError(f"lora_alpha is {alpha}")
    except OSError as error:
        raise ValueError(f"no adapter: {file} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not the config of a peft adapter ({error!r:.100})") from error
    odd = [name for name in UNKNOWN_TO_US if config.get(name)]
    begun = str(config.get("init_lora_weights", "")).lower()
    odd += [f"init_lora_weights {begun}"] if begun.startswith(CHANGES_BASE) else []
    odd += ["bias"] if config.get("bias", "none") != "none" else []
    # weights of whole modules, as training/lora.py names them in a mixture of experts
    weights = [str(name) for name in config.get("target_parameters") or ()]
    odd += [f"target_parameters {name}" for name in weights if not name.endswith(".weight")]
    if kind != "LORA" or odd or rank < 1:
        raise ValueError(
            f"{file}: only plain LoRA adapters are supported, not {', '.join(odd) or kind}; merge the adapter with "
            "peft's merge_and_unload, save the merged model, and give its folder as --hf-checkpoint"
        )
    targets, excluded = config.get("target_modules") or (), config.get("exclude_modules") or ()
    if any(isinstance(names, str) and names not in ("", ALL_LINEAR) for names in (targets, excluded)):
        raise ValueError(f"{file}: target_modules and exclude_modules must be lists of names, not patterns")
    chosen = [targets] if isinstance(targets, str) else [*targets]
    chosen += [name.removesuffix(".weight") for name in weights]
    return {
        "lora_rank": rank,
        "lora_alpha": alpha,
        "lora_type": "rslora" if rslora else "lora",
        "lora_targets": tuple(sorted(chosen)) or (ALL_LINEAR,),
        "lora_excluded": tuple(sorted(excluded)),
    }
