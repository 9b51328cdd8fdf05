"""Workers that are killed or frozen in a whole run on Ray: seen, named, survived, and nothing is left.

The table of docs/reliability.md is measured by ``python -m pytest -m slow -rP tests/e2e/test_deaths.py``.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from slimelite.base.lifecycle import read_status
from slimelite.tracking.metrics_file import read_metrics

from .conftest import ROOT, SMALL_FLAGS
from .test_endings import alive, command, family, wait_until

pytestmark = pytest.mark.e2e
ROLLOUTS = 8


def start(folder: Path, *flags: str) -> subprocess.Popen[str]:
    """A run of ``ROLLOUTS`` rollouts on a Ray of its own, in ``folder`` of `small`, with a checkpoint after each."""
    words = [word for word in SMALL_FLAGS if word not in ("--launcher", "local", "--async-rollout")]
    words += ["--num-rollout", str(ROLLOUTS), "--run-dir", "run", "--save", "saved", "--save-interval", "1"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *words, *flags],
        cwd=folder,
        env={**clean, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def find(process: subprocess.Popen[str], what: str) -> psutil.Process:
    """The process of the run whose title or program contains ``what``."""
    (found,) = [each for each in family(process) if what in command(each)[:200]]
    return found


def session_of(process: subprocess.Popen[str]) -> Path:
    """The folder of the run's Ray."""
    said = re.search(r"--log_dir=(\S+)/logs", command(find(process, "gcs_server")))
    assert said is not None
    return Path(said[1])


def done(folder: Path, rollouts: int) -> bool:
    return len(list((folder / "run" / "rollouts").glob("*.parquet"))) >= rollouts


def hurt(
    process: subprocess.Popen[str], folder: Path, what: str, number: int, after: int = 2
) -> tuple[Path, list[psutil.Process]]:
    """Send a process of the run a signal ``after`` so many rollouts; returns Ray's folder and all processes by then."""
    wait_until(lambda: done(folder, after), process)
    session, members = session_of(process), family(process)
    find(process, what).send_signal(number)
    return session, members


def assert_nothing_left(session: Path, members: list[psutil.Process]) -> None:
    deadline = time.monotonic() + 10
    while (alive(members) or session.exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive(members) == []
    assert not session.exists()


def test_a_frozen_trainer_is_named_and_the_command_goes_on_by_itself(small: Path) -> None:
    process = start(small, "--hang-timeout", "2", "--max-restarts", "2")
    session, members = hurt(process, small, "ray::trainer", signal.SIGSTOP)
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0, out
    assert re.search(
        r"error: trainer_0 \(process \d+ on \S+\) was stopped for [12]\.\d s \(SIGSTOP\).*trainer_0\.log", out
    ), out
    assert "train.py: start 2 of 3 in 1 s" in out
    assert "Traceback" not in out
    assert read_status(small / "run")["rollouts_done"] == ROLLOUTS
    rewards = [record for record in read_metrics(small / "run") if "rollout/raw_reward" in record]
    assert len(rewards) == ROLLOUTS, "each once, but for those that the new start did again"
    assert_nothing_left(session, [member for member in members if member.pid != process.pid])


@pytest.mark.slow
@pytest.mark.parametrize("what", ["gcs_server", "raylet/raylet"])
def test_a_daemon_that_is_stopped_when_all_is_done(small: Path, what: str) -> None:
    process = start(small, "--hang-timeout", "20")
    session, members = hurt(process, small, what, signal.SIGSTOP, after=ROLLOUTS)
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0, out
    assert "(SIGSTOP) and runs again" in out
    assert_nothing_left(session, members)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
@pytest.mark.parametrize("what", ["ray::trainer", "ray::engine", "ray::rollout", "gcs_server", "raylet/raylet"])
def test_each_process_of_a_run(small: Path, what: str, number: int) -> None:
    """The run ends with one message that names the worker, or goes on."""
    process = start(small, "--hang-timeout", "3")
    session, members = hurt(process, small, what, number)
    began = time.monotonic()
    out, _ = process.communicate(timeout=240)
    print(f"{what} {number!r}: exit {process.returncode} after {time.monotonic() - began:.1f} s\n{out[-1500:]}")
    assert "Traceback" not in out
    goes_on = {"ray::engine", "gcs_server"} | ({"raylet/raylet"} if number == signal.SIGSTOP else set())
    assert process.returncode == (0 if what in goes_on else 1)
    if what.startswith("ray::") and what not in goes_on:
        assert re.search(r"train.py: \w+ \(process \d+ on \S+\) ", out)
    assert_nothing_left(session, members)
