"""What a process keeps of the heap memory that it frees, for which glibc is needed, and how often Python looks for
unreachable objects.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

# larger blocks are mapped one by one, whatever a trainer keeps: the most that glibc allows, and with
# --gradient-checkpointing, which gives time for memory [bytes]
LARGEST_IN_HEAP, LARGEST_IN_TIGHT_HEAP = 2**25, 2**20
# parameters of mallopt, from malloc.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# while a process loads, Python looks for unreachable objects after this many new ones; otherwise after 700
SELDOM = 50_000


@contextmanager
def loading() -> Iterator[None]:
    """While this lasts, Python seldom looks for unreachable objects, for what is imported stays.

    To look through all modules again and again was a tenth to a fifth of the CPU time of a trainer's imports.
    """
    usual = gc.get_threshold()
    gc.set_threshold(SELDOM, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def set_heap(*, mapped_above: int, trimmed_above: int) -> None:
    """Set which blocks the system maps one by one, outside the heap, and how much free memory at the heap's end goes
    back to the system at once; both [bytes], and -1: never.
    """
    if GLIBC is not None:
        GLIBC.mallopt(M_MMAP_THRESHOLD, mapped_above)
        GLIBC.mallopt(M_TRIM_THRESHOLD, trimmed_above)


def keep_freed_memory(*, tight: bool) -> None:
    """Let the heap of this process keep what is freed, for the next tensors; ``tight``: only for those up to 1 MiB.

    glibc maps each larger tensor from the system anew and returns it when it is freed. Every page then costs a fault: a
    third of the CPU time of a step of a tiny model, a tenth at 135M parameters. But its heap seldom has a hole for an
    aligned tensor of the same size: at 135M parameters a step takes up to 1.5 times the memory of its tensors.
    """
    set_heap(mapped_above=LARGEST_IN_TIGHT_HEAP if tight else LARGEST_IN_HEAP, trimmed_above=-1)


def return_freed_memory(*, above: int = 2**30) -> None:
    """Return freed heap memory to the system, where other processes may need it, if it is more than ``above`` [bytes].

    The default leaves a trainer what its next rollout will use again; activations of a large micro-batch are gigabytes.
    """
    if GLIBC is None:
        return
    counts = hasattr(GLIBC, "mallinfo2")  # since glibc 2.33
    if not counts or GLIBC.mallinfo2().fordblks > above:
        GLIBC.malloc_trim(0)


class _MallocInfo(ctypes.Structure):
    """What glibc's ``mallinfo2`` returns about the heap; only ``fordblks``, its free bytes, is read here."""

    _fields_: ClassVar = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")),
        *((name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")),
    ]


def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is None or not hasattr(libc, "mallopt"):  # musl has none
        return None
    if hasattr(libc, "mallinfo2"):
        libc.mallinfo2.restype = _MallocInfo
    return libc


GLIBC = _glibc()
