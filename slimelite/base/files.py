"""Writes files completely or not at all, explains a full disk, and checks the format number of files.

Two runs never write to the same folder: `hold` creates a file in the folder and locks it. The locked file contains a
description of the run. The kernel holds the lock (flock), and releases it when the run's process ends. On a network
file system, other machines see the lock only if the file system supports such locks. NFS supports them.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

# error numbers of a full disk: no space left, no quota left, file too large for the file system
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# the format number of checkpoints, saved tables, run folders and stages. A file without a number has this format
FORMAT = 1


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path of a temporary file. When the block ends, the temporary file is renamed to ``path``. After an error, the
    temporary file is removed.

    Raises:
        OSError: the disk is full (the message has the path and the free space), or ``path`` is a folder.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a folder: name a file", str(path))
    partial = path.with_name(path.name + ".partial")
    try:
        with named(path):
            yield partial
            partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write ``text`` in UTF-8 to ``path``, completely or not at all; see `whole`."""
    with whole(path) as partial:
        partial.write_text(text, encoding="utf-8")


def check_format(path: Path, number: object) -> None:
    """Refuse the file at ``path`` if its format ``number`` is not `FORMAT`. If ``number`` is None, the file has no
    number.

    Raises:
        ValueError: the number is not ``FORMAT``.
    """
    if number is not None and str(number) != str(FORMAT):
        raise ValueError(
            f"{path}: has format {number}, but this slimelite reads format {FORMAT}: use the slimelite that wrote it"
        )


@contextmanager
def named(path: Path) -> Iterator[None]:
    """If the block cannot write ``path`` because the disk is full, add the path and the free space to the error."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        free = free_space(path.parent)
        remedy = f"{free} are free there: free more space, and resume from the last checkpoint with --load"
        raise OSError(error.errno, f"{os.strerror(error.errno)}; {remedy}", str(path)) from error


def beside_package(name: str) -> Path:
    """The path of train.py or constraints.txt. A checkout has both files in its top folder; a wheel has them inside
    the package."""
    package = Path(__file__).parents[1]
    return next((path for path in (package / name, package.parent / name) if path.is_file()), package / name)


def free_space(folder: Path) -> str:
    """The free space of the disk of ``folder``, as text."""
    return in_units(shutil.disk_usage(folder).free)


def in_units(size: float) -> str:
    """A number of bytes as text, such as 1.5 GB."""
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


logger = logging.getLogger(__name__)
# the file in a checkpoint folder or run folder that names the run that writes there
LOCK = "run.lock"


@contextmanager
def hold(folders: dict[str, str | None]) -> Iterator[None]:
    """Lock ``folders``, {flag: folder}, until the block ends. Missing folders are created.

    Raises:
        ValueError: another run has locked one of the folders.
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
            # another run may have removed the file after it was opened here
            if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                continue
            # a forked child, such as a process of a plugin's pool, would keep the lock and may outlive this process
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
        run = os.pread(file, 1000, 0).decode().strip()  # that run may have ended and removed the file
        raise ValueError(
            f"{flag} {path.parent}: another run writes to this folder: {run}. Name another folder, or end that run"
        ) from None
    except OSError as error:
        logger.warning("%s cannot be locked (%s): make sure that no other run writes to it", path, error.strerror)


def is_text(value: object) -> bool:
    """Whether ``value`` is text that UTF-8 can encode. JSON text may have half of a surrogate pair, which UTF-8 cannot
    encode."""
    try:
        return isinstance(value, str) and bool(value.encode() or True)
    except UnicodeEncodeError:
        return False
