"""Decides whether activations are recomputed and how often ranks add up gradients.

The memory that a training rank needs decides; `slimelite.plan.memory` predicts it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from slimelite.plan.memory import BESIDE_ENGINES, USABLE, Load, left_behind, total
from slimelite.plan.shapes import Shapes

if TYPE_CHECKING:
    from slimelite.arguments.args import Args
    from slimelite.arguments.derive import Draft


def derive_memory(draft: Draft) -> None:
    """Whether activations are recomputed, and when ranks add up their gradients."""
    args = draft.args
    if args.recompute_granularity is not None:
        draft.default("gradient_checkpointing", True, f"--recompute-granularity {args.recompute_granularity}")
    if not (args.job.gpus and args.job.trains):
        draft.default("gradient_checkpointing", False, "nothing is trained on a GPU")
        return
    load, here = training_load(args), draft.machine.gpu_bytes
    if isinstance(load, str) or here is None or load.shapes.router:
        unknown = load if isinstance(load, str) else "the GPUs' memory is"
        if not isinstance(load, str) and load.shapes.router:
            unknown = "what experts keep for the backward pass is"
        draft.default("gradient_checkpointing", True, f"{unknown} not known here, and a GPU may be too small without")
        draft.set("reduce_once_a_step", False, f"{unknown} not known here, and whole gradients may not fit")
        return

    def needs(*, checkpointing: bool, whole_grads: bool = False) -> float:
        return total(replace(load, checkpointing=checkpointing, whole_grads=whole_grads).train())

    usable = USABLE * here * (BESIDE_ENGINES if args.colocate and not args.offload_rollout else 1)
    if args.colocate and args.job.servers:
        usable -= left_behind(args.rollout_num_gpus_per_engine)
    plain, saving = needs(checkpointing=False), needs(checkpointing=True)
    has = f"a GPU has {usable / 1e9:.0f} GB for training"
    reason = f"without it a micro-batch of {load.tokens} tokens takes about {plain / 1e9:.0f} GB"
    if plain > usable:
        reason += f", with it {saving / 1e9:.0f} GB"
    draft.default("gradient_checkpointing", plain > usable, f"{reason}; {has}")
    chosen = draft.args.gradient_checkpointing
    if needs(checkpointing=chosen) > usable:
        draft.notes.append(
            f"training takes about {needs(checkpointing=chosen) / 1e9:.0f} GB of a GPU, and {has}: it may run out of "
            f"memory. {'A' if chosen else '--gradient-checkpointing, a'} lower --max-tokens-per-gpu, more GPUs or "
            "--fsdp-cpu-offload take less"
        )
    whole = needs(checkpointing=chosen, whole_grads=True)
    reason = f"with whole gradients on every rank a step takes about {whole / 1e9:.0f} GB; {has}"
    ranks = args.training_ranks
    once = ranks > 1 and whole <= usable
    draft.set("reduce_once_a_step", once, reason if ranks > 1 else "one rank has no other to add to")


def training_load(args: Args) -> Load | str:
    """What a training rank computes; or what is not known of it, as the subject and verb of a sentence."""
    shapes, tokens = model_shapes(args), _longest_micro_batch(args)
    if shapes is None or tokens is None:
        return "the model's shapes are" if shapes is None else "the longest micro-batch is"
    ranks = args.training_ranks
    return Load(
        shapes,
        tokens,
        shards=max(1, ranks // args.dp_replicate_size),
        plain=ranks == 1 and not args.job.gpus,
        checkpointing=bool(args.gradient_checkpointing),
        selective=args.recomputes_selectively,
        whole_grads=args.reduce_once_a_step and ranks > 1,
        on_host=args.fsdp_cpu_offload,
        width=2 if args.job.gpus else 4,
        lora=shapes.adapter(args.lora_rank),
        critic=shapes.adapter(args.critic_lora_rank) if args.use_critic else None,
        # with adapters the reference is the policy without them
        compiled=args.compile,
        others=int(args.use_reference and not args.lora_rank) + int(args.use_opd and args.opd_type == "trainer"),
    )


def model_shapes(args: Args) -> Shapes | None:
    """Shapes of the model, if its config.json can be read."""
    if args.model_config is not None:
        return Shapes.of(args.model_config)
    try:
        config = json.loads((Path(str(args.hf_checkpoint)) / "config.json").read_text())
        return Shapes.of(config)
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return None  # such as for a hub id; the pre-flight check reports a damaged folder


def _longest_micro_batch(args: Args) -> int | None:
    """Tokens of the longest micro-batch; a sample longer than the limit is a micro-batch of its own."""
    longest = args.rollout_max_context_len
    if longest is None and args.rollout_max_prompt_len and args.rollout_max_response_len:
        longest = args.rollout_max_prompt_len + args.rollout_max_response_len
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu:
        return max(args.max_tokens_per_gpu, longest or 0)
    return longest and args.micro_batch_size * longest
