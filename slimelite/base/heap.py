"""Settings of a process's memory: the freed heap memory that it keeps (this needs glibc), and how often Python's
garbage collector runs.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

# larger blocks are always mapped one by one [bytes]: the maximum of glibc; and a lower limit for
# --gradient-checkpointing, which uses more time to save memory
LARGEST_IN_HEAP, LARGEST_IN_TIGHT_HEAP = 2**25, 2**20
# parameters of mallopt, from malloc.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# while a process loads, the garbage collector runs after this many new objects; otherwise after 700
SELDOM = 50_000


@contextmanager
def loading() -> Iterator[None]:
    """Run Python's garbage collector seldom inside this block. Imported modules stay in memory, so garbage collection
    would find little.

    With Python's default setting, garbage collection took a tenth to a fifth of the CPU time of a trainer's imports.
    """
    usual = gc.get_threshold()
    gc.set_threshold(SELDOM, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def set_heap(*, mapped_above: int, trimmed_above: int) -> None:
    """Set two limits in bytes; -1 means never. Memory blocks above ``mapped_above`` are mapped one by one, outside the
    heap. Free memory above ``trimmed_above`` at the end of the heap is returned to the system at once."""
    if GLIBC is not None:
        GLIBC.mallopt(M_MMAP_THRESHOLD, mapped_above)
        GLIBC.mallopt(M_TRIM_THRESHOLD, trimmed_above)


def keep_freed_memory(*, tight: bool) -> None:
    """Let the heap of this process keep freed memory for the next tensors. ``tight``: keep only the memory of tensors
    up to 1 MiB.

    By default, glibc gets the memory of each large tensor from the system, and returns it when the tensor is freed.
    Every page of a new tensor then causes a page fault. Page faults take a third of the CPU time of a step of a tiny
    model, and a tenth at 135M parameters. The kept memory has a price: the heap seldom puts an aligned tensor into the
    hole of a freed tensor of the same size. At 135M parameters, a step therefore takes up to 1.5 times the memory of
    its tensors.
    """
    set_heap(mapped_above=LARGEST_IN_TIGHT_HEAP if tight else LARGEST_IN_HEAP, trimmed_above=-1)


def return_freed_memory(*, above: int = 2**30) -> None:
    """If more than ``above`` bytes of the heap are free, return them to the system for other processes.

    The default of ``above`` keeps the memory that a trainer's next rollout will use again. A large micro-batch has
    gigabytes of activations.
    """
    if GLIBC is None:
        return
    counts = hasattr(GLIBC, "mallinfo2")  # since glibc 2.33
    if not counts or GLIBC.mallinfo2().fordblks > above:
        GLIBC.malloc_trim(0)


class _MallocInfo(ctypes.Structure):
    """The result of glibc's ``mallinfo2`` about the heap. Only ``fordblks``, the free bytes, is read here."""

    _fields_: ClassVar = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")),
        *((name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")),
    ]


def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is None or not hasattr(libc, "mallopt"):  # musl has no mallopt
        return None
    if hasattr(libc, "mallinfo2"):
        libc.mallinfo2.restype = _MallocInfo
    return libc


GLIBC = _glibc()
