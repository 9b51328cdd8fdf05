"""Two runs never write into one folder."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slimelite.base.files import hold
from slimelite.models.checkpoints import LOCK

ROOT = Path(__file__).parents[2]
HOLDER = """
import sys, time
from slimelite.base.files import hold
try:
    with hold({"--save": sys.argv[1]}):
        print("held", flush=True)
        time.sleep(float(sys.argv[2]))
except ValueError:
    print("refused", flush=True)
"""

FORKER = """
import os, sys, time
from slimelite.base.files import hold
with hold({"--save": sys.argv[1]}):
    if not os.fork():  # os.fork has returned in the child, too, so that it has given the lock back
        print(os.getpid(), flush=True)
    time.sleep(60)
"""


@pytest.fixture
def start() -> Iterator[Callable[[Path, float], subprocess.Popen[str]]]:
    started = []

    def run(folder: Path, seconds: float) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLDER, str(folder), str(seconds)]
        started.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_a_second_run_is_refused_until_the_first_is_over(
    start: Callable[[Path, float], subprocess.Popen[str]], tmp_path: Path
) -> None:
    first = start(tmp_path / "out", 60)
    assert said(first) == "held\n"
    folders = {"--run-dir": str(tmp_path / "other"), "--save": str(tmp_path / "out")}
    with pytest.raises(
        ValueError, match=f"another run writes to this folder: process {first.pid} on .*since 20"
    ) as caught:
        hold(folders).__enter__()
    assert str(caught.value).startswith(f"--save {tmp_path / 'out'}: ")
    assert not (tmp_path / "other" / LOCK).exists(), "the other folder is given back"
    first.kill()
    first.wait()
    assert (tmp_path / "out" / LOCK).exists()
    with hold({"--save": str(tmp_path / "out")}):
        assert (tmp_path / "out" / LOCK).read_text().startswith(f"process {os.getpid()} on ")
    assert not list((tmp_path / "out").iterdir())


def test_a_forked_child_that_outlives_its_run_holds_no_lock(tmp_path: Path) -> None:
    """Such as a worker of a pool that a user's plugin starts, after a kill -9 of the run."""
    started = subprocess.Popen(
        [sys.executable, "-c", FORKER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    child = int(said(started))
    try:
        started.kill()
        started.wait()
        with hold({"--save": str(tmp_path)}):
            os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_run_that_ends_while_it_is_named_is_still_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_file: int, _operation: int) -> None:
        (tmp_path / LOCK).unlink()
        raise BlockingIOError

    (tmp_path / LOCK).write_text("process 7 on here, since then\n")
    monkeypatch.setattr("slimelite.base.files.fcntl.flock", refuse)
    with pytest.raises(ValueError, match=r"writes to this folder: process 7 on here, since then\. Name"):
        hold({"--save": str(tmp_path)}).__enter__()


def test_of_many_that_find_a_dead_runs_lock_one_goes_on(
    start: Callable[[Path, float], subprocess.Popen[str]], tmp_path: Path
) -> None:
    dead = start(tmp_path, 60)
    assert said(dead) == "held\n"
    dead.kill()
    dead.wait()
    heirs = [start(tmp_path, 60) for _ in range(4)]
    assert sorted(said(heir) for heir in heirs) == ["held\n", *["refused\n"] * 3]


def test_a_lock_that_goes_to_a_removed_file_is_taken_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run before ends, and removes its file, after this one has opened it."""
    lock, locked = fcntl.flock, []

    def late(file: int, operation: int) -> None:
        if not locked:
            (tmp_path / LOCK).unlink()
        locked.append(file)
        lock(file, operation)

    monkeypatch.setattr("slimelite.base.files.fcntl.flock", late)
    with hold({"--save": str(tmp_path)}):
        assert (tmp_path / LOCK).is_file()
    assert len(locked) == 2


def test_a_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(_file: int, _operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("slimelite.base.files.fcntl.flock", none)
    with hold({"--save": str(tmp_path)}):
        assert "cannot be locked (Function not implemented)" in caplog.text


def test_released_on_an_error_and_one_folder_may_be_both(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), hold({"--run-dir": str(tmp_path), "--save": f"{tmp_path}/"}):
        raise RuntimeError
    with hold({"--run-dir": str(tmp_path), "--save": None}):
        pass
    assert not list(tmp_path.iterdir())
