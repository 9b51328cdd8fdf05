"""GPUs of this machine, counted without importing torch; the device, the ranks and the places of engines."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimelite.arguments.model import EnginePlace
from slimelite.arguments.sources import load_yaml
from slimelite.arguments.vocabulary import known_tables, sglang_options
from slimelite.engines.registry import ENGINES
from slimelite.plan.devices import Device, planned, recognized

if TYPE_CHECKING:
    from slimelite.arguments.derive import Draft


@dataclass(frozen=True)
class Machine:
    """How many GPUs this process may use, whether SGLang is installed; memory and kind of the smallest, if known; the
    lowest compute ``capability``, and the version of the ``driver``.
    """

    gpus: int
    sglang: bool = False
    gpu_bytes: int | None = None
    device: Device | None = None
    capability: tuple[int, int] | None = None
    driver: str | None = None


def this_machine(plan_gpu: str | None = None) -> Machine:
    """The machine of this process, or one with SGLang and the GPUs of ``--plan-gpu``; only the start of the run shows
    whether CUDA works on its GPUs.

    Raises:
        ValueError: ``plan_gpu`` names no GPU.
    """
    sglang = importlib.util.find_spec("sglang") is not None
    if plan_gpu:
        device, count = planned(plan_gpu)
        return Machine(count, True, device.bytes, device, device.capability)
    gpus = _count_gpus()
    return replace(_nvidia_smi(), gpus=gpus, sglang=sglang) if gpus else Machine(0, sglang)


def _count_gpus() -> int:
    devices = len(list(Path("/dev").glob("nvidia[0-9]*"))) or int(Path("/dev/dxg").exists())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return devices
    return min(devices, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))


@cache
def _nvidia_smi() -> Machine:
    """What nvidia-smi says of the GPUs; drivers before 510 do not tell the compute capability."""
    for fields in (
        ["memory.total", "driver_version", "compute_cap", "name"],
        ["memory.total", "driver_version", "name"],
    ):
        # without persistence mode nvidia-smi takes seconds
        command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
            lines = [line.split(",", len(fields) - 1) for line in answer.splitlines() if line.strip()]
            rows = [dict(zip(fields, map(str.strip, cells), strict=True)) for cells in lines]
            smallest = min(rows, key=lambda row: int(row["memory.total"]))
            device = recognized(smallest["name"])
            lowest = min((_capability(row["compute_cap"]) for row in rows if "compute_cap" in row), default=None)
        except (OSError, subprocess.SubprocessError, ValueError):
            continue
        capability = lowest or (device.capability if device else None)
        return Machine(0, False, int(smallest["memory.total"]) * 2**20, device, capability, smallest["driver_version"])
    return Machine(0)


def _capability(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


def derive_devices(draft: Draft) -> None:
    """The device, the training ranks of a node, and whether trainer and engines give memory back."""
    args, gpus = draft.args, draft.machine.gpus
    if args.device == "auto":
        found = f"{gpus} GPU(s) {'of --plan-gpu' if args.plan_gpu else 'found'}" if gpus else "no GPU found"
        draft.set("device", "cuda" if gpus else "cpu", found)
    cuda = draft.args.job.gpus
    draft.default("distributed_backend", "nccl" if cuda else "gloo", f"on {draft.args.device}")
    if not cuda and draft.args.distributed_backend == "nccl":
        draft.set("distributed_backend", "gloo", "nccl needs GPUs")
    per_node, why = 1, "one rank on a CPU"
    if cuda:
        taken = 0 if args.colocate or not args.job.engines else (args.rollout_num_gpus or 0)
        per_node, why = (
            max(1, min(8, gpus) - taken),
            f"{gpus} GPU(s) here" + (f", {taken} of them for engines" if taken else ""),
        )
    draft.default("actor_num_gpus_per_node", per_node, why)
    if args.offload:
        draft.default("offload_train", True, "--offload")
        draft.default("offload_rollout", True, "--offload")
    turns = cuda and draft.args.colocate
    for name in ("offload_train", "offload_rollout"):
        if not cuda and getattr(draft.args, name):
            draft.set(name, False, "on a CPU there is only host memory")
        draft.default(
            name, turns, "trainer and engines take turns on the GPUs" if turns else "nobody else needs the memory"
        )


def derive_engines(draft: Draft) -> None:
    """Which inference engine, how many, and how often they get weights."""
    args = draft.args
    if not args.async_rollout and args.update_weights_interval > 1:
        draft.set("update_weights_interval", 1, "without --async-rollout every rollout is made with the newest weights")
    cuda = args.job.gpus
    repeats = ENGINES["sglang"].repeats_with(draft.settings.sglang)
    if args.rollout_backend == "auto":
        if args.rollout_external_engine_addrs:
            draft.set("rollout_backend", "sglang", "--rollout-external-engine-addrs")
        elif cuda and draft.machine.sglang and args.deterministic_mode and not repeats:
            draft.set("rollout_backend", "embedded", "SGLang repeats with --sglang-enable-deterministic-inference only")
        elif cuda and draft.machine.sglang:
            planned_for = "--plan-gpu plans a machine with SGLang; --rollout-backend embedded plans without"
            draft.set("rollout_backend", "sglang", planned_for if args.plan_gpu else "GPUs, and SGLang is installed")
        else:
            draft.set("rollout_backend", "embedded", "SGLang is not installed" if cuda else "no GPU")
    ranks = args.training_ranks
    if servers := len(args.rollout_external_engine_addrs):
        draft.set("rollout_num_gpus", 0, "--rollout-external-engine-addrs: the servers' GPUs are not ours")
        draft.set("num_engines", servers if args.job.engines else 0, "--rollout-external-engine-addrs")
        return
    if args.colocate:
        draft.default("rollout_num_gpus", ranks, "--colocate: the GPUs of training")
        if cuda and draft.args.job.servers and draft.args.rollout_num_gpus > ranks:
            draft.set("rollout_num_gpus", ranks, f"--colocate: the engines share the GPUs of {ranks} training rank(s)")
    elif not args.job.engines:
        draft.default("rollout_num_gpus", 0, "no engine runs")
    elif not cuda:
        draft.default("rollout_num_gpus", args.rollout_num_gpus_per_engine, "one engine on a CPU")
    elif not args.job.trains:
        draft.default("rollout_num_gpus", ranks, "--debug-rollout-only: every GPU")
    elif args.rollout_num_gpus is None:
        none = "" if draft.machine.gpus else "; no GPU is found here, and --device cpu needs none"
        draft.complain(
            "--rollout-num-gpus",
            f"is missing: give inference GPUs of its own, or share those of training with --colocate{none}",
        )
        draft.args = replace(draft.args, rollout_num_gpus=ranks)
    total, width = draft.args.rollout_num_gpus, args.rollout_num_gpus_per_engine
    if args.sglang_config and draft.args.job.servers:
        return  # its groups say how many engines there are, and how wide
    if width < 1 or total % width:
        draft.complain("--rollout-num-gpus", f"{total} is not a multiple of --rollout-num-gpus-per-engine {width}")
        return
    draft.set("num_engines", total // width if args.job.engines else 0, f"{total} / {width} of one engine")


OPTION = "--sglang-config"
MODEL_KEYS = {"name", "model_path", "num_gpus_per_engine", "server_groups", "engine_groups", "update_weights"}
GROUP_KEYS = {"worker_type", "num_gpus", "num_gpus_per_engine", "overrides"}


def derive_engine_groups(draft: Draft) -> None:
    """A place for each engine of ``--sglang-config``; settings that are not supported become problems.

    The file lists groups of engines, each with a size and settings of its own, in slime's format::

        sglang:
          - name: actor
            server_groups:
              - {worker_type: regular, num_gpus: 4, num_gpus_per_engine: 2, overrides: {mem_fraction_static: 0.6}}
              - {worker_type: regular, num_gpus: 2, num_gpus_per_engine: 1}
              - {worker_type: placeholder, num_gpus: 2}      # GPUs that stay free
    """
    args = draft.args
    if args.sglang_config is None or not args.job.servers:
        return
    content = load_yaml(args.sglang_config, OPTION, draft.settings)
    if content is None:
        return
    try:
        places = tuple(_places(draft, content))
    except ValueError as error:
        draft.complain(OPTION, f"{args.sglang_config}: {error}")
        return
    draft.set("engine_places", places, f"{OPTION} {args.sglang_config}")
    draft.set("num_engines", len(places) if args.job.engines else 0, OPTION)


def _places(draft: Draft, content: object) -> Iterator[EnginePlace]:
    args = draft.args
    models = content.get("sglang") if isinstance(content, dict) else None
    if not isinstance(models, list) or not models or not all(isinstance(model, dict) for model in models):
        raise ValueError("needs sglang: a list of models, each with its server_groups")
    for model in models:
        _check_keys(f"model {model.get('name')!r}", model, MODEL_KEYS)
    ours = [model for model in models if _is_policy(model, args.hf_checkpoint)]
    if frozen := [str(model.get("name")) for model in models if model not in ours]:
        raise ValueError(
            f"model {', '.join(map(repr, frozen))} is frozen, and only engines of the policy run here: start a server "
            "for it yourself, which a reward (--rm-url) or a generate function asks"
        )
    if len(ours) > 1:
        raise ValueError(f"{len(ours)} models are the policy; put their server_groups under one")
    width = ours[0].get("num_gpus_per_engine") or args.rollout_num_gpus_per_engine
    groups = ours[0].get("server_groups") or ours[0].get("engine_groups")
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise ValueError(f"model {ours[0].get('name')!r} needs server_groups: a list")
    first = 0
    for number, group in enumerate(groups):
        yield from _engines_of(group, f"server group {number}", first, width)
        first += group["num_gpus"]
    if first != args.rollout_num_gpus:
        raise ValueError(f"its groups have {first} GPUs, and --rollout-num-gpus is {args.rollout_num_gpus}")


def _engines_of(group: dict[str, Any], where: str, first: int, width: int) -> Iterator[EnginePlace]:
    _check_keys(where, group, GROUP_KEYS)
    kind, gpus = group.get("worker_type", "regular"), group.get("num_gpus")
    if not isinstance(gpus, int) or gpus < 1:
        raise ValueError(f"{where}: num_gpus is {gpus!r}; it is a number of GPUs, at least 1")
    if kind == "placeholder":
        return
    if kind != "regular":
        raise ValueError(f"{where}: worker_type {kind} is not supported: every engine takes prompts and decodes them")
    width = group.get("num_gpus_per_engine") or width
    if gpus % width:
        raise ValueError(f"{where}: {gpus} GPUs do not divide into engines of {width}")
    overrides = {str(name).replace("-", "_"): value for name, value in (group.get("overrides") or {}).items()}
    known, set_here = {option.field for option in sglang_options().values()}, known_tables()["sglang_set_here"]
    for name in overrides:
        if name in set_here or name not in known:
            raise ValueError(f"{where}: override {name}: {set_here.get(name, 'SGLang has no such option')}")
    for engine in range(gpus // width):
        yield EnginePlace(first + engine * width, width, overrides)


def _is_policy(model: Mapping[str, object], checkpoint: str | None) -> bool:
    default = model.get("model_path") in (None, checkpoint)
    given = model.get("update_weights")
    return default if given is None else bool(given)


def _check_keys(where: str, entry: Mapping[str, object], known: set[str]) -> None:
    if unknown := sorted(set(entry) - known):
        raise ValueError(f"{where}: unknown keys {', '.join(unknown)}; it takes {', '.join(sorted(known))}")
