"""Several ranks, each in a process of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp


def start_ranks(work: Callable[..., None], given: tuple[Any, ...], ranks: int) -> None:
    """``work(rank, *given)`` in so many processes at once; an error of one of them is raised here.

    They are forks of one process that has imported what takes long to import, and has done nothing else.
    """
    multiprocessing.set_forkserver_preload(["hypothesis", "pytest", "slimelite.training.trainer"])
    mp.start_processes(work, given, nprocs=ranks, start_method="forkserver")
