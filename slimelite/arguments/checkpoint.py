"""Finding the checkpoint to resume from, and telling whether its files are whole, without torch."""

from __future__ import annotations

from pathlib import Path

from slimelite.arguments.checksums import CHECKSUMS, damage, read_json

# written last, names the newest complete checkpoint (slime's and Megatron's name for it)
MARKER = "latest_checkpointed_iteration.txt"


ROLLOUT_STATE = "rollout_state.json"


# of the trainer, beside its tensors
STATE_FILE = "trainer.json"


# beside the checkpoints, and in a run folder: which run writes there, see `locks.hold`
LOCK = "run.lock"


def holds_model(folder: str | Path) -> bool:
    """Whether ``folder`` is a Hugging Face model's, and no folder of checkpoints."""
    return (Path(folder) / "config.json").is_file() and not (Path(folder) / MARKER).is_file()


def find_checkpoint(load: str | Path, step: int | None = None, *, fallback: bool = False) -> tuple[Path | None, str]:
    """The checkpoint under ``load`` to resume from: that of rollout ``step``, or the newest; its files are whole.

    ``fallback``: take the newest whole one before it where they are not.

    Returns:
        its folder, or None when ``load`` is absent or empty (the first run of a script that resumes); and what the user
        should know of it, or nothing.

    Raises:
        ValueError: ``load`` holds something else, or the checkpoint is not there or damaged.
    """
    root = Path(load)
    marker = root / MARKER
    if not marker.is_file():
        _refuse_what_is_no_checkpoint(root)
        if step is not None:
            raise ValueError(f"{load}: holds no complete checkpoint, so not that of rollout {step} (--ckpt-step)")
        return None, "holds no checkpoint yet: this is a fresh start"
    word = str(step) if step is not None else marker.read_text(errors="replace").strip()
    if not any(root.glob(f"iter_*/{ROLLOUT_STATE}")):
        raise ValueError(
            f"{load}: {MARKER} says {word}, but there is no iter_{word:0>7}/{ROLLOUT_STATE}: a Megatron checkpoint?"
        )
    if not word.isdecimal():
        raise ValueError(f"{marker}: is damaged: it should have the number of a rollout; give one with --ckpt-step")
    directory = _directory(root, word)
    wrong = _whats_wrong(directory)
    if wrong is None:
        old = not (directory / CHECKSUMS).is_file()
        return directory, f"{directory.name} has no checksums (an older version wrote it): not verified" if old else ""
    earlier = sorted((p for p in root.absolute().glob("iter_*") if p.name[5:].isdecimal()), reverse=True)
    earlier = [place for place in earlier if place.name < f"iter_{word:0>7}"]
    whole = next((place for place in earlier if _whats_wrong(place) is None), None)
    if whole is None:
        raise ValueError(
            f"{wrong}; {'no checkpoint before it is whole' if earlier else 'none is before it'}: leave --load out to "
            "start anew from --hf-checkpoint, which may be a folder of --save-hf"
        )
    if not fallback:
        raise ValueError(
            f"{wrong}; the newest whole checkpoint before it is {whole.name}: go on from there with --load-fallback "
            f"or --ckpt-step {int(whole.name[5:])}"
        )
    return whole, f"{wrong}: going on from {whole.name} instead (--load-fallback)"


def _directory(root: Path, word: str) -> Path:
    """The folder of the checkpoint of rollout ``word``.

    A save that was cut short while it took the place of an earlier one leaves that under the second name.
    """
    directory = root.absolute() / f"iter_{word:0>7}"
    replaced = directory.with_name(directory.name + ".replaced")
    return replaced if not directory.is_dir() and (replaced / ROLLOUT_STATE).is_file() else directory


def _whats_wrong(directory: Path) -> str | None:
    """Which file of a checkpoint is missing or damaged, as far as can be told without torch; None: none is."""
    if not directory.is_dir():
        return f"{directory}: is not there"
    try:
        if found := damage(directory):
            return found
        read_json(directory / ROLLOUT_STATE)
        if not read_json(directory / STATE_FILE):
            return f"{directory / STATE_FILE}: is empty"
    except (ValueError, OSError) as error:  # a broken disk, no permission
        return str(error)
    return None


def _refuse_what_is_no_checkpoint(root: Path) -> None:
    """Raise ValueError unless ``root`` is absent, empty, or all it holds is a first save that was cut short."""
    if root.exists() and not root.is_dir():
        raise ValueError(f"{root}: is a file; --load takes the folder that --save wrote")
    if not root.is_dir() or any(root.glob("iter_*")) or all(path.name == LOCK for path in root.iterdir()):
        return
    kind = "a Hugging Face model, without rollouts to choose from" if holds_model(root) else "not a checkpoint"
    raise ValueError(f"{root}: has no {MARKER}: it is {kind}")
