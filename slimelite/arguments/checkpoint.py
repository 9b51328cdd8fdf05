"""Saving and resuming."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slimelite.arguments.base import flag, resolved

# written last, names the newest complete checkpoint (slime's and Megatron's name for it)
MARKER = "latest_checkpointed_iteration.txt"
ROLLOUT_STATE = "rollout_state.json"
# of the trainer, beside its tensors
STATE_FILE = "trainer.json"


@dataclass(frozen=True)
class CheckpointArgs:
    """Checkpoints."""

    load: str | None = flag(
        None,
        "resume from the newest checkpoint in this folder; without one start afresh, in a Hugging Face folder with its "
        "weights",
        metavar="DIR",
    )
    save: str | None = flag(None, "folder for checkpoints", metavar="DIR")
    save_interval: int | None = flag(None, "save every this many rollouts, and after the last one")
    save_retain_interval: int | None = flag(
        None,
        "keep the checkpoints of every this many rollouts; any other is deleted when the next one is complete",
    )
    save_hf: str | None = flag(
        None, "also write the model in Hugging Face format here; {rollout_id} is replaced", metavar="TEMPLATE"
    )
    ckpt_step: int | None = flag(None, "resume from the checkpoint of this rollout instead of the newest")
    no_save_optim: bool = flag(False, "leave the optimizer state out of checkpoints")
    no_load_optim: bool = flag(False, "resume the weights only, with a fresh optimizer")
    no_load_rng: bool = flag(False, "resume without the random state")
    finetune: bool = flag(False, "take the weights of --load only: fresh optimizer, random state and rollout count")
    start_rollout_id: int = flag(None, "number of the first rollout", auto="one after the checkpoint's, else 0")
    override_lr_scheduler: bool = flag(False, "on resume the flags win over the checkpoint's schedule")

    # the checkpoint under --load to resume from; None: a fresh start
    resume_directory: str | None = resolved(None)


def holds_model(folder: str | Path) -> bool:
    """Whether ``folder`` is a Hugging Face model's, and no folder of checkpoints."""
    return (Path(folder) / "config.json").is_file() and not (Path(folder) / MARKER).is_file()


def find_checkpoint(load: str | Path, step: int | None = None) -> Path | None:
    """The checkpoint under ``load`` to resume from: that of rollout ``step``, or the newest complete one.

    Returns:
        its folder, or None when ``load`` is absent or empty (the first run of a script that resumes).

    Raises:
        ValueError: ``load`` holds something else, or the checkpoint asked for is not there.
    """
    root = Path(load)
    marker = root / MARKER
    if not marker.is_file():
        cut_short = any(root.glob("iter_*"))  # the first save
        if cut_short or not root.is_dir() or not any(root.iterdir()):
            if step is not None:
                raise ValueError(f"{load}: holds no complete checkpoint, so not that of rollout {step} (--ckpt-step)")
            return None
        kind = "a Hugging Face model, without rollouts to choose from" if holds_model(root) else "not a checkpoint"
        raise ValueError(f"{load}: has no {MARKER}: it is {kind}")
    word = str(step) if step is not None else marker.read_text().strip()
    directory = root.absolute() / f"iter_{word:0>7}"
    # a save that was cut short while it took the place of an earlier one leaves that under the second name
    for found in (directory, directory.with_name(directory.name + ".replaced")):
        if (found / ROLLOUT_STATE).is_file():
            return found
    if any(root.glob(f"iter_*/{ROLLOUT_STATE}")):
        raise ValueError(f"{load}: {directory.name} is not there, or not complete")
    raise ValueError(
        f"{load}: {MARKER} says {word}, but there is no {directory.name}/{ROLLOUT_STATE}: a Megatron checkpoint?"
    )
