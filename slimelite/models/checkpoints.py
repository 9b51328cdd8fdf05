"""Folders of checkpoints: find the checkpoint to resume from, verify its files, and write a new checkpoint. This file
does not import torch.

The sizes and CRC-32 checksums of the files are saved with a checkpoint, and are compared before it is loaded.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypedDict

from slimelite.base.files import FORMAT, LOCK, check_format, free_space, in_units, write_text

# file that names the newest complete checkpoint, and is written last (slime and Megatron use the same file name)
MARKER = "latest_checkpointed_iteration.txt"
# file that names the checkpoint of the best evaluation (--save-best)
BEST_MARKER = "best_checkpointed_iteration.txt"
# file beside the checkpoints with the values of --early-stop-metric: see `loop.Evaluations`
EVALUATIONS = "evaluations.json"
ROLLOUT_STATE = "rollout_state.json"
# entry of ROLLOUT_STATE: the value of --rollout-seed
ROLLOUT_SEED = "rollout_seed"
# file with the trainer's state, except the tensors
STATE_FILE = "trainer.json"
# entry of STATE_FILE: the model that training started from, a folder or a hub id
BASE = "base"
# file with the names of the tensors, and their positions in the other files
METADATA = ".metadata"
# file with the checksums of a checkpoint, which is written after the other files of the checkpoint. Its content:
# {"files": {"__0_0.distcp": {"bytes": 4096, "crc32": "89abcdef"}, ...}}
CHECKSUMS = "checksums.json"
BLOCK = 1 << 24
# if a checkpoint is larger, a message says that its checksums are being compared [bytes]
SAID_ABOVE = 10**10
Checksums = dict[str, "Checksum"]
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
OWN_CHECKPOINT = "is a checkpoint of --save"
REMEDY = "resume from an earlier checkpoint with --ckpt-step"


def without_moments(folder: Path) -> str:
    """The message if a run resumes the optimizer, but the checkpoint does not contain it."""
    return f"{folder} was saved with --no-save-optim; resume it with --no-load-optim"


def may_be_hub_id(path: str) -> bool:
    """Whether ``path`` may be the name of a model on the hub: ``owner/name``, or an old name such as ``gpt2``. The
    caller knows that ``path`` is not a local folder."""
    return not path.startswith((".", "/", "~")) and path.count("/") <= 1


class DamagedCheckpoint(ValueError):
    """A checkpoint cannot be used. ``wrong``: the reason. ``whole``: the newest undamaged checkpoint before it."""

    def __init__(self, wrong: str, remedy: str, whole: Path | None = None) -> None:
        super().__init__(f"{wrong}; {remedy}")
        self.wrong, self.whole = wrong, whole


class Checksum(TypedDict):
    """Size and CRC-32 (hexadecimal digits) of one file."""

    bytes: int
    crc32: str


def holds_model(folder: str | Path) -> bool:
    """Whether ``folder`` contains a Hugging Face model and is not a folder of checkpoints."""
    return (Path(folder) / "config.json").is_file() and not (Path(folder) / MARKER).is_file()


def why_no_model(folder: str | Path) -> str | None:
    """The reason why the folder is not a Hugging Face model, as the predicate of a sentence; None if it is a model."""
    root = Path(folder)
    if (root / "config.json").is_file():
        return None
    if (root / STATE_FILE).is_file() or any(root.glob(f"iter_*/{STATE_FILE}")):
        return OWN_CHECKPOINT
    return "is in Megatron format" if (root / MARKER).is_file() else "does not contain config.json"


def read_config(path: str) -> dict[str, Any]:
    """The content of config.json at ``path``, a folder or a hub id.

    Raises:
        ValueError: the file is missing or damaged.
    """
    folder = Path(path)
    if folder.is_dir():
        if (why := why_no_model(folder)) is not None:
            raise ValueError(f"{why}; name the model's Hugging Face folder")
        return read_json(folder / "config.json")
    if folder.exists():
        raise ValueError("is a file; name the folder that contains it")
    if not may_be_hub_id(path):
        raise ValueError("no such folder")
    from transformers.utils import cached_file

    try:
        file = cached_file(path, "config.json")
    except OSError as error:
        raise ValueError(f"no such folder, and {why_not_from_hub(error)}") from error
    if file is None:
        raise ValueError(
            "the repository on the Hugging Face hub does not contain config.json; name a model's repository"
        )
    return read_json(Path(file))


def why_not_from_hub(error: Exception) -> str:
    """The reason why a hub id did not give a file, as a sentence of one line. ``error``: the error of transformers."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE and isinstance(error, OSError):  # other errors come from files that are there
        return (
            "it is not in the cache of the Hugging Face hub. HF_HUB_OFFLINE is set, so the hub was not asked: unset "
            "HF_HUB_OFFLINE, or name a local folder"
        )
    return f"the Hugging Face hub did not give it: {' '.join(str(error).split())}"


