"""Saves and loads trainer state with torch.distributed.checkpoint. The number of ranks that load a checkpoint may
differ from the number of ranks that saved it."""

from __future__ import annotations

import json
import logging
import pickle
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager

from slimelite.arguments import LoraArgs
from slimelite.base.files import write_text
from slimelite.models.checkpoints import (
    BASE,
    METADATA,
    REMEDY,
    STATE_FILE,
    Checksums,
    checksums,
    part_file,
    read_state,
    without_moments,
    write_state,
)
from slimelite.training.learner import Learner, Progress
from slimelite.training.lora import PARTS
from slimelite.training.model import LanguageModel
from slimelite.training.optimizer import LrSchedule
from slimelite.training.parallel import World, reshard

logger = logging.getLogger(__name__)

# bytes that torch writes in addition to each tensor's data
OVERHEAD = 1900
# key of the state file; its value is the result of `_adapter`
ADAPTER = "lora"


State = dict[str, dict[str, Tensor]]
# weights of the reference model by name; None if training does not update it (--ref-update-interval)
Reference = Mapping[str, Tensor] | None


@dataclass(frozen=True)
class Snapshot:
    """The content of a learner's checkpoint. ``tensors``: {"part": {"name": tensor}}. ``facts``: the values that are
    not tensors, such as the progress."""

    rank: int
    tensors: State
    facts: dict[str, object]

    def staged(self, stager: DefaultStager) -> Snapshot:
        """A copy in host memory. Training does not change the copy."""
        tensors = stager.stage(self.tensors)
        assert isinstance(tensors, dict)
        return replace(self, tensors=tensors)


def snapshot(learner: Learner[LanguageModel], reference: Reference = None) -> Snapshot:
    """The weights, optimizer state (not with ``--no-save-optim``), random states and progress of ``learner``. The
    result contains the tensors themselves, not copies of them."""
    facts = {**asdict(learner.progress), BASE: learner.args.hf_checkpoint, ADAPTER: _adapter(learner.args)}
    return Snapshot(learner.world.rank, _state(learner, reference), facts)


def save(directory: Path, saved: Snapshot, group: dist.ProcessGroup | None = None) -> Checksums:
    """Write ``saved`` to ``directory`` (collective over ``group``; None: over all ranks).

    Returns:
        the checksums of the files that this rank wrote.

    Raises:
        OSError: the files cannot be written.
    """
    try:
        dcp.save(saved.tensors, checkpoint_id=directory, process_group=group)
    except CheckpointException as error:  # it is not an Exception, and its text has several tracebacks
        cause = failure(error)
        raise (cause if isinstance(cause, OSError) else OSError(f"{type(cause).__name__}: {cause}")) from error
    files = list(directory.glob(f"__{saved.rank}_*.distcp"))
    if saved.rank == 0:
        write_state(directory, saved.facts)
        files += [directory / STATE_FILE, directory / METADATA]
    return checksums(directory, files)


def save_parts(directory: Path, parts: Mapping[str, Snapshot], group: dist.ProcessGroup | None = None) -> Checksums:
    """Write each part of a checkpoint into its folder; see `save`."""
    written = Checksums()
    for folder, part in parts.items():
        sums = save(directory / folder, part, group)
        written |= {str(Path(folder) / name): each for name, each in sums.items()}
    return written


def save_and_tell(directory: Path, parts: Mapping[str, Snapshot], group: dist.ProcessGroup) -> None:
    """Call `save_parts`, then write the checksums that it returns, or its error, to a file. `cluster.saving.Saving`
    waits for this file."""
    file = part_file(directory, dist.get_rank())
    try:
        result: dict[str, object] = {"checksums": save_parts(directory, parts, group)}
    except Exception as error:  # for example of a full disk; the driver raises it
        result = {"error": f"{type(error).__name__}: {error}", "errno": getattr(error, "errno", None)}
        for part in directory.rglob(f"__{dist.get_rank()}_*.distcp"):
            part.unlink()  # so a full disk has space for the message
    while directory.is_dir():  # if the folder is gone, the driver no longer waits
        try:
            write_text(file, json.dumps(result))
            break
        except OSError:
            logger.exception("%s cannot be written; trying again", file)
            time.sleep(1)


