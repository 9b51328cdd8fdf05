"""What went wrong in Ray, in one sentence, with what to do about it."""

from __future__ import annotations

import re
from pathlib import Path

from ray.exceptions import (
    NodeDiedError,
    ObjectStoreFullError,
    OutOfDiskError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RuntimeEnvSetupError,
)

from slimelite.cluster.cluster import ClusterError

NO_MEMORY = (
    "lower --max-tokens-per-gpu, --rollout-batch-size or --sglang-max-running-requests, use fewer ranks and engines, "
    "or end other jobs on the machine"
)
NO_ROOM = "make room in /tmp and /dev/shm, or export RAY_TMPDIR=<a folder with a short name on another disk>"
ENDED = "Worker unexpectedly exits"


def explained(error: RayError, worker: str, log: Path | None = None) -> ClusterError:
    """``error`` as one message; Ray's own words are a note, which log.txt shows."""
    said = last_line(error)
    if isinstance(error, OutOfMemoryError):
        what = f"{worker} was ended by Ray because the machine's memory was nearly full: {NO_MEMORY}"
    elif isinstance(error, OutOfDiskError | ObjectStoreFullError):
        what = f"{worker}: Ray has no room left for what the workers exchange: {NO_ROOM}"
    elif isinstance(error, RuntimeEnvSetupError):
        what = f"{worker} could not be given its environment (--train-env-vars): {said}"
    elif isinstance(error, NodeDiedError):
        what = f"{worker}: its machine is gone: {said}"
    elif isinstance(error, RayActorError) and ENDED in said:
        what = (
            f"{worker} died without an error: it was killed (SIGKILL; `dmesg` says whether for want of memory, then "
            f"{NO_MEMORY}) or it crashed"
        )
    elif isinstance(error, RayActorError):
        what = f"{worker} died: {said}"
    else:
        what = f"{worker}: Ray failed: {type(error).__name__}: {said}"
    one = ClusterError(what if log is None else f"{what}; its log is {log}")
    one.add_note(str(error))
    return one


def last_line(error: BaseException) -> str:
    """Of an actor that failed in its constructor the last line is the error itself."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