def find_checkpoint(
    load: str | Path, step: int | None = None, *, fallback: bool = False, own: bool = False
) -> tuple[Path | None, str]:
    """Find the checkpoint under ``load`` to resume from, and verify its files.

    The result is the checkpoint of rollout ``step``, or the newest checkpoint if ``step`` is None.

    ``fallback``: if the checkpoint is damaged, take the newest undamaged checkpoint before it. ``own``: whether the run
    also saves to ``load``. In this case, the folder may contain other files that the run wrote before its first
    checkpoint.

    Returns:
        the checkpoint's folder, and a note for the user, which may be empty. The folder is None if ``load`` is absent
        or empty, as in the first run of a script that resumes.

    Raises:
        ValueError: ``load`` contains other files, or the checkpoint is missing.
        DamagedCheckpoint: the checkpoint is damaged, and ``fallback`` is False or finds no earlier checkpoint.
    """
    root = Path(load)
    marker = root / MARKER
    if not marker.is_file():
        if holds_model(root) or not own:
            _refuse_what_is_no_checkpoint(root)
        if step is not None:
            raise ValueError(f"{load}: does not contain the checkpoint of rollout {step} (--ckpt-step)")
        return None, "does not contain a checkpoint yet"
    word = str(step) if step is not None else marker.read_text(errors="replace").strip()
    if not any(root.glob(f"iter_*/{ROLLOUT_STATE}")):
        raise ValueError(
            f"{load}: {MARKER} names {word}, but iter_{word:0>7}/{ROLLOUT_STATE} is missing: is it a Megatron "
            "checkpoint? Give --load and --save another folder. To continue from the weights of a Megatron checkpoint, "
            "convert them to Hugging Face format with slime's tools, and give the converted folder as --hf-checkpoint"
        )
    if not word.isdecimal():
        cut = f"{marker}: is damaged: it must contain the number of a rollout"
        raise DamagedCheckpoint(cut, "name the rollout with --ckpt-step")
    directory = _directory(root, word)
    wrong = whats_wrong(directory)
    if wrong is None:
        return directory, ""
    earlier = sorted((p for p in root.absolute().glob("iter_*") if p.name[5:].isdecimal()), reverse=True)
    earlier = [place for place in earlier if place.name < f"iter_{word:0>7}"]
    whole = next((place for place in earlier if whats_wrong(place) is None), None)
    if whole is None:
        raise DamagedCheckpoint(
            wrong,
            f"{'no earlier checkpoint is complete' if earlier else 'there is no earlier checkpoint'}: leave out "
            "--load to start from the beginning with --hf-checkpoint, which may be a folder of --save-hf",
        )
    if not fallback:
        raise DamagedCheckpoint(
            wrong,
            f"{whole.name} is the newest complete checkpoint before it: resume from {whole.name} with --load-fallback "
            f"or --ckpt-step {int(whole.name[5:])}",
            whole,
        )
    return whole, f"{wrong}: resuming from {whole.name} instead (--load-fallback)"


def folder_of(save: str | Path, rollout_id: int) -> Path:
    """The folder of the checkpoint after rollout ``rollout_id``, under the folder of ``--save``."""
    return Path(save).absolute() / f"iter_{rollout_id:07d}"


def part_file(directory: Path, rank: int) -> Path:
    """A temporary file that ``rank`` writes when its part of an ``--async-save`` has ended. The file contains the
    checksums of this part, or the rank's error."""
    return directory / f"part-{rank}.json"


