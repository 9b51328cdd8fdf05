"""The checkpoint that a run goes on from, and the seed of its rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from slimelite.arguments.flags import SEEDS
from slimelite.models.checkpoints import ROLLOUT_SEED, ROLLOUT_STATE, find_checkpoint, holds_model, read_json

if TYPE_CHECKING:
    from slimelite.arguments.derive import Draft


def derive_resume(draft: Draft) -> None:
    """The checkpoint to resume from, and --rollout-seed."""
    _checkpoint(draft)
    _rollout_seed(draft)


def _checkpoint(draft: Draft) -> None:
    """The checkpoint to resume from, if there is one."""
    args = draft.args
    if args.load is None or (holds_model(args.load) and args.ckpt_step is None):
        return
    try:
        own = args.save is not None and Path(args.load).resolve() == Path(args.save).resolve()
        found, note = find_checkpoint(args.load, args.ckpt_step, fallback=args.load_fallback, own=own)
    except ValueError as error:
        draft.complain("--load", str(error))
        return
    if found is None:
        note += ": a new run begins" + " from --hf-checkpoint" * (args.hf_checkpoint is not None)
    if note:
        draft.notes.append(f"--load {args.load}: {note}")
    newest = "the newest under --load" if args.ckpt_step is None else "--ckpt-step"
    draft.set("resume_directory", None if found is None else str(found), note or newest)


def _rollout_seed(draft: Draft) -> None:
    """Runs that differ in --seed alone differ in what they sample; a run that goes on keeps the seed that it had."""
    args = draft.args
    if "rollout_seed" in draft.given:
        return
    if args.resume_directory is not None and not args.finetune:
        # a checkpoint that does not name it is of a time when --rollout-seed did not follow --seed
        saved = read_json(Path(args.resume_directory) / ROLLOUT_STATE).get(ROLLOUT_SEED, args.rollout_seed)
        if saved != args.rollout_seed or "seed" in draft.given:
            draft.set("rollout_seed", saved, "the checkpoint's: it goes on with the seed that it began with")
    elif "seed" in draft.given and args.seed in SEEDS:
        draft.set("rollout_seed", args.seed, "as --seed")
