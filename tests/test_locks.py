"""Two runs never write into one folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slimelite.checkpoints import LOCK
from slimelite.locks import STALE_S, hold

ROOT = Path(__file__).parents[1]
HOLDER = """
import sys, time
from slimelite.locks import hold
try:
    with hold({"--save": sys.argv[1]}):
        print("held", flush=True)
        time.sleep(float(sys.argv[2]))
except ValueError:
    print("refused", flush=True)
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
    with pytest.raises(ValueError, match=f"another run writes there: process {first.pid} on ") as caught, hold(folders):
        pass
    assert str(caught.value).startswith(f"--save {tmp_path / 'out'}: ")
    assert f"remove {tmp_path / 'out' / LOCK}" in str(caught.value)
    assert not (tmp_path / "other" / LOCK).exists(), "the other folder is given back"
    first.kill()  # not waited for: it is a zombie, and its lock is still there
    while Path(f"/proc/{first.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    with hold({"--save": str(tmp_path / "out")}):
        assert json.loads((tmp_path / "out" / LOCK).read_text())["pid"] == os.getpid()
    assert not list((tmp_path / "out").iterdir())


def test_of_many_that_find_a_dead_runs_lock_one_goes_on(
    start: Callable[[Path, float], subprocess.Popen[str]], tmp_path: Path
) -> None:
    dead = start(tmp_path, 60)
    assert said(dead) == "held\n"
    dead.kill()
    dead.wait()
    assert (tmp_path / LOCK).exists()
    heirs = [start(tmp_path, 60) for _ in range(4)]
    assert sorted(said(heir) for heir in heirs) == ["held\n", *["refused\n"] * 3]


def test_a_lock_of_another_machine_is_judged_by_its_age(tmp_path: Path) -> None:
    path = tmp_path / LOCK
    path.write_text(
        json.dumps({"host": "elsewhere", "boot": "1", "pids": "1", "pid": os.getpid(), "began": 1, "time": 1})
    )
    with pytest.raises(ValueError, match=r"on elsewhere, since .*remove"), hold({"--save": str(tmp_path)}):
        pass
    seen = time.time() - STALE_S - 60
    os.utime(path, (seen, seen))
    with hold({"--save": str(tmp_path)}):
        assert json.loads(path.read_text())["host"] != "elsewhere"


def test_a_lock_that_does_not_say_whose_it_is(tmp_path: Path) -> None:
    """Its run was killed, or the machine went down, while it was written."""
    path = tmp_path / LOCK
    path.touch()
    said = rf"another run writes there, or left run\.lock half written, .* remove {path}"
    with pytest.raises(ValueError, match=said) as caught, hold({"--save": str(tmp_path)}):
        pass
    assert "None" not in str(caught.value)
    os.utime(path, (1, 1))
    with hold({"--save": str(tmp_path)}):
        pass


def test_a_run_that_is_ended_while_it_takes_a_lock_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("slimelite.locks.json.dump", ended)
    with pytest.raises(KeyboardInterrupt), hold({"--save": str(tmp_path)}):
        pass
    assert not list(tmp_path.iterdir())


def test_released_on_an_error_and_one_folder_may_be_both(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), hold({"--run-dir": str(tmp_path), "--save": f"{tmp_path}/"}):
        raise RuntimeError
    with hold({"--run-dir": str(tmp_path), "--save": None}):
        pass
    assert not list(tmp_path.iterdir())


def soon(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_live_run_touches_its_lock_and_notices_who_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("slimelite.locks.BEAT_S", 0.01)
    path = tmp_path / LOCK
    with hold({"--save": str(tmp_path)}):
        os.utime(path, (1, 1))
        soon(lambda: path.stat().st_mtime > 1)
        assert not caplog.text
        path.write_text('{"host": "elsewhere"}')  # it was silent for ten minutes
        soon(lambda: "another run writes there now" in caplog.text)
    assert path.exists(), "the other's lock stays"
