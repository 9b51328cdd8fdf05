r"""The rule ``code``. The reward is 1 if the code in the last Python block of the response passes all tests, else 0.

The tests of a sample are in its metadata, or as JSON in its label (an object, or a list of asserts). The tests have one
of three forms:

    {"test": "def check(candidate): ...", "entry_point": "add"}      HumanEval
    {"test_list": ["assert add(1, 2) == 3"]}                         MBPP
    {"inputs": ["1 2\n"], "outputs": ["3\n"]}                        stdin and stdout: APPS, TACO, CodeContests

Each form may also have a ``prefix``: code that runs before the response's code. Examples are imports, or the head of
the function that the response completes. If the tests also have ``completion: true``, the response continues where the
prefix ends, without a block of code. Models without a chat template respond like this. Then the code is the response's
text before its first line that is not indented.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from slimelite.rewards.rules import Answer
from slimelite.sandbox.confine import FILE_BYTES, answer_filter, confine, gaps, hide, interpreter_paths
from slimelite.sandbox.registry import SANDBOXES, answers_of

FENCE = "```"
PYTHON = ("", "python", "py", "python3")
# The program in the sandbox. Its arguments are two file descriptors, for its payload and its verdict. The payload is
# JSON with ``code``, ``tests`` (None: the code is a program that reads stdin) and ``token``. The program writes the
# token after the last test. Exit status 0 would prove nothing, because the code may call ``sys.exit``. If there are
# tests, code under ``if __name__ == "__main__"`` is only a demonstration, and does not run.
RUNNER = """
import json, os, sys
with os.fdopen(int(sys.argv[1])) as file:
    payload = json.load(file)
namespace = {"__name__": "answer" if payload["tests"] else "__main__"}
exec(compile(payload["code"], "answer.py", "exec"), namespace)
if payload["tests"]:
    exec(compile(payload["tests"], "tests.py", "exec"), namespace)