def size(learner: Learner[LanguageModel], reference: Reference = None) -> int:
    """The approximate number of bytes that `save` writes on all ranks together."""
    tensors = [tensor for part in _state(learner, reference).values() for tensor in part.values()]
    return sum(tensor.numel() * tensor.element_size() + OVERHEAD for tensor in tensors)


def load(
    directory: Path,
    learner: Learner[LanguageModel],
    reference: Reference = None,
    *,
    weights_only: bool = False,
) -> None:
    """Load a checkpoint of `save` into ``learner`` (collective).

    With ``--no-load-optim``, the optimizer state is not loaded. With ``--no-load-rng``, the random states are not
    loaded. With ``weights_only`` or ``--finetune``, neither optimizer state nor random states are loaded, and a new
    learning-rate schedule starts. With ``--override-lr-scheduler``, this run's schedule continues from the saved step.
    Otherwise the saved schedule continues, and a warning names the flags of this run that differ from it.

    Raises:
        ValueError: the checkpoint is missing or damaged, belongs to another model or optimizer, or does not contain
            optimizer state.
    """
    if not (directory / STATE_FILE).is_file():
        raise ValueError(f"{directory} has no trainer state; --load needs a checkpoint that --save wrote")
    args, world = learner.args, learner.world
    weights_only = weights_only or args.finetune
    progress, own = _read_progress(directory), learner.progress.schedule
    _check_adapter(directory, args)
    reader = CheckpointReader(directory)
    state = _weights(learner, reference)
    _check_weights(directory, reader.tensors, state)
    if not (args.no_load_optim or weights_only):
        _check_optimizer(directory, reader.tensors, args.optimizer, begun=progress.steps > 0)
        state["optimizer"] = _optimizer_slots(reader.tensors, state["model"])
    if not (args.no_load_rng or weights_only):
        state["rng"] = {k: v for k, v in _random_states(world).items() if f"rng.{k}" in reader.tensors}
    reader.load(state)
    reshard(learner.model)
    _restore_optimizers(learner, state.get("optimizer", {}))
    try:
        for name, random_state in state.get("rng", {}).items():
            (torch.cuda if name.startswith("cuda") else torch).set_rng_state(random_state)
    except RuntimeError as error:
        raise ValueError(
            f"{directory}: the random state is damaged ({error}); add --no-load-rng to resume without it"
        ) from error
    if weights_only:
        progress.steps = 0
    if weights_only or args.override_lr_scheduler:
        progress.schedule = own
    elif world.rank == 0 and (differences := progress.schedule.differences(own, learner.lr_flags)):
        logger.warning(
            "the learning-rate schedule of the checkpoint is used, not the schedule of this run's flags: %s; add "
            "--override-lr-scheduler to use this run's flags",
            ", ".join(differences),
        )
    learner.progress = progress


def _state(learner: Learner[LanguageModel], reference: Reference) -> State:
    """The tensors of a checkpoint: {"part": {"name": tensor}}."""
    state = {**_weights(learner, reference), "rng": _random_states(learner.world)}
    return state if learner.args.no_save_optim else {**state, "optimizer": _optimizer_tensors(learner)}


def _weights(learner: Learner[LanguageModel], reference: Reference) -> State:
    trained = dict[str, Tensor](learner.model.trained())
    return {"model": trained} if reference is None else {"model": trained, "reference": dict(reference)}


def _adapter(args: LoraArgs) -> dict[str, object] | None:
    """The settings of the adapters in a checkpoint; None if the checkpoint has weights instead of adapters."""
    if not args.lora_rank:
        return None
    return {"rank": args.lora_rank, "scaling": args.lora_scaling, **({"bits": 4} if args.load_in_4bit else {})}


