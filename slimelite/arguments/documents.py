"""Values derived from the flags of pretraining: batches, the number of rollouts, and the model of ``--depth``."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from slimelite.arguments.args import Draft
from slimelite.arguments.model import ArchitectureArgs, model_config_from_flags
from slimelite.plan.memory import Shapes, model_shapes

# one step of Muon may decay the weights by at most this share
FORGOTTEN = 0.1
# ``--depth`` scales its settings from these: a depth, its batch [tokens] and its settings (docs/from_bytes.md)
DEPTH, BATCH, MUON_LR, LR, WEIGHT_DECAY, RATIO = 12, 2**19, 0.02, 3e-3, 0.1, 20.0


def pack_documents(draft: Draft) -> None:
    """Set the batch sizes for documents. A packed sequence is a sample, and a forward pass takes whole samples."""
    draft.default("tokenizer_workers", len(os.sched_getaffinity(0)), "the cores of this machine")
    args, reason = draft.args, f"--loss-type {draft.args.loss_type}"
    datasets = args.eval_prompt_data or args.eval_config or args.eval_tasks
    if args.early_stop_metric == "eval/bpb" or (args.early_stop_metric is None and args.eval_bpb and not datasets):
        _choose(draft, {"early_stop_mode": "min"}, "fewer bits per byte are better")
    if not args.job.documents:
        return
    if args.depth is not None:
        _scale(draft, args.depth)
        args = draft.args
    if args.n_samples_per_prompt != 1:
        draft.set("n_samples_per_prompt", 1, f"{reason}: nothing is sampled")
    if args.global_batch_size:
        steps = args.num_steps_per_rollout or 1
        draft.default("rollout_batch_size", args.global_batch_size * steps, f"{steps} step(s) of --global-batch-size")
    draft.set("use_dynamic_batch_size", True, f"{reason}: a forward pass takes whole sequences")
    draft.default("max_tokens_per_gpu", args.micro_batch_size * args.seq_length, "--micro-batch-size x --seq-length")
    draft.set("share_prefixes", False, f"{reason}: documents have no prompt in common")
    _choose(draft, {"loss_aggregation": "token", "save_rollouts": "none", "token_stats": "none"}, reason)


def spend(draft: Draft) -> None:
    """The number of rollouts that fits a budget of tokens or operations."""
    args = draft.args
    budgets = [name for name in ("train_tokens", "train_flops", "tokens_per_parameter") if getattr(args, name)]
    if not (args.job.documents and budgets and args.rollout_batch_size):
        return
    option = "--" + budgets[0].replace("_", "-")
    if len(budgets) > 1 or "num_rollout" in draft.explicit or args.num_epoch is not None:
        draft.complain(option, "sets the length of the run; leave --num-rollout, --num-epoch and other budgets out")
        return
    shapes = model_shapes(args)
    if shapes is None and not args.train_tokens:
        draft.complain(option, "needs the shapes of the model, which are not known here: give --train-tokens instead")
        return
    tokens = args.train_tokens or 0.0
    if shapes is not None and not tokens:
        each = flops_per_token(shapes, args.seq_length)
        tokens = args.train_flops / each if args.train_flops else (args.tokens_per_parameter or 0) * matrices(shapes)
    of_rollout = args.rollout_batch_size * args.seq_length
    draft.set(
        "num_rollout", math.ceil(tokens / of_rollout), f"{option}: {tokens:.3g} tokens, {of_rollout} in each rollout"
    )


def matrices(shapes: Shapes) -> int:
    """The number of parameters in the matrix products for one token: the matrices of layers, and the LM head."""
    return shapes.layers * shapes.active + shapes.head


def flops_per_token(shapes: Shapes, length: int) -> float:
    """Operations of forward and backward for one token of a full sequence of ``length`` (arXiv:2001.08361, section
    2.1). Each parameter of `matrices` takes 6 operations. Attention takes 12 operations for each layer, each element of
    a query and each position that the token attends to. On average, a token attends to half of the positions.
    """
    return 6.0 * matrices(shapes) + 12.0 * shapes.layers * shapes.query * length / 2


def _scale(draft: Draft, depth: int) -> None:
    """The model and the settings of ``--depth``. Flags that were given keep their values."""
    reason = f"--depth {depth}"
    if draft.args.hf_checkpoint:
        draft.complain("--depth", "defines a new model: leave --hf-checkpoint out")
        return
    vocabulary = draft.args.vocab_size or _vocabulary(draft.args.tokenizer)
    if vocabulary is None:
        draft.complain("--depth", "needs --tokenizer, a folder with a tokenizer.json, or --vocab-size")
        return
    _choose(draft, _architecture(depth, vocabulary), reason)
    args = draft.args
    try:
        mine = Shapes.of(model_config_from_flags(args))
    except ValueError:
        return  # `derive` reports the error when it defines the model
    other = Shapes.of(model_config_from_flags(ArchitectureArgs(**_architecture(DEPTH, vocabulary))))
    assert mine is not None
    assert other is not None
    budget = args.train_tokens or args.train_flops or args.tokens_per_parameter
    if args.num_rollout is None and args.num_epoch is not None and not budget:
        remedy = "replace it by --num-rollout or --train-tokens, or leave it out"
        draft.complain("--num-epoch", f"does not give the number of tokens, which --depth needs: {remedy}")
        return
    each = args.num_steps_per_rollout or 1
    rows = args.global_batch_size or (args.rollout_batch_size or 0) // each
    if args.num_rollout is None:
        if not budget:
            draft.default("tokens_per_parameter", RATIO, reason)
        tokens = args.train_tokens or (args.tokens_per_parameter or RATIO) * matrices(mine)
        if args.train_flops:
            tokens = args.train_flops / flops_per_token(mine, args.seq_length)
    elif rows:
        tokens = float(max(1, args.num_rollout) * (args.rollout_batch_size or rows * each) * args.seq_length)
    else:
        return  # `derive` reports the missing batch size
    longer = tokens / (RATIO * matrices(other))
    if not rows:
        rows = max(1, 2 ** round(math.log2(BATCH * longer**0.383)) // args.seq_length)
        _choose(draft, {"global_batch_size": rows}, reason)
    batch = rows * args.seq_length
    steps, scale = max(1, math.ceil(tokens / batch)), math.sqrt(batch / BATCH)
    width = math.sqrt(_architecture(DEPTH, vocabulary)["hidden_size"] / mine.hidden)
    settings: dict[str, object] = {
        "optimizer": "muon",
        "muon_lr": MUON_LR * scale,
        "lr": LR * scale * width,
        # in a run of a few steps, the decay of one step could otherwise be larger than the weights
        "weight_decay": min(WEIGHT_DECAY * scale / longer, FORGOTTEN / (MUON_LR * scale)),
        "lr_decay_style": "WSD",
        "lr_wsd_decay_style": "linear",
        "lr_warmup_iters": min(40, steps // 50),
        "lr_wsd_decay_iters": max(1, round(0.4 * steps)),
    }
    _choose(draft, settings, reason)


def _architecture(depth: int, vocabulary: int) -> dict[str, Any]:
    width = 64 * depth
    return {
        "num_layers": depth,
        "hidden_size": width,
        "ffn_hidden_size": 64 * math.ceil(width * 8 / 3 / 64),
        "num_attention_heads": width // (128 if depth % 2 == 0 and depth >= DEPTH else 64),
        "vocab_size": 64 * math.ceil(vocabulary / 64),
        "qk_layernorm": True,
        "untie_embeddings_and_output_weights": True,
    }


def _vocabulary(tokenizer: str | None) -> int | None:
    """How many ids the ``tokenizer.json`` of a folder has; None if there is no such file."""
    try:
        content = json.loads((Path(tokenizer or "") / "tokenizer.json").read_text(encoding="utf-8"))
        added = [int(each["id"]) for each in content.get("added_tokens") or ()]
        return 1 + max([*content["model"]["vocab"].values(), *added])
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return None


def _choose(draft: Draft, values: dict[str, object], reason: str) -> None:
    """Set the fields that the user did not set."""
    for name, value in values.items():
        if name not in draft.explicit:
            draft.set(name, value, reason)