def model_folder(template: str, rollout_id: int | Literal["best"]) -> Path:
    """The folder of the model after rollout ``rollout_id``, or of the model with the best evaluation.

    ``template`` is ``--save-hf``. For the best evaluation, ``{rollout_id}`` becomes ``best``. A template
    without ``{rollout_id}`` gets ``-best`` at its end.
    """
    if rollout_id == "best":
        named = re.sub(r"\{rollout_id[^{}]*\}", "best", template)
        template = named if named != template else template.rstrip("/") + "-best"
    return Path(template.format(rollout_id=rollout_id)).absolute()


def best_of(root: str | Path) -> int | None:
    """The rollout whose checkpoint under ``root`` has the mark of the best evaluation; None if no checkpoint has it."""
    marker = Path(root) / BEST_MARKER
    word = marker.read_text(errors="replace").strip() if marker.is_file() else ""
    return int(word) if word.isdecimal() else None


def mark_best(final: Path, interval: int | None, retain: int | None) -> None:
    """Mark ``final`` (see `folder_of`) as the checkpoint of the best evaluation. Later saves do not remove this
    checkpoint.

    The checkpoint that was marked before is removed, unless ``--save-interval`` and ``--save-retain-interval`` keep it.
    """
    before = best_of(final.parent)
    write_text(final.parent / BEST_MARKER, str(int(final.name.removeprefix("iter_"))))
    if before is None or folder_of(final.parent, before) == final:
        return
    if interval is None or (before + 1) % interval or (retain is not None and (before + 1) % retain):
        shutil.rmtree(folder_of(final.parent, before), ignore_errors=True)