def _check_adapter(directory: Path, args: LoraArgs) -> None:
    """Raise ValueError if the checkpoint's adapters have other settings, or if only the checkpoint or only the run has
    adapters. Log a warning if the base model differs."""
    state, own = read_state(directory), _adapter(args)
    saved = state.get(ADAPTER)
    if saved is None and own is None:
        return
    if saved is None or own is None:
        lora = f"--lora-rank {(saved or own or {}).get('rank')}"
        raise ValueError(
            f"{directory} was saved {'without' if saved is None else 'with'} {lora}; resume it with the same setting"
        )
    if (bits := saved.get("bits")) != own.get("bits"):
        raise ValueError(
            f"{directory} was saved {'with' if bits else 'without'} --load-in-4bit; resume it with the same setting"
        )
    if saved != own:
        raise ValueError(
            f"{directory} was saved with adapters of rank {saved['rank']} and scaling {saved['scaling']}, but this "
            f"run has rank {own['rank']} and scaling {own['scaling']}; set the same --lora-rank, --lora-alpha and "
            "--lora-type"
        )
    if (base := state.get(BASE)) != args.hf_checkpoint:
        warning = "the adapters in %s were trained on the model %s, but the model of this run is %s"
        logger.warning(warning, directory, base, args.hf_checkpoint)


def _random_states(world: World) -> dict[str, Tensor]:
    """The states of this rank's random generators. Their names contain the rank, so all ranks use different names."""
    states = {f"cpu{world.rank}": torch.get_rng_state()}
    if world.device.type == "cuda":
        states[f"cuda{world.rank}"] = torch.cuda.get_rng_state()
    return states


def _read_progress(directory: Path) -> Progress:
    try:
        read = read_state(directory)
        schedule = LrSchedule(**read["schedule"])
        return Progress(int(read["rollout_id"]), int(read["steps"]), int(read["weight_version"]), schedule)
    except (KeyError, TypeError) as error:
        file = directory / STATE_FILE
        raise ValueError(f"{file}: is damaged ({type(error).__name__}: {error}); {REMEDY}") from error
    except ValueError as error:
        raise ValueError(f"{error}; {REMEDY}") from error


def _check_weights(directory: Path, saved: Collection[str], state: State) -> None:
    """Raise ValueError if the saved weights do not belong to the models in ``state``."""
    wanted = [f"{part}.{name}" for part, names in state.items() for name in names]
    if missing := [path for path in wanted if path not in saved]:
        if missing[0].startswith("reference."):
            raise ValueError(
                f"{directory} has no reference model: it was saved without --ref-update-interval; resume it without "
                "that flag"
            )
        raise ValueError(f"{directory} {_kind(missing[0])}: it has no {missing[0]}")
    if more := sorted(path for path in set(saved) - set(wanted) if path.startswith("model.")):
        raise ValueError(f"{directory} {_kind(more[0])}: it has {more[0]}, which this run's model does not have")


def _kind(name: str) -> str:
    """A part of a message: why a checkpoint and this run differ in the weight ``name``."""
    if name.rpartition(".")[2] in PARTS:
        return "was saved with adapters on other modules; set the same --lora-target-modules and --lora-exclude-modules"
    return "is a checkpoint of another model"


def _check_optimizer(directory: Path, saved: Collection[str], name: str, *, begun: bool) -> None:
    """Raise ValueError if the optimizer state is missing or belongs to another optimizer. Only the state of Muon has a
    ``momentum``.

    ``begun``: whether an optimizer step was done. Before the first step, for example while only the critic is trained,
    there is no state.
    """
    kept = {path.rpartition(".")[2] for path in saved if path.startswith("optimizer.")}
    if begun and not kept:
        raise ValueError(without_moments(directory))
    before = "muon" if "momentum" in kept else "adam"
    if kept and (before == "muon") != (name == "muon"):
        raise ValueError(
            f"{directory} was saved with --optimizer {before}, not {name}; resume with --optimizer {before}, or add "
            f"--no-load-optim to start {name} with new moments"
        )


