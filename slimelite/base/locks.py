"""Two runs never write into one folder: `hold` locks a file in it that names the run.

The kernel holds the lock (flock), and gives it back when the run's process ends, however it ends. On a network file
system other machines see it if the file system says so to them, as NFS does.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from slimelite.base.files import named

logger = logging.getLogger(__name__)
# file in a checkpoint folder or run folder that names the run which writes there
LOCK = "run.lock"


@contextmanager
def hold(folders: dict[str, str | None]) -> Iterator[None]:
    """Lock ``folders``, {flag: folder}, until the block ends; missing folders are created.

    Raises:
        ValueError: another run has locked one of them.
    """
    places = {Path(folder).resolve(): flag for flag, folder in folders.items() if folder is not None}
    with ExitStack() as stack:
        for folder, flag in places.items():
            stack.enter_context(_folder_lock(folder, flag))
        yield


@contextmanager
def _folder_lock(folder: Path, flag: str) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    while True:
        with path.open("a+", encoding="utf-8") as file:
            _lock(file.fileno(), path, flag)
            # the run that had it before may have removed the file since it was opened
            if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                continue
            # a child that this process forks, as a plugin's pool does, would hold the lock too, and may outlive it
            os.register_at_fork(after_in_child=file.close)
            try:
                with named(path):
                    file.truncate(0)
                    began = time.strftime("%Y-%m-%d %H:%M:%S")
                    print(f"process {os.getpid()} on {socket.gethostname()}, since {began}", file=file, flush=True)
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _lock(file: int, path: Path, flag: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        run = os.pread(file, 1000, 0).decode().strip()  # by now that run may have ended and removed the file
        raise ValueError(
            f"{flag} {path.parent}: another run writes there: {run}. Name another folder, or end that run"
        ) from None
    except OSError as error:
        logger.warning("%s cannot be locked (%s): take care that no other run writes there", path, error.strerror)
