"""Checks of the GPUs that a run would use: their number, their generation, and whether torch can use them."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from slimelite.arguments import Args, ClusterArgs
from slimelite.plan.devices import Machine, generation
from slimelite.preflight.findings import Findings, one_line

if TYPE_CHECKING:
    from types import ModuleType

# major version of CUDA -> the oldest driver that runs it (docs.nvidia.com/deploy/cuda-compatibility)
DRIVERS = {11: 450, 12: 525, 13: 580}
OLDEST = (8, 0)


def check_devices(args: Args, machine: Machine, findings: Findings) -> None:
    """Whether there are enough GPUs here, and whether they are new enough; without torch."""
    ranks = args.training_ranks if args.job.trains else 0
    engines = args.rollout_num_gpus if args.job.engines else 0
    needed = max(ranks, engines) if args.colocate else ranks + engines
    shared = "shared by" if args.colocate else "for"
    findings.facts.append(
        f"{needed} {args.device} device(s) {shared} {ranks} training rank(s) and {args.num_engines} engine(s)"
    )
    if not args.job.gpus:
        return
    if machine.capability and (args.plan_gpu or not _elsewhere(args)):
        _check_generation(args, machine.capability, findings)
    if needed > machine.gpus and not _elsewhere(args):
        what = f"{needed} GPUs are needed ({ranks} for training, {engines} for engines, colocate={args.colocate})"
        remedy = "lower --actor-num-gpus-per-node or --rollout-num-gpus" if machine.gpus else "take --device cpu"
        message = f"{what}, and this machine has {machine.gpus or 'none'}: {remedy}"
        (findings.warnings if args.dry_run else findings.problems).append(message)


def check_torch(args: Args, machine: Machine, findings: Findings) -> None:
    """Check that torch can use the GPUs, which are on other machines if this one is to join a Ray."""
    if not args.job.gpus or args.dry_run or _elsewhere(args):
        return
    import torch

    if torch.version.hip is not None:  # AMD's, of which nothing was read
        return
    if torch.version.cuda is None:
        findings.problems.append(
            f"--device cuda: torch {torch.__version__} is a build for CPUs; install its CUDA build (docs/install.md), "
            "or take --device cpu"
        )
    elif not torch.cuda.is_available():
        findings.problems.append(f"--device cuda: torch cannot use the GPU here: {_no_cuda(torch, machine.driver)}")
    else:
        capability = min(torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count()))
        if machine.capability is None:
            _check_generation(args, capability, findings)
        built = torch.cuda.get_arch_list()
        if not _has_kernels(built, capability):
            findings.problems.append(
                f"--device cuda: torch {torch.__version__} has no kernels for compute capability {_dotted(capability)} "
                f"of the GPU here, only for {' '.join(built)}; install a build for another CUDA"
            )


def _elsewhere(args: ClusterArgs) -> bool:
    """Whether Ray counts the GPUs, those of all nodes."""
    return args.actor_num_nodes > 1 or "RAY_ADDRESS" in os.environ


def _check_generation(args: Args, capability: tuple[int, int], findings: Findings) -> None:
    record = generation(capability)
    gpus = f"GPUs of compute capability {_dotted(capability)} ({record.name}: {record.examples})"
    if record.attention is None:
        findings.problems.append(
            f"--device cuda: {gpus} run neither bf16 nor FlashAttention, which the trainer and its engines need; take "
            f"GPUs of {_dotted(OLDEST)} or newer ({generation(OLDEST).examples}), or --device cpu"
        )
    else:
        trainer, engine = record.attention
        own = f", {engine} in SGLang" if args.job.engines and args.rollout_backend == "sglang" else ""
        findings.facts.append(f"{gpus}: attention by {trainer} in the trainer{own}")


def _no_cuda(torch: ModuleType, driver: str | None) -> str:
    """Why CUDA does not begin."""
    wanted = DRIVERS.get(int(torch.version.cuda.partition(".")[0]))
    have = int(driver.partition(".")[0]) if driver and driver[0].isdigit() else None
    if wanted and have and have < wanted:
        older = max((cuda for cuda, oldest in DRIVERS.items() if oldest <= have), default=None)
        other = f", or install torch's build for CUDA {older}" if older else ""
        needs = f"CUDA {torch.version.cuda} of torch {torch.__version__} needs {wanted} or newer"
        return f"the driver is {driver}, and {needs}: update the driver{other}"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return one_line(error)
    return "it gives no reason; nvidia-smi may"


def _has_kernels(built: list[str], capability: tuple[int, int]) -> bool:
    """Whether kernels ``built`` for some capabilities run on ``capability``: those of its major version, or PTX."""
    for kind, major, minor in re.findall(r"(sm|compute)_(\d+)(\d)", " ".join(built)):
        if (int(major) == capability[0] or kind == "compute") and (int(major), int(minor)) <= capability:
            return True
    return not built


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
