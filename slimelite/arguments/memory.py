"""Estimates a training rank's GPU memory from the model's shapes, to decide on recomputation and gradient reduction."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimelite.arguments.model import text_config
from slimelite.families import EXPERTS, family_of

if TYPE_CHECKING:
    from slimelite.arguments.args import Args
    from slimelite.arguments.derive import Draft

# share of a GPU's memory that tensors can use; CUDA, NCCL and fragmentation take the rest
USABLE = 0.88
# share of that which is left to a trainer if engines keep their memory on the same GPU
BESIDE_ENGINES = 0.35

# how many logits the LM head computes at once, and the size of a part of its gradient (`training/model.py`)
CHUNK = 2**27

# config keys of layers of other kinds, whose activations `peak_bytes` does not know
OTHER_LAYERS = (*EXPERTS, "linear_num_value_heads", "mamba_num_heads")


@dataclass(frozen=True)
class Shapes:
    """Sizes of a dense decoder with gated MLPs; ``query`` and ``key`` are the widths of all heads together."""

    layers: int
    hidden: int
    inner: int
    query: int
    key: int
    vocab: int
    tied: bool
    qk_norm: bool

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shapes | None:
        """Sizes from the content of a config.json; None if one is missing, or if the model has ``OTHER_LAYERS``."""
        config = text_config(config)
        names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        sizes = [int(config.get(name) or 0) for name in names]
        if any(config.get(name) for name in OTHER_LAYERS) or not all(sizes):
            return None
        layers, hidden, inner, heads, vocab = sizes
        width, groups = config.get("head_dim") or hidden // heads, config.get("num_key_value_heads") or heads
        family = family_of(str(config.get("model_type")))
        tied, qk_norm = bool(config.get("tie_word_embeddings")), family is not None and family.qk_norm
        return cls(layers, hidden, inner, heads * width, groups * width, vocab, tied, qk_norm)

    @property
    def layer(self) -> int:
        """Parameters of a layer."""
        return self.hidden * (2 * self.query + 2 * self.key + 3 * self.inner)

    @property
    def outer(self) -> int:
        """Parameters of embedding and LM head."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """Parameters of all matrices; norms and biases are too small to matter."""
        return self.layers * self.layer + self.outer


def peak_bytes(shapes: Shapes, tokens: int, shards: int, *, models: int, checkpointing: bool, whole_grads: bool) -> int:
    """Peak memory of one rank in an AdamW step: bf16 activations, fp32 weights, gradients and moments.

    The activations that transformers' layers keep for backward were counted on fake tensors; tests/gpu_sim compares the
    estimate with a simulated step.

    Args:
        shapes: of the model.
        tokens: of a micro-batch.
        shards: number of ranks that share one copy of the model.
        models: with state on the GPU: 2 for policy and critic of the same size, else 1; 0 with ``--fsdp-cpu-offload``.
        checkpointing: layers keep only their input and are recomputed in backward.
        whole_grads: gradients stay whole on every rank until the step's last micro-batch.
    """
    s = shapes
    # bytes a token: 16-bit activations, the fp32 copies that norms make, and queries and keys before their norm
    layer = 8 * s.inner + 16 * s.hidden + 4 * (s.query + s.key) + (6 * (s.query + s.key) if s.qk_norm else 0)
    kept = tokens * (s.layers * (2 * s.hidden if checkpointing else layer) + 10 * s.hidden)
    state = 12 * s.parameters * models // shards + 2 * s.outer  # embedding and head are gathered throughout
    head = s.vocab * s.hidden
    grads = 4 * (s.parameters if whole_grads else s.parameters // shards)
    logits = min(CHUNK, tokens * s.vocab)
    in_head = kept + 4 * head + 4 * min(CHUNK, head) + 12 * logits
    in_layers = kept + (tokens * layer if checkpointing else 0) + 2 * s.outer + 14 * s.layer
    at_the_end = 5 * s.outer
    return state + max(in_head + (grads if whole_grads else 0), in_layers, at_the_end + grads)


def derive_memory(draft: Draft) -> None:
    """Whether activations are recomputed, and when ranks add up their gradients."""
    args = draft.args
    if args.recompute_granularity == "full":
        draft.default("gradient_checkpointing", True, "--recompute-granularity full")
    if args.device != "cuda" or args.debug_rollout_only:
        draft.default("gradient_checkpointing", False, "nothing is trained on a GPU")
        return
    ranks = args.actor_num_nodes * args.actor_num_gpus_per_node
    shapes, tokens, total = _shapes(args), _longest_micro_batch(args), draft.machine.gpu_bytes
    unknown = "the model's shapes are" if shapes is None else "the longest micro-batch is" if tokens is None else None
    if total is None:
        unknown = "the GPUs' memory is"
    if unknown or shapes is None or tokens is None or total is None:
        draft.default("gradient_checkpointing", True, f"{unknown} not known here, and a GPU may be too small without")
        draft.set("reduce_once_a_step", False, f"{unknown} not known here, and whole gradients may not fit")
        return
    models = 0 if args.fsdp_cpu_offload else 2 if args.use_critic else 1
    shards = max(1, ranks // args.dp_replicate_size)

    def needs(*, checkpointing: bool, whole_grads: bool = False) -> int:
        return peak_bytes(shapes, tokens, shards, models=models, checkpointing=checkpointing, whole_grads=whole_grads)

    usable = USABLE * total * (BESIDE_ENGINES if args.colocate and not args.offload_rollout else 1)
    plain, saving = needs(checkpointing=False), needs(checkpointing=True)
    has = f"a GPU has {usable / 1e9:.0f} GB for training"
    reason = f"without it a micro-batch of {tokens} tokens takes about {plain / 1e9:.0f} GB"
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
    once = ranks > 1 and whole <= usable
    draft.set("reduce_once_a_step", once, reason if ranks > 1 else "one rank has no other to add to")


def _shapes(args: Args) -> Shapes | None:
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
