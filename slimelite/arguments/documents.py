"""What follows from flags of pretraining."""

from __future__ import annotations

import os

from slimelite.arguments.args import Draft


def pack_documents(draft: Draft) -> None:
    """What follows from --loss-type pretrain_loss: a sequence is a sample, and a forward pass holds whole ones."""
    draft.default("tokenizer_workers", len(os.sched_getaffinity(0)), "the cores of this machine")
    args, reason = draft.args, f"--loss-type {draft.args.loss_type}"
    if not args.job.documents:
        return
    if args.n_samples_per_prompt != 1:
        draft.set("n_samples_per_prompt", 1, f"{reason}: nothing is sampled")
    if args.global_batch_size:
        steps = args.num_steps_per_rollout or 1
        draft.default("rollout_batch_size", args.global_batch_size * steps, f"{steps} step(s) of --global-batch-size")
    draft.set("use_dynamic_batch_size", True, f"{reason}: a forward pass is as long as its sequences")
    draft.default("max_tokens_per_gpu", args.micro_batch_size * args.seq_length, "--micro-batch-size x --seq-length")
    draft.set("share_prefixes", False, f"{reason}: documents have no prompt in common")
    chosen: dict[str, object] = {"loss_aggregation": "token", "save_rollouts": "none", "token_stats": "none"}
    for name, value in chosen.items():
        if name not in draft.explicit:
            draft.set(name, value, reason)
