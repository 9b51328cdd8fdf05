"""Waiting for what happens, and not for a time in which it should have happened."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import psutil


async def soon(happened: Callable[[], object]) -> None:
    """Wait until it has happened, for two minutes at most."""
    for _ in range(12000):
        if happened():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen")


def worked(pid: int) -> float:
    """Processor time that a process has used in user mode [s]."""
    return float(psutil.Process(pid).cpu_times().user)


async def works(pid: int, idle: float) -> None:
    """Wait until a process has computed for 0.3 s more than ``idle``, its `worked` when it had nothing to do. Then it
    is in the middle of what takes long, however slow the machine is."""
    while worked(pid) < idle + 0.3:
        await asyncio.sleep(0.02)
