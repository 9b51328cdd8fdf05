"""Runs code that a model wrote in a process of its own, confined; for workers, which have one thread.

What it keeps out, and what not, is in docs/rewards.md.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from slimelite.rewards.confine import FILE_BYTES, confine, hide

RUNNER = Path(__file__).with_name("code_runner.py")
# numeric libraries would start threads, which are not allowed
ENVIRONMENT = {
    "PATH": os.defpath,
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True)
class Run:
    """``finished``: the tests (or, without tests, the program) ran to the end, without an error; ``output``: stdout."""

    finished: bool
    output: str


def run_code(code: str, tests: str | None, stdin: str, *, seconds: float, memory_mb: int) -> Run:
    """Run ``code``, then ``tests`` in the same namespace, for ``seconds`` at most of both wall and processor time.

    In an empty temporary folder, with an empty environment and ``stdin`` as standard input. Output beyond 16 MiB is an
    error of the program. When this returns, the process and what it started are gone.
    """
    hide()
    token = secrets.token_hex(16)
    payload = json.dumps({"code": code, "tests": tests, "token": token})
    with ExitStack() as stack:
        folder = tempfile.mkdtemp(prefix="answer-")
        stack.callback(_remove, folder)
        files = [_file(stack, payload), _file(stack, stdin), _file(stack), _file(stack)]
        numbers = [file.fileno() for file in files]
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", str(RUNNER), str(numbers[0]), str(numbers[3])],
            stdin=files[1],
            stdout=files[2],
            stderr=subprocess.DEVNULL,
            pass_fds=(numbers[0], numbers[3]),
            cwd=folder,
            env={**ENVIRONMENT, "HOME": folder, "TMPDIR": folder},
            start_new_session=True,
            preexec_fn=lambda: confine(folder, str(RUNNER), int(seconds) + 1, memory_mb << 20),
        )
        try:
            code_of_exit = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code_of_exit = None
        finally:
            _kill_group(process)
        finished = code_of_exit == 0 and (tests is None or os.pread(numbers[3], len(token), 0) == token.encode())
        output = os.pread(numbers[2], FILE_BYTES, 0).decode("utf-8", "replace")
    return Run(finished, output)


def _remove(folder: str) -> None:
    """Remove ``folder``, which a program may have filled with folders in folders, deeper than Python can follow."""
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):
        subprocess.run(["rm", "-rf", folder], stderr=subprocess.DEVNULL, check=False)


def _file(stack: ExitStack, text: str = "") -> IO[bytes]:
    """An unnamed file that begins with ``text``, at its start."""
    file = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  the stack closes it
    file.write(text.encode("utf-8", "replace"))
    file.seek(0)
    return file


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End our child and what is left of its process group, whose id is the child's."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it was reaped, and left nothing
    process.wait()