@contextmanager
def writing(final: Path, size: int, retain: int | None) -> Iterator[tuple[Path, Checksums]]:
    """A context in which a checkpoint is written. When the context ends, the checkpoint is in ``final`` (see
    `folder_of`) and is marked as the newest.

    The checkpoint's folder gets the name ``final`` only when it is complete. Until then, a checkpoint that an earlier
    run wrote to ``final`` stays valid. ``size``: the approximate size of the checkpoint [bytes]. ``retain``: see
    ``--save-retain-interval``.

    Yields:
        the folder to write to, and an empty dict for the checksums that the caller already knows. Checksums that the
            caller does not add are computed.

    Raises:
        OSError: the checkpoint cannot be written. The files of the incomplete checkpoint are removed, and the message
            names the needed and the free disk space.
    """
    root, rollout_id = final.parent, int(final.name.removeprefix("iter_"))
    directory, replaced = (final.with_name(final.name + end) for end in (".partial", ".replaced"))
    # an interrupted save leaves a .partial folder. If it was interrupted near its end, .replaced may exist too
    if replaced.is_dir() and not final.is_dir():
        replaced.rename(final)
    for left in (*root.glob("iter_*.partial"), replaced):
        if left.is_dir():
            shutil.rmtree(left)
    written: Checksums = {}
    try:
        directory.mkdir(parents=True)
        yield directory, written
        rest = (path for path in directory.rglob("*") if path.is_file())
        written |= checksums(directory, (path for path in rest if str(path.relative_to(directory)) not in written))
        write_text(directory / CHECKSUMS, json.dumps({"files": written}, indent=1))
    except BaseException as error:  # also when the run is interrupted
        # incomplete files would only fill the disk
        shutil.rmtree(directory, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        raise OSError(
            f"{final}: the checkpoint cannot be written ({error.strerror or error}); it takes about "
            f"{in_units(size)}, and {free_space(root)} are free there after the incomplete checkpoint was removed: "
            "free disk space or choose another folder for --save, and resume from the last checkpoint with --load"
        ) from error
    if final.is_dir():
        final.rename(replaced)
    directory.rename(final)
    before = (root / MARKER).read_text().strip() if (root / MARKER).is_file() else ""
    write_text(root / MARKER, str(rollout_id))
    older = before.isdecimal() and int(before) < rollout_id
    if retain is not None and older and (int(before) + 1) % retain and int(before) != best_of(root):
        shutil.rmtree(folder_of(root, int(before)), ignore_errors=True)
    if replaced.is_dir():
        shutil.rmtree(replaced)


def _directory(root: Path, word: str) -> Path:
    """The folder of the checkpoint of rollout ``word``.

    If a save was interrupted while it replaced an earlier checkpoint, the earlier checkpoint is in ``.replaced``.
    """
    directory = root.absolute() / f"iter_{word:0>7}"
    replaced = directory.with_name(directory.name + ".replaced")
    return replaced if not directory.is_dir() and (replaced / ROLLOUT_STATE).is_file() else directory


def whats_wrong(directory: Path) -> str | None:
    """A message about the first missing or damaged file of a checkpoint; None if all files are undamaged."""
    if not directory.is_dir():
        return f"{directory}: does not exist"
    if not (directory / CHECKSUMS).is_file():
        return f"{directory / CHECKSUMS}: is missing"
    try:
        if problem := damage(directory):
            return problem
        if ROLLOUT_SEED not in read_json(directory / ROLLOUT_STATE):
            return f"{directory / ROLLOUT_STATE}: is damaged: it has no {ROLLOUT_SEED}"
        read_state(directory)
    except (ValueError, OSError) as error:  # such as a disk error, or no permission to read
        return str(error)
    return None


def _refuse_what_is_no_checkpoint(root: Path) -> None:
    """Raise ValueError if ``root`` is a file, or a folder with content other than an interrupted first save."""
    if root.exists() and not root.is_dir():
        raise ValueError(f"{root}: is a file; --load takes the folder that --save wrote")
    if (
        not root.is_dir()
        or any(root.glob("iter_*"))
        or all(path.name in (LOCK, EVALUATIONS) for path in root.iterdir())
    ):
        return
    kind = "a Hugging Face model, without checkpoints of rollouts" if holds_model(root) else "not a checkpoint"
    raise ValueError(f"{root}: does not contain {MARKER}: it is {kind}")


def checksums(folder: Path, files: Iterable[Path]) -> Checksums:
    """Size and CRC-32 of ``files``, by their paths relative to ``folder``.

    Files are read in parallel. On a fast disk, each file is read at up to about 4 GB/s.
    """
    paths = sorted(files)
    with ThreadPoolExecutor(8, "checksum") as threads:
        sums = list(threads.map(_checksum, paths))
    return {str(path.relative_to(folder)): each for path, each in zip(paths, sums, strict=True)}


def damage(folder: Path) -> str | None:
    """A message about the first damaged file of the checkpoint at ``folder``; None if no file is damaged.

    ``folder`` may be a part of a checkpoint, such as the critic. The files of such a part are compared with the
    checksums of the whole checkpoint. If the part was copied without the file of checksums, the part counts as
    undamaged.
    """
    root = next((place for place in (folder, folder.parent) if (place / CHECKSUMS).is_file()), None)
    if root is None:
        return None
    try:
        expected: Checksums = read_json(root / CHECKSUMS)["files"]
        expected = {
            name: {"bytes": int(each["bytes"]), "crc32": str(each["crc32"])}
            for name, each in expected.items()
            if folder in (root / name).parents
        }
    except (KeyError, TypeError, AttributeError, ValueError):
        return f"{root / CHECKSUMS}: cannot be read"
    for name, each in expected.items():
        path = root / name
        if not path.is_file():
            return f"{path}: is missing"
        if (size := path.stat().st_size) != each["bytes"]:
            return f"{path}: has {size:,} bytes, but {each['bytes']:,} were written"
    if (size := sum(each["bytes"] for each in expected.values())) > SAID_ABOVE:
        print(f"comparing {size / 1e9:.0f} GB of {root} with its checksums", file=sys.stderr, flush=True)
    actual = checksums(root, (root / name for name in expected))
    changed = [name for name, each in expected.items() if each != actual[name]]
    return f"{root / changed[0]}: its contents have changed since it was written (CRC-32)" if changed else None


def read_state(folder: Path) -> dict[str, Any]:
    """The trainer's state without its tensors. ``folder``: a checkpoint, or a part of a checkpoint.

    Raises:
        ValueError: the file is missing, damaged, or has another format.
    """
    file = folder / STATE_FILE
    state = read_json(file)
    check_format(file, state.get("format"))
    return state


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Write the file that `read_state` reads."""
    (folder / STATE_FILE).write_text(json.dumps({"format": FORMAT, **state}, indent=1))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint or a model.

    Raises:
        ValueError: the file is missing or cut short, or is not a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: is missing") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is damaged or cut short: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: is damaged: it does not contain a JSON object")
    return content


def _checksum(path: Path) -> Checksum:
    size = crc = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK):
            size += len(block)
            crc = zlib.crc32(block, crc)
    return {"bytes": size, "crc32": f"{crc:08x}"}
