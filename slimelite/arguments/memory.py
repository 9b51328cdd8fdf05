"""What a training rank computes, from which `slimelite.plan.memory` predicts the memory that it needs."""

from __future__ import annotations

import json
from pathlib import Path

from slimelite.arguments.args import Args
from slimelite.arguments.model import ModelArgs
from slimelite.arguments.rollout import RolloutArgs
from slimelite.plan.memory import Load
from slimelite.plan.shapes import Shapes


def training_load(args: Args) -> Load | str:
    """What a training rank computes; or what is not known of it."""
    shapes, tokens = model_shapes(args), _longest_micro_batch(args)
    if shapes is None or tokens is None:
        longest = "the longest micro-batch is not known before the prompts are read"
        return "the model's shapes are not known here" if shapes is None else longest
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


def model_shapes(args: ModelArgs) -> Shapes | None:
    """Shapes of the model, if its config.json can be read."""
    if args.model_config is not None:
        return Shapes.of(args.model_config)
    try:
        config = json.loads((Path(str(args.hf_checkpoint)) / "config.json").read_text())
        return Shapes.of(config)
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return None  # such as for a hub id; the pre-flight check reports a damaged folder


def _longest_micro_batch(args: RolloutArgs) -> int | None:
    """Tokens of the longest micro-batch; a sample longer than the limit is a micro-batch of its own."""
    longest = args.rollout_max_context_len
    if longest is None and args.rollout_max_prompt_len and args.rollout_max_response_len:
        longest = args.rollout_max_prompt_len + args.rollout_max_response_len
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu:
        return max(args.max_tokens_per_gpu, longest or 0)
    return longest and args.micro_batch_size * longest
