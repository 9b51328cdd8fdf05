"""Where a run reads and writes files of its own: templates and folders, tried before it starts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from slimelite.arguments.args import Args


def fill(option: str, template: str, rollout_id: int | str) -> Path:
    """The path that ``template``, the value of ``option``, stands for in a rollout.

    Raises:
        ValueError: it asks for more than ``{rollout_id}``.
    """
    try:
        return Path(template.format(rollout_id=rollout_id))
    except (LookupError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{option} {template}: {{rollout_id}} is all that is replaced, here by {rollout_id!r} "
            f"({type(error).__name__}: {error})"
        ) from error


def output_problems(args: Args) -> Iterator[str]:
    """Every place that cannot be written to; nothing is left behind there."""
    folders = {
        "--run-dir": args.run_dir,
        "--save": args.save,
        "--update-weight-disk-dir": args.update_weight_disk_dir,
        "--tensorboard-dir": args.tensorboard_dir if args.use_tensorboard else None,
        "--wandb-dir": args.wandb_dir if args.use_wandb else None,
    }
    places = [(option, Path(folder).absolute()) for option, folder in folders.items() if folder]
    if args.ci_save_grad_norm:
        places.append(("--ci-save-grad-norm", Path(args.ci_save_grad_norm).absolute().parent))
    templates: list[tuple[str, str | None, int | str]] = [
        ("--save-hf", args.save_hf, 0),
        # an evaluation has a name instead of a number
        ("--save-debug-rollout-data", args.save_debug_rollout_data, "eval_0" if args.eval_interval else 0),
    ]
    for option, template, rollout_id in templates:
        try:
            target = fill(option, template, rollout_id).absolute() if template else None
        except ValueError as error:
            yield str(error)
            continue
        if target is not None:
            places.append((option, target.parent))
        if target is not None and option == "--save-hf":
            yield from _in_the_way(args, target)
    for option, place in places:
        there = next(folder for folder in (place, *place.parents) if folder.exists())
        try:
            tempfile.TemporaryDirectory(dir=there).cleanup()
        except OSError as error:
            yield f"{option}: {place} cannot be written to: {error.strerror} ({there})"


def _in_the_way(args: Args, target: Path) -> Iterator[str]:
    """What ``--save-hf`` would have to replace."""
    if target.exists() and not target.is_dir():
        yield f"--save-hf: {target} is a file; name a folder"
    for option, model in (("--hf-checkpoint", args.hf_checkpoint), ("--tokenizer", args.tokenizer)):
        if target.is_dir() and model and Path(model).is_dir() and target.samefile(model):
            yield f"--save-hf: {target} is {option} itself, and would be written over; name another folder"
            return
