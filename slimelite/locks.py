"""Two runs never write into one folder: `hold` marks a folder with a file that says whose it is.

The file names host, process and start time. A run that was killed leaves it behind: on the same machine that is seen at
once, for the process is gone. On another machine, or in another container, it is seen by its age: a run that lives
touches its file every minute.
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
    """Hold ``folders``, {flag: folder}, made where they are not there, until the block ends.

    Raises:
        ValueError: a run that may still live holds one of them.
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
            continue  # it was removed meanwhile
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
    """Whether the file was not there, and is ours now."""
    try:
        file = path.open("x", encoding="utf-8")
    except FileExistsError:
        return False
    try:
        with named(path), file:
            json.dump(mine, file)
    except BaseException:  # also when the run is ended meanwhile
        path.unlink()
        raise
    return True


def _read(path: Path) -> tuple[dict[str, Any] | None, float]:
    """Who holds the lock, None if nobody does, and how many seconds ago it was last seen, by the disk's clock."""
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
    """Remove the lock of ``holder``, and nobody else's: two runs may find the same stale one."""
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
    """This process, and where its number means something: each boot and each container counts its own."""
    boot, pids = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    place = {
        "boot": boot.read_text().strip() if boot.exists() else "",
        "pids": os.readlink(pids) if pids.exists() else "",
    }
    return place | this_process() | {"time": round(time.time())}


def _beat(held: list[tuple[Path, dict[str, Any]]], over: threading.Event) -> None:
    while not over.wait(BEAT_S):
        for path, mine in held:
            with suppress(OSError):  # what is wrong with the disk is said by whoever writes to it
                if _read(path)[0] == mine:
                    os.utime(path)
                elif not over.is_set():
                    logger.error("%s: another run writes there now; end one of the two", path)