os.write(int(sys.argv[2]), payload["token"].encode())
"""
# limits for a program's files: their total size [bytes] and their number; folders count, and so do deleted files that
# are open
DISK_BYTES, ENTRIES = 64 << 20, 4096
# time before the first check of these limits, and between two checks [s]; after the program's end they are checked once
# more
FIRST_LOOK_S, LOOK_S = 0.005, 0.05
# without these variables, numeric libraries would start threads, but threads are not allowed
ENVIRONMENT = {
    "PATH": os.defpath,
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


class Tests(NamedTuple):
    """``script``: test code that runs after the response's code. If ``script`` is None, the code runs once for each
    pair (stdin, expected stdout) in ``cases``.

    ``completion``: whether the response continues where ``prefix`` ends.
    """

    prefix: str
    completion: bool
    script: str | None
    cases: list[tuple[str, str]]


def quick(answer: Answer) -> float | None:
    """Return 0 if the response contains no code. Otherwise return None, because `slow` must run the code.

    Raises:
        ValueError: the sample has no tests.
    """
    return 0.0 if _code(answer.response, read_tests(answer)) is None else None


def slow(answer: Answer) -> float:
    """Run the tests. Return 1 if all tests pass within --code-timeout in total, else 0."""
    tests = read_tests(answer)
    block = _code(answer.response, tests)
    code = f"{tests.prefix}\n{block}" if tests.prefix else block or ""
    settings = answer.settings
    memory, sandbox, end = settings.code_memory_mb, settings.sandbox, time.monotonic() + settings.code_timeout
    if tests.script is not None:
        run = run_code(code, tests.script, "", seconds=settings.code_timeout, memory_mb=memory, sandbox=sandbox)
        return float(run.finished)
    for stdin, stdout in tests.cases:
        left = end - time.monotonic()
        if left <= 0:
            return 0.0
        run = run_code(code, None, stdin, seconds=left, memory_mb=memory, sandbox=sandbox)
        if not run.finished or lines(run.output) != lines(stdout):
            return 0.0
    return 1.0


def cautions() -> list[str]:
    """Warnings about risks that the sandbox cannot prevent on this machine."""
    return [f"runs code that the model writes, and on this machine {gap} (docs/rewards.md)" for gap in gaps()]


def read_tests(answer: Answer) -> Tests:
    """The tests of a sample.

    Raises:
        ValueError: the sample has no tests, or the tests have an unknown form.
    """
    fields = {**_label(answer.label), **answer.metadata}
    prefix, completion = str(fields.get("prefix") or ""), bool(fields.get("completion"))
    if fields.get("test") and fields.get("entry_point"):
        return Tests(prefix, completion, f"{fields['test']}\ncheck({fields['entry_point']})\n", [])
    if fields.get("test_list"):
        return Tests(prefix, completion, "\n".join(map(str, fields["test_list"])), [])
    inputs, outputs = fields.get("inputs") or [], fields.get("outputs") or []
    if inputs and len(inputs) == len(outputs):
        return Tests(prefix, completion, None, [(str(a), str(b)) for a, b in zip(inputs, outputs, strict=True)])
    raise ValueError(
        "code needs tests in metadata (--metadata-key) or in the label as JSON. The fields are test and entry_point; "
        f"or test_list; or inputs and outputs of equal length. The row has these fields: {', '.join(fields) or 'none'}"
    )


def _code(response: str, tests: Tests) -> str | None:
    return re.split(r"\n(?=\S)", response, maxsplit=1)[0] if tests.completion else last_block(response)


def last_block(response: str) -> str | None:
    """The content of the last closed code fence that names Python or no language. Returns None if there is no such
    fence."""
    block: list[str] | None = None
    language, last = "", None
    for line in response.splitlines():
        if not line.lstrip().startswith(FENCE):
            if block is not None:
                block.append(line)
        elif block is None:
            block, language = [], line.strip().removeprefix(FENCE).strip().lower()
        else:
            last = "\n".join(block) if language in PYTHON else last
            block = None
    return last


def lines(text: str) -> list[str]:
    """The lines of ``text`` without trailing spaces. Empty lines at the start and the end of ``text`` are left out."""
    return [line.rstrip() for line in text.strip().splitlines()]


def _label(label: str) -> dict[str, object]:
    try:
        value = json.loads(label)
    except ValueError:
        return {}  # the label is not JSON; the tests may be in the metadata
    return value if isinstance(value, dict) else {"test_list": value} if isinstance(value, list) else {}


@dataclass(frozen=True, slots=True)
class Run:
    """The result of running a program. ``finished``: whether the program, and its tests if there are any, ran to the
    end without an error. ``output``: the text that the program wrote to stdout."""

    finished: bool
    output: str


def run_code(
    code: str, tests: str | None, stdin: str, *, seconds: float, memory_mb: int, sandbox: str = "process"
) -> Run:
    """Run ``code``, then ``tests`` in the same namespace. Wall time and processor time are each limited to ``seconds``.

    The program runs in an empty temporary folder, with a minimal environment and ``stdin`` as standard input. The
    program fails if its output exceeds 16 MiB, its files exceed `DISK_BYTES`, or their number exceeds `ENTRIES`. Before
    this function returns, it kills the program's process group.

    ``sandbox``: a value of ``--agent-sandbox``. If this sandbox cannot run a response's code, the sandbox ``process``
    is used instead.
    """
    hide()
    token = secrets.token_hex(16)
    payload = json.dumps({"code": code, "tests": tests, "token": token})
    with ExitStack() as stack:
        folder = tempfile.mkdtemp(prefix="answer-")
        stack.callback(_remove, folder)
        files = [_file(stack, payload), _file(stack, stdin), _file(stack), _file(stack)]
        numbers = [file.fileno() for file in files]
        words = [sys.executable, "-I", "-B", "-c", RUNNER, str(numbers[0]), str(numbers[3])]
        start = answers_of(sandbox)
        inside = [] if start is None else [*start(folder, interpreter_paths(), DISK_BYTES)]
        if inside and sandbox in SANDBOXES:
            program = stack.enter_context(tempfile.TemporaryFile())
            program.write(answer_filter())
            program.seek(0)
            inside += ["--seccomp", str(program.fileno()), "--"]
            numbers.append(program.fileno())
        process = subprocess.Popen(
            [*inside, *words],
            stdin=files[1],
            stdout=files[2],
            stderr=subprocess.DEVNULL,
            pass_fds=(numbers[0], *numbers[3:]),
            cwd=folder,
            env={**ENVIRONMENT, "HOME": folder, "TMPDIR": folder},
            start_new_session=True,
            preexec_fn=lambda: confine(folder, int(seconds) + 1, memory_mb << 20, alone=not inside),
        )
        try:
            code_of_exit = _wait(process, folder, seconds)
        finally:
            _kill_group(process)
        finished = code_of_exit == 0 and (tests is None or os.pread(numbers[3], len(token), 0) == token.encode())
        output = os.pread(numbers[2], FILE_BYTES, 0).decode("utf-8", "replace")
    return Run(finished, output)


def _wait(process: subprocess.Popen[bytes], folder: str, seconds: float) -> int | None:
    """The exit status, or None if the program takes longer than ``seconds`` or writes more to the disk than allowed."""
    end, look = time.monotonic() + seconds, FIRST_LOOK_S
    while True:
        left = end - time.monotonic()
        try:
            status = process.wait(timeout=max(min(look, left), 0.0))
        except subprocess.TimeoutExpired:
            status = None
        if _is_too_much(process.pid, folder) or (status is None and left <= 0):
            return None
        if status is not None:
            return status
        look = min(2 * look, LOOK_S)


def _is_too_much(process: int, folder: str) -> bool:
    """Whether the files in ``folder``, together with the deleted files that ``process`` still has open, exceed the
    limits."""
    used = entries = 0
    places = [folder]
    while places:
        try:
            children = list(os.scandir(places.pop()))
        except FileNotFoundError:
            continue
        except OSError:
            return True  # folders are nested too deep for a path
        entries += len(children)
        if entries > ENTRIES:
            return True
        for entry in children:
            try:
                used += 512 * entry.stat(follow_symlinks=False).st_blocks
                if entry.is_dir(follow_symlinks=False):
                    places.append(entry.path)
            except FileNotFoundError:
                continue
            except OSError:
                return True
    return used + _unnamed_bytes(process) > DISK_BYTES


def _unnamed_bytes(process: int) -> int:
    """The size of the files that are deleted but still open in ``process`` [bytes]. A memory-mapped file counts with
    the largest possible size."""
    sizes: dict[tuple[int, int], int] = {}
    with suppress(OSError):  # the process has ended
        lines = Path(f"/proc/{process}/maps").read_text(errors="replace").splitlines()
        mapped = {line.split()[4] for line in lines if line.endswith(" (deleted)")}
        sizes[0, 0] = FILE_BYTES * len(mapped)
        for number in os.listdir(f"/proc/{process}/fd"):
            with suppress(OSError):
                info = os.stat(f"/proc/{process}/fd/{number}")
                if stat.S_ISREG(info.st_mode) and info.st_nlink == 0:
                    sizes[info.st_dev, info.st_ino] = 512 * info.st_blocks
    return sum(sizes.values())


def _remove(folder: str) -> None:
    """Remove ``folder``. A program may have nested folders deeper than Python's recursion limit."""
    try:
        shutil.rmtree(folder)
    except (OSError, RecursionError):
        subprocess.run(["rm", "-rf", folder], stderr=subprocess.DEVNULL, check=False)


def _file(stack: ExitStack, text: str = "") -> IO[bytes]:
    """An unnamed file with the content ``text``. The file position is at the start."""
    file = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  the stack closes it
    file.write(text.encode("utf-8", "replace"))
    file.seek(0)
    return file


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the child process and the rest of its process group. The group's id is the child's process id."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # the child has ended, and its process group is empty
    process.wait()
