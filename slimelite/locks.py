"""Two runs never write into one folder: `hold` puts a lock file into it that names the run.

The file has host, process and start time. A run that was killed leaves its file behind. On the same machine it is stale
if that process is gone; on another machine, or in another container, if it is old, because a live run touches its file
every minute.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from slimelite.checkpoints import LOCK
from slimelite.files import named
from slimelite.lifecycle import is_gone, this_process

logger = logging.getLogger(__name__)

BEAT_S = 60
STALE_S = 600


@contextmanager
def hold(folders: dict[str, str | None]) -> Iterator[None]:
    """Lock ``folders``, {flag: folder}, until the block ends; missing folders are created.

    Raises:
        ValueError: a run that may still be alive has locked one of them.
    """
    places = {Path(folder).resolve(): flag for flag, folder in folders.items() if folder is not None}
    over = threading.Event()
    with ExitStack() as stack:
        held = [stack.enter_context(_held(folder, flag)) for folder, flag in places.items()]
        stack.callback(over.set)
        threading.Thread(target=_beat, args=(held, over), name="locks", daemon=True).start()
        yield


@contextmanager
def _held(folder: Path, flag: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    folder.mkdir(parents=True, exist_ok=True)
    path, mine = folder / LOCK, _this_run()
    while not _create(path, mine):
        holder, age = _read(path)
        if holder is None:
            continue  # another run has removed it meanwhile
        if not _is_stale(holder, mine, age):
            raise ValueError(
                f"{flag} {folder}: another run writes there{_whose(holder)}, last seen {age:.0f} s ago. Name another "
                f"folder; if that run is over, remove {path}"
            )
        _remove(path, holder)
    try:
        yield path, mine
    finally:
        _remove(path, mine)


def _create(path: Path, mine: dict[str, Any]) -> bool:
    """Create the lock file; False if it exists already."""
    try:
        file = path.open("x", encoding="utf-8")
    except FileExistsError:
        return False
    try:
        with named(path), file:
            json.dump(mine, file)
    except BaseException:  # also when the run is interrupted
        path.unlink()
        raise
    return True


def _read(path: Path) -> tuple[dict[str, Any] | None, float]:
    """The run that holds the lock, or None, and the age of the lock file by the disk's clock [s]."""
    try:
        seen = path.stat().st_mtime
        text = path.read_text()
    except FileNotFoundError:
        return None, 0.0
    with tempfile.TemporaryFile(dir=path.parent) as now:
        age = os.fstat(now.fileno()).st_mtime - seen
    try:
        return dict(json.loads(text)), age
    except (ValueError, TypeError):
        return {"text": text}, age


def _whose(holder: dict[str, Any]) -> str:
    if not holder.keys() >= {"pid", "host", "time"}:
        return f", or left {LOCK} half written"
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["time"]))
    return f": process {holder['pid']} on {holder['host']}, since {began}"


def _is_stale(holder: dict[str, Any], mine: dict[str, Any], age: float) -> bool:
    here = all(holder.get(key) == mine[key] for key in ("host", "boot", "pids"))
    return is_gone(holder) if here else age > STALE_S


def _remove(path: Path, holder: dict[str, Any]) -> None:
    """Remove the lock only if it is that of ``holder``: two runs may find the same stale lock."""
    aside = path.with_name(f"{LOCK}.{os.getpid()}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return
    if _read(aside)[0] == holder:
        aside.unlink()
    else:
        aside.rename(path)


def _this_run() -> dict[str, Any]:
    """This process, with boot and process namespace: a process id is unique only within these."""
    boot, pids = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    place = {
        "boot": boot.read_text().strip() if boot.exists() else "",
        "pids": os.readlink(pids) if pids.exists() else "",
    }
    return place | this_process() | {"time": round(time.time())}


def _beat(held: list[tuple[Path, dict[str, Any]]], over: threading.Event) -> None:
    while not over.wait(BEAT_S):
        for path, mine in held:
            with suppress(OSError):  # whatever writes to the disk reports its errors
                if _read(path)[0] == mine:
                    os.utime(path)
                elif not over.is_set():
                    logger.error("%s: another run writes there now; end one of the two", path)
