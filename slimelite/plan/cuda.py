"""Whether GPUs, their driver and torch can compute a run. The pre-flight checks this machine, and each trainer and each
engine checks the GPUs of its own machine."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

from slimelite.base.guard import named_error
from slimelite.plan.devices import generation, this_machine

if TYPE_CHECKING:
    from types import ModuleType

# major version of CUDA -> the oldest driver that runs it (docs.nvidia.com/deploy/cuda-compatibility)
DRIVERS = {11: 450, 12: 525, 13: 580}
OLDEST = (8, 0)


def check_here(*, computes: bool) -> None:
    """Check the GPUs of this process. ``computes``: torch computes in this process. Otherwise this process only starts
    a server, and torch is not imported.

    Raises:
        ValueError: the run cannot use the GPUs.
    """
    machine = this_machine()
    problems = torch_problems(machine.driver) if computes else generation_problems(machine.capability)
    for problem in problems:
        raise ValueError(f"{socket.gethostname()}: {problem}")


def generation_problems(capability: tuple[int, int] | None) -> Iterator[str]:
    """A message if the trainer and its engines do not support GPUs of ``capability``. None: it is not known."""
    if capability is not None and generation(capability).attention is None:
        yield (
            f"--device cuda: {described(capability)} support neither bf16 nor FlashAttention, which the trainer and "
            f"its engines need; use GPUs of {_dotted(OLDEST)} or newer ({generation(OLDEST).examples}), or --device cpu"
        )


def torch_problems(driver: str | None) -> Iterator[str]:
    """Messages if torch cannot use the GPUs of this process. ``driver``: the version of the driver, if it is known."""
    import torch

    if torch.version.hip is not None:  # a build for AMD GPUs, for which there are no checks
        return
    if torch.version.cuda is None:
        yield (
            f"--device cuda: torch {torch.__version__} is a build for CPUs; install its CUDA build "
            "(docs/install.md), or use --device cpu"
        )
    elif not torch.cuda.is_available():
        yield f"--device cuda: torch cannot use the GPU here: {_no_cuda(torch, driver)}"
    else:
        capability = min(torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count()))
        yield from generation_problems(capability)
        built = torch.cuda.get_arch_list()
        if not _has_kernels(built, capability):
            yield (
                f"--device cuda: torch {torch.__version__} has no kernels for compute capability {_dotted(capability)} "
                f"of the GPU here, only for {' '.join(built)}; install a build for another CUDA"
            )


def described(capability: tuple[int, int]) -> str:
    """The GPUs of ``capability``, for messages."""
    record = generation(capability)
    return f"GPUs of compute capability {_dotted(capability)} ({record.name}: {record.examples})"


def _no_cuda(torch: ModuleType, driver: str | None) -> str:
    """The reason why CUDA does not start."""
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
        return " ".join(named_error(error).split())
    return "torch gives no reason; try nvidia-smi"


def _has_kernels(built: list[str], capability: tuple[int, int]) -> bool:
    """Whether kernels that were ``built`` for some capabilities run on ``capability``. They run if the major version is
    the same, or if they are PTX."""
    for kind, major, minor in re.findall(r"(sm|compute)_(\d+)(\d)", " ".join(built)):
        if (int(major) == capability[0] or kind == "compute") and (int(major), int(minor)) <= capability:
            return True
    return not built


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
