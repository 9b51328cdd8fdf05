"""Trainer state through torch.distributed.checkpoint: what one number of ranks saved, another can load."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from slimelite.arguments import CheckpointArgs
from slimelite.checkpoints import REMEDY, STATE_FILE, Checksums, checksums, read_json
from slimelite.training.model import LanguageModel
from slimelite.training.optimizer import FLAGS, LrSchedule, Optimizers
from slimelite.training.parallel import World, reshard

logger = logging.getLogger(__name__)

# bytes that torch writes around each tensor
OVERHEAD = 1900


@dataclass(slots=True)
class Progress:
    """How far training is: ``rollout_id`` of the last rollout trained on, optimizer ``steps`` taken, ``weight_version``
    last pushed, and the learning rate's ``schedule``.
    """

    rollout_id: int
    steps: int
    weight_version: int
    schedule: LrSchedule


@dataclass(frozen=True, slots=True)
class Parts:
    """What a checkpoint is made of; ``reference``: when it changes in the course of training; ``lr_flags``: of the
    learning rate's schedule, see `LrSchedule.differences`.
    """

    world: World
    model: LanguageModel
    reference: LanguageModel | None
    optimizers: Optimizers
    lr_flags: Mapping[str, str] = field(default_factory=lambda: FLAGS)

    def weights(self) -> dict[str, dict[str, nn.Parameter]]:
        """The weights of each model, by name."""
        models = {"model": self.model, "reference": self.reference}
        return {key: dict(model.named_weights()) for key, model in models.items() if model is not None}


def save(directory: Path, args: CheckpointArgs, parts: Parts, progress: Progress) -> Checksums:
    """Write weights, optimizer state (unless ``--no-save-optim``), random states and progress (collective).

    Returns:
        checksums of the files that this rank wrote.

    Raises:
        OSError: they cannot be written.
    """
    try:
        dcp.save(_state(args, parts), checkpoint_id=directory)
    except CheckpointException as error:  # not an Exception, and its text is several tracebacks
        cause = failure(error)
        raise (cause if isinstance(cause, OSError) else OSError(f"{type(cause).__name__}: {cause}")) from error
    files = list(directory.glob(f"__{parts.world.rank}_*.distcp"))
    if parts.world.rank == 0:
        (directory / STATE_FILE).write_text(json.dumps(asdict(progress), indent=1))
        files += [directory / STATE_FILE, directory / METADATA]
    return checksums(directory, files)


def size(args: CheckpointArgs, parts: Parts) -> int:
    """Bytes of all that `save` writes, of all ranks together."""
    tensors = [tensor for part in _state(args, parts).values() for tensor in part.values()]
    return sum(tensor.numel() * tensor.element_size() + OVERHEAD for tensor in tensors)


def load(directory: Path, args: CheckpointArgs, parts: Parts, progress: Progress) -> Progress:
    """Read what `save` wrote into ``parts`` (collective), and return the progress to go on from.

    ``--no-load-optim``, ``--no-load-rng`` and ``--finetune`` leave parts out. The saved schedule of learning rates goes
    on, with a warning where the flags of this run differ; ``--override-lr-scheduler`` keeps that of ``progress``.

    Raises:
        ValueError: no checkpoint there, a damaged one, one of another model or optimizer, or one without optimizer
            state.
    """
    if not (directory / STATE_FILE).is_file():
        raise ValueError(f"no trainer state in {directory}; --load needs a checkpoint that --save wrote")
    saved_progress = _read_progress(directory / STATE_FILE)
    reader = CheckpointReader(directory)
    saved = reader.tensors
    state: dict[str, Any] = {**parts.weights()}
    if missing := [f"{key}.{name}" for key in state for name in state[key] if f"{key}.{name}" not in saved]:
        if missing[0].startswith("reference."):
            raise ValueError(
                f"{directory} has no reference model: it was saved without --ref-update-interval; resume it without"
            )
        raise ValueError(f"{directory} is a checkpoint of another model: it has no {missing[0]}")
    known = {f"model.{name}" for name in state["model"]}
    if more := [path for path in saved if path.startswith("model.") and path not in known]:
        raise ValueError(f"{directory} is a checkpoint of another model: it has {more[0]}, which this one does not")
    if not (args.no_load_optim or args.finetune):
        # before its first step (a policy that waits for its critic) an optimizer has no state
        if saved_progress.steps and not any(name.startswith("optimizer.") for name in saved):
            raise ValueError(f"{directory} was saved with --no-save-optim; resume it with --no-load-optim")
        _check_optimizer(directory, saved, parts.optimizers.args.optimizer)
        state["optimizer"] = _optimizer_slots(saved, state["model"])
    if not (args.no_load_rng or args.finetune):
        state["rng"] = {k: v for k, v in _random_states(parts.world).items() if f"rng.{k}" in saved}
    reader.load(state)
    reshard(parts.model)
    _restore_optimizers(parts, state.get("optimizer", {}))
    try:
        _restore_random_states(parts.world, state.get("rng", {}))
    except RuntimeError as error:
        raise ValueError(f"{directory}: its random state is damaged ({error}); --no-load-rng does without") from error
    schedule = progress.schedule
    if not (args.override_lr_scheduler or args.finetune):
        schedule = saved_progress.schedule
        if parts.world.rank == 0 and (differences := schedule.differences(progress.schedule, parts.lr_flags)):
            logger.warning(
                "the checkpoint's learning-rate schedule goes on, not this run's: %s; "
                "--override-lr-scheduler takes this run's",
                ", ".join(differences),
            )
    steps = 0 if args.finetune else saved_progress.steps
    return Progress(saved_progress.rollout_id, steps, saved_progress.weight_version, schedule)


def _state(args: CheckpointArgs, parts: Parts) -> dict[str, dict[str, Any]]:
    state: dict[str, dict[str, Any]] = {**parts.weights(), "rng": _random_states(parts.world)}
    return state if args.no_save_optim else {**state, "optimizer": _optimizer_tensors(parts)}


def _read_progress(file: Path) -> Progress:
    try:
        read = read_json(file)
        schedule = LrSchedule(**read["schedule"])
        return Progress(int(read["rollout_id"]), int(read["steps"]), int(read["weight_version"]), schedule)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{file}: is damaged ({type(error).__name__}: {error}); {REMEDY}") from error
    except ValueError as error:
        raise ValueError(f"{error}; {REMEDY}") from error


def _check_optimizer(directory: Path, saved: Mapping[str, Any], name: str) -> None:
    """Refuse optimizer state of another kind: Muon keeps a momentum, which AdamW does not have."""
    kept = {path.rpartition(".")[2] for path in saved if path.startswith("optimizer.")}
    before = "muon" if "momentum" in kept else "adam"
    if kept and (before == "muon") != (name == "muon"):
        raise ValueError(
            f"{directory} was saved with --optimizer {before}, not {name}; resume with --optimizer {before}, or add "
            f"--no-load-optim, with which {name} starts without moments"
        )


def _optimizer_tensors(parts: Parts) -> dict[str, Tensor]:
    """{"<weight>.<moment>": tensor} of all optimizers."""
    return {
        f"{name}.{key}": value
        for name, parameter in parts.model.named_weights()
        for optimizer in parts.optimizers.all
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _optimizer_slots(saved: Mapping[str, TensorStorageMetadata], weights: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """Empty tensors, sharded like their weights, for the optimizer state of a checkpoint."""
    slots = {}
    for path, entry in saved.items():
        name, _, _ = path.removeprefix("optimizer.").rpartition(".")
        if path.startswith("optimizer."):
            if name not in weights:
                raise ValueError(f"a checkpoint of another model: it has {path}, which this one does not")
            like = weights[name]
            same = entry.size == like.shape
            # a fused AdamW wants its step count on the device of the weight
            slots[path.removeprefix("optimizer.")] = (
                torch.empty_like(like)
                if same
                else torch.empty(entry.size, dtype=entry.properties.dtype, device=like.device)
            )
    return slots


def _restore_optimizers(parts: Parts, state: dict[str, Tensor]) -> None:
    weights = dict(parts.model.named_weights())
    owners = {p: o for o in parts.optimizers.all for group in o.param_groups for p in group["params"]}
    for path, value in state.items():
        name, _, key = path.rpartition(".")
        owners[weights[name]].state[weights[name]][key] = value


def _random_states(world: World) -> dict[str, Tensor]:
    """This rank's generators, by names that no other rank has."""
    states = {f"cpu{world.rank}": torch.get_rng_state()}
    if world.device.type == "cuda":
        states[f"cuda{world.rank}"] = torch.cuda.get_rng_state()
    return states


