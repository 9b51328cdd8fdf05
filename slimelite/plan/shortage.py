"""What an out-of-memory error ends with: what was needed, what was there, and the flags that would have fitted."""

from __future__ import annotations

import errno
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from slimelite.arguments.machine import this_machine
from slimelite.plan.run import Plan

if TYPE_CHECKING:
    from slimelite.arguments import Args

# torch's words for the memory of the host, and for that of a GPU
HOST, GPU = "can't allocate memory", "out of memory"
CAPACITY = re.compile(r"total capacity of ([\d.]+) GiB")


def is_shortage(error: BaseException) -> bool:
    """Whether ``error`` says that there was no memory, on the host or on a GPU."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and (HOST in str(error) or GPU in str(error))
    )


def shortage(error: BaseException, args: Args) -> str:
    """What a user is told when memory runs out: the first sentence of ``error``, then what the run needs and which
    flags would make it fit (`needs_and_remedies`).
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else "there is no memory"
    first = (first.partition("DefaultCPUAllocator: ")[2] or first).partition(". ")[0]
    capacity = CAPACITY.search(str(error))
    advice = needs_and_remedies(args, int(float(capacity[1]) * 2**30) if capacity else None)
    return f"out of memory: {first}. {advice}"


def needs_and_remedies(args: Args, gpu_bytes: int | None = None) -> str:
    """One sentence, of predictions: what the run needs, what is there, and at most two flags with which it would fit.

    ``gpu_bytes``: memory of a GPU, if it is known better than by nvidia-smi.
    """
    machine = this_machine()
    plan = Plan.of(args, replace(machine, gpu_bytes=gpu_bytes or machine.gpu_bytes))
    if isinstance(plan, str) or not plan.phases():
        return "A lower --max-tokens-per-gpu or --sglang-mem-fraction-static takes less"
    phases, needs = plan.phases(), plan.needs()
    worst = max(needs, key=lambda name: needs[name][0] / needs[name][1])
    needed, there = needs[worst]
    parts = sorted(((size, name) for name, size in phases[worst].items()), reverse=True)[:3]
    listed = ", ".join(f"{name} {size / 1e9:.1f}" for size, name in parts)
    where = "that the machine and its limits allow" if plan.shared else "that tensors can use on a GPU"
    sentence = f"Predicted: {worst} needs {needed / 1e9:.1f} GB ({listed}) of the {there / 1e9:.1f} GB {where}"
    if needed <= there:
        sentence += "; other programs, or a longer sample, took the rest"
    # what fits by the prediction, and by what was just seen
    remedies = plan.remedies(min(plan.usable, 0.8 * needed)) if plan.ranks else []
    return f"{sentence}. {' or '.join(remedies) or 'More memory, or a smaller model,'} would fit (predicted)"
