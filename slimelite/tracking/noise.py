"""Keeps the output of libraries off the console. All of this output goes to files of the run folder."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def redirect_process_output(path: str | Path) -> None:
    """From now on, append all output of this process and its children (file descriptors 1 and 2) to ``path``.

    Output is flushed after every line, so the file has the last lines of a killed process.
    """
    _point_at([1, 2], path)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


@contextmanager
def stderr_to_file(path: str | Path) -> Iterator[None]:
    """Inside this block, append all output on file descriptor 2, also from C++ libraries, to ``path``."""
    sys.stderr.flush()
    saved = os.dup(2)
    try:
        _point_at([2], path)
        yield
    finally:
        with suppress(OSError):  # the disk may be full; another message reports that
            sys.stderr.flush()
        os.dup2(saved, 2)
        os.close(saved)


@contextmanager
def log_to_file(path: str | Path) -> Iterator[None]:
    """Inside this block, append log records to ``path``: our records from INFO on, those of libraries from WARNING on.

    Python warnings become log records too.
    """
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    root, ours = logging.getLogger(), logging.getLogger("slimelite")
    level = ours.level
    root.addHandler(handler)
    ours.setLevel(logging.INFO)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        ours.setLevel(level)
        root.removeHandler(handler)
        with suppress(OSError):
            handler.close()


def quiet_transformers() -> None:
    """Let transformers log through Python's root logger instead of printing, and draw no progress bars."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()
    transformers_logging.disable_progress_bar()


def _point_at(descriptors: list[int], path: str | Path) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in descriptors:
        os.dup2(target, descriptor)
    os.close(target)