def _optimizer_tensors(learner: Learner[LanguageModel]) -> dict[str, Tensor]:
    """The state of all optimizers: {"<weight>.<moment>": tensor}."""
    return {
        f"{name}.{key}": value
        for name, parameter in learner.model.trained().items()
        for optimizer in learner.optimizers.all
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _optimizer_slots(saved: Mapping[str, TensorStorageMetadata], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Empty tensors, sharded like their weights, for the optimizer state of a checkpoint."""
    slots = {}
    for path, entry in saved.items():
        part, _, slot = path.partition(".")
        name = slot.rpartition(".")[0]
        if part != "optimizer":
            continue
        if name not in weights:
            raise ValueError(f"a checkpoint of another model: it has {path}, which this run's model does not have")
        like = weights[name]
        if entry.size == like.shape:
            slots[slot] = torch.empty_like(like)
        else:  # a fused AdamW needs its step count on the weight's device
            slots[slot] = torch.empty(entry.size, dtype=entry.properties.dtype, device=like.device)
    return slots


def _restore_optimizers(learner: Learner[LanguageModel], state: Mapping[str, Tensor]) -> None:
    weights = learner.model.trained()
    owners = {p: o for o in learner.optimizers.all for group in o.param_groups for p in group["params"]}
    for path, value in state.items():
        name, _, key = path.rpartition(".")
        owners[weights[name]].state[weights[name]][key] = value


DO_NOT = "do not load it, and find out where it came from"
# module -> the classes that torch's writer puts into .metadata. Creating an instance of these has no side effect
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
    """A pickle names a class that is not allowed."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if name not in ALLOWED.get(module, ()):
            raise _ForeignClass(f"it names {module}.{name}")
        return super().find_class(module, name)


class CheckpointReader(dcp.FileSystemReader):
    """Torch's reader with a safe way to read ``.metadata``: it is read once, and may only contain allowed classes.
    Torch itself would unpickle any class.

    Raises:
        ValueError: ``.metadata`` is missing or damaged, or contains things that torch's writer does not write.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.directory = directory
        file = directory / METADATA
        try:
            content = _Unpickler(BytesIO(file.read_bytes())).load()
            self.tensors = {
                p: e for p, e in content.state_dict_metadata.items() if isinstance(e, TensorStorageMetadata)
            }
            others = content.state_dict_metadata.keys() - self.tensors.keys()
            self._ends: dict[str, dict[str, int]] = {path: {} for path in self.tensors}
            for key, info in content.storage_data.items():
                ends = self._ends.setdefault(key.fqn, {})
                ends[info.relative_path] = max(info.offset + info.length, ends.get(info.relative_path, 0))
            odd = not isinstance(content, Metadata) or any(
                i.transform_descriptors for i in content.storage_data.values()
            )
        except FileNotFoundError:
            raise _damaged(file, "is missing") from None
        except _ForeignClass as error:
            raise ValueError(
                f"{file}: {error}, which a checkpoint of slimelite never contains, and which could run a program: "
                f"{DO_NOT}"
            ) from error
        except Exception as error:  # unpickling a truncated file may raise anything
            raise _damaged(file, f"is damaged or cut short ({type(error).__name__}: {error})") from error
        if others or odd:
            what = f"{min(others)} is bytes instead of a tensor" if others else "it has another type of content"
            raise ValueError(
                f"{file}: {what}. A checkpoint of slimelite never contains this, and loading it could run a program: "
                f"{DO_NOT}"
            )
        self.metadata = content

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:  # noqa: ARG002
        """The metadata of the checkpoint, which the constructor has read."""
        self.metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self.metadata

    def load(self, state: State) -> None:
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
                    f"{self.directory} is a checkpoint of another model: {path} is {there} in it but {here} in this "
                    "run's model; set --hf-checkpoint to the checkpoint's model"
                )
            if sum(chunk.sizes.numel() for chunk in entry.chunks) != entry.size.numel():
                raise _damaged(self.directory / METADATA, f"is damaged: parts of {path} are missing")
            for name, end in self._ends[path].items():
                file = self.directory / name
                if file.parent != self.directory:
                    raise ValueError(f"{self.directory / METADATA}: names {name}, a file outside the checkpoint")
                if not file.is_file():
                    raise _damaged(file, "is missing")
                if file.stat().st_size < end:
                    raise _damaged(file, f"is cut short: {file.stat().st_size:,} bytes of at least {end:,}")


def failure(error: CheckpointException) -> BaseException:
    """The first of the exceptions that ranks raised.

    Raises:
        KeyboardInterrupt: the user stops the run (Ctrl-C, SIGTERM). Torch reports this interrupt like any other
            failure.
    """
    causes = [cause for cause, _ in error.failures.values()]
    for cause in causes:
        if isinstance(cause, KeyboardInterrupt):
            raise cause from None
    return causes[0]


def _damaged(place: Path, what: str) -> ValueError:
    return ValueError(f"{place}: {what}; {REMEDY}")
