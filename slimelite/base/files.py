"""Files that are written completely or not at all, the message of a full disk, and the format of files that last."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# errors for: no space left, no quota left, file too large for the file system
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# the format of what lasts: checkpoints, saved tables, run folders, stages. A file that names none has this one
FORMAT = 1


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A temporary path to write to, renamed to ``path`` when the block ends; after an error it is removed.

    Raises:
        OSError: the disk is full, and the message has path and free space; or ``path`` is a folder.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a folder; name a file", str(path))
    partial = path.with_name(path.name + ".partial")
    try:
        with named(path):
            yield partial
            partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` as `whole` does, in UTF-8."""
    with whole(path) as partial:
        partial.write_text(text, encoding="utf-8")


def check_format(path: Path, number: object) -> None:
    """Refuse the file at ``path``, which says that its format is ``number`` (None: it says nothing).

    Raises:
        ValueError: it is not ``FORMAT``.
    """
    if number is not None and str(number) != str(FORMAT):
        raise ValueError(
            f"{path}: has format {number}, and this slimelite reads format {FORMAT}: use the slimelite that wrote it"
        )


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Add ``path``, which the block writes, and the free space to the error of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        remedy = f"{free_space(path.parent)} are free there: make room, and go on from the last checkpoint with --load"
        raise OSError(error.errno, f"{os.strerror(error.errno)}; {remedy}", str(path)) from error


def free_space(folder: Path) -> str:
    """The free space of the disk that ``folder`` is on, as text."""
    return in_units(shutil.disk_usage(folder).free)


def in_units(size: float) -> str:
    """A number of bytes as people read it: 1.5 GB."""
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