def _restore_random_states(world: World, states: dict[str, Tensor]) -> None:
    if (cpu := states.get(f"cpu{world.rank}")) is not None:
        torch.set_rng_state(cpu)
    if (cuda := states.get(f"cuda{world.rank}")) is not None:
        torch.cuda.set_rng_state(cuda)


METADATA = ".metadata"
DO_NOT = "do not load it, and ask where it came from"
# every class that torch's writer puts into it, by module; none of them does anything when it is made
ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}


class _ForeignClass(Exception):
    """A pickle names a class that is not on the list."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in ALLOWED.get(module, ()):
            raise _ForeignClass(f"asks for {module}.{name}")
        return super().find_class(module, name)


class CheckpointReader(dcp.FileSystemReader):
    """Torch's reader, with a ``.metadata`` that is read once and with an allow-list, for torch unpickles what it finds.

    Raises:
        ValueError: ``.metadata`` is missing, damaged, or holds what torch's writer does not write.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.directory = directory
        file = directory / METADATA
        try:
            found = _Unpickler(BytesIO(file.read_bytes())).load()
            self.tensors = {p: e for p, e in found.state_dict_metadata.items() if isinstance(e, TensorStorageMetadata)}
            others = found.state_dict_metadata.keys() - self.tensors.keys()
            self._ends: dict[str, dict[str, int]] = {path: {} for path in self.tensors}
            for key, info in found.storage_data.items():
                ends = self._ends.setdefault(key.fqn, {})
                ends[info.relative_path] = max(info.offset + info.length, ends.get(info.relative_path, 0))
            odd = not isinstance(found, Metadata) or any(i.transform_descriptors for i in found.storage_data.values())
        except FileNotFoundError:
            raise _damaged(file, "is missing") from None
        except _ForeignClass as error:
            raise ValueError(
                f"{file}: {error}, which no checkpoint of slimelite does and which could run a program: {DO_NOT}"
            ) from error
        except Exception as error:  # whatever a pickle that was cut short leads to
            raise _damaged(file, f"is damaged or cut short ({type(error).__name__}: {error})") from error
        if others or odd:
            what = f"{min(others)} is bytes instead of a tensor" if others else "it is of another kind"
            raise ValueError(
                f"{file}: {what}. No checkpoint of slimelite is like that, and bytes could run a program: {DO_NOT}"
            )
        self.metadata = found

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        """What was read when the reader was made."""
        self.metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self.metadata

    def load(self, state: dict[str, Any]) -> None:
        """Fill the tensors of ``state``, {"part": {"name": tensor}} (collective).

        Raises:
            ValueError: a file is missing or damaged, or a tensor has another shape.
        """
        tensors = {f"{part}.{name}": tensor for part, names in state.items() for name, tensor in names.items()}
        self._check(tensors)
        try:
            dcp.load(state, storage_reader=self)
        except (CheckpointException, Exception) as error:
            cause = failure(error) if isinstance(error, CheckpointException) else error
            reason = " ".join(str(cause).split())[:200]
            raise _damaged(self.directory, f"a part is damaged ({type(cause).__name__}: {reason})") from error

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        for path, tensor in tensors.items():
            entry = self.tensors[path]
            if entry.size != tensor.shape:
                here, there = (" x ".join(map(str, shape)) or "one number" for shape in (tensor.shape, entry.size))
                raise ValueError(
                    f"{self.directory} is a checkpoint of another model: {path} is {there} in it, and {here} in this "
                    "run's; name its model with --hf-checkpoint"
                )
            if sum(chunk.sizes.numel() for chunk in entry.chunks) != entry.size.numel():
                raise _damaged(self.directory / METADATA, f"is damaged: parts of {path} are not in it")
            for name, end in self._ends[path].items():
                file = self.directory / name
                if file.parent != self.directory:
                    raise ValueError(f"{self.directory / METADATA}: names {name}, a file outside the checkpoint")
                if not file.is_file():
                    raise _damaged(file, "is missing")
                if file.stat().st_size < end:
                    raise _damaged(file, f"is cut short: {file.stat().st_size:,} bytes of at least {end:,}")


def failure(error: CheckpointException) -> BaseException:
    """What failed on a rank.

    Raises:
        KeyboardInterrupt: the run is being ended (Ctrl-C, SIGTERM), which torch takes for a failure like any other.
    """
    causes = [cause for cause, _ in error.failures.values()]
    for cause in causes:
        if isinstance(cause, KeyboardInterrupt):
            raise cause from None
    return causes[0]


def _damaged(place: Path, what: str) -> ValueError:
    return ValueError(f"{place}: {what}; {REMEDY}")
