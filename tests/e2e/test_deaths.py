"""Workers that are killed or frozen in a whole run on Ray: seen, named, survived, and nothing is left.

`scripts/dev/fault_table.py` writes what they see into the table of docs/reliability.md.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from slimelite.base.lifecycle import read_status
from slimelite.sandbox.boxes import control_groups
from slimelite.sandbox.registry import SandboxSettings
from slimelite.tracking.metrics_file import read_metrics

from .conftest import ROOT, SMALL_FLAGS
from .test_endings import alive, command, family, wait_until

pytestmark = pytest.mark.e2e
ROLLOUTS = 8
Record = Callable[[str, object], None]
WARNED = "continued with a warning; the run finishes"
NAMED, MESSAGE = "named with its stack, and ended; one message, exit 1", "one message, exit 1"
BACK = "Ray starts it again, it gets the current weights; the run finishes"
# rows of the page's table: the fault, the process, the signal, and what happens
FATES = [
    ("trainer stopped", "ray::trainer", signal.SIGSTOP, NAMED),
    ("trainer killed", "ray::trainer", signal.SIGKILL, MESSAGE),
    ("engine stopped", "ray::engine", signal.SIGSTOP, f"named with its stack, and ended; {BACK}"),
    ("engine killed", "ray::engine", signal.SIGKILL, BACK),
    ("rollout manager stopped", "ray::rollout", signal.SIGSTOP, NAMED),
    ("rollout manager killed", "ray::rollout", signal.SIGKILL, MESSAGE),
    ("GCS stopped", "gcs_server", signal.SIGSTOP, WARNED),
    ("GCS killed", "gcs_server", signal.SIGKILL, "the run finishes"),
    ("raylet stopped", "raylet/raylet", signal.SIGSTOP, WARNED),
    ("raylet killed", "raylet/raylet", signal.SIGKILL, f"{MESSAGE}; Ray's log is kept"),
]


def until_ended(out: str) -> str:
    """For how long a worker was stopped, as the run's message says."""
    said = re.search(r" was stopped for ([\d.]+) s \(SIGSTOP\)(?! and runs again)", out)
    return f"{said[1]} until it was ended" if said else ""


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
    deadline = time.monotonic() + 120
    while (alive(members) or session.exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive(members) == []
    assert not session.exists()


@pytest.mark.chaos(
    "trainer stopped, `--max-restarts 2`",
    "named with its stack, and ended; the command starts again, continues from the checkpoint and finishes",
)
def test_a_frozen_trainer_is_named_and_the_command_goes_on_by_itself(small: Path, record_property: Record) -> None:
    process = start(small, "--hang-timeout", "2", "--max-restarts", "2")
    session, members = hurt(process, small, "ray::trainer", signal.SIGSTOP)
    out, _ = process.communicate(timeout=1200)
    assert process.returncode == 0, out
    assert re.search(
        r"error: trainer_0 \(process \d+ on \S+\) was stopped for \d+\.\d s \(SIGSTOP\).*trainer_0\.log", out
    ), out
    record_property("seconds", until_ended(out))
    assert "train.py: start 2 of 3 in 1 s" in out
    assert "Traceback" not in out
    assert read_status(small / "run")["rollouts_done"] == ROLLOUTS
    rewards = [record for record in read_metrics(small / "run") if "rollout/raw_reward" in record]
    assert len(rewards) == ROLLOUTS, "each once, but for those that the new start did again"
    assert_nothing_left(session, [member for member in members if member.pid != process.pid])


@pytest.mark.slow
@pytest.mark.parametrize(
    "what",
    [
        pytest.param(what, marks=pytest.mark.chaos(f"{name} stopped after the last rollout", WARNED))
        for name, what in (("GCS", "gcs_server"), ("raylet", "raylet/raylet"))
    ],
)
def test_a_daemon_that_is_stopped_when_all_is_done(small: Path, what: str) -> None:
    process = start(small, "--hang-timeout", "20")
    session, members = hurt(process, small, what, signal.SIGSTOP, after=ROLLOUTS)
    out, _ = process.communicate(timeout=1200)
    assert process.returncode == 0, out
    assert "(SIGSTOP) and runs again" in out
    assert_nothing_left(session, members)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "number"),
    [
        pytest.param(what, number, id=fault.replace(" ", "-"), marks=pytest.mark.chaos(fault, happens))
        for fault, what, number, happens in FATES
    ],
)
def test_each_process_of_a_run(small: Path, what: str, number: int, record_property: Record) -> None:
    """The run ends with one message that names the worker, or goes on."""
    process = start(small, "--hang-timeout", "3")
    wait_until(lambda: done(small, 2), process)
    session, members, victim = session_of(process), family(process), find(process, what)
    victim.send_signal(number)
    began = time.monotonic()
    out, _ = process.communicate(timeout=1200)
    end = f"{time.monotonic() - began:.1f} until the " + ("exit" if process.returncode else "end of the run")
    record_property("seconds", ", ".join(filter(None, (until_ended(out), end))))
    print(f"{what} {number!r}: exit {process.returncode}, {end}\n{out[-1500:]}")
    assert "Traceback" not in out
    goes_on = {"ray::engine", "gcs_server"} | ({"raylet/raylet"} if number == signal.SIGSTOP else set())
    assert process.returncode == (0 if what in goes_on else 1)
    if what.startswith("ray::") and what not in goes_on:
        assert re.search(rf"train.py: \w+ \(process {victim.pid} on {os.uname().nodename}\) ", out)
        assert number == signal.SIGSTOP or "Full memory was not the reason" in out
    if what == "raylet/raylet" and number == signal.SIGKILL:
        said = rf"train.py: Ray's raylet \(process {victim.pid} on {os.uname().nodename}\) was killed by SIGKILL"
        assert re.search(said, out), out
        assert "Full memory was not the reason" not in out
        log = re.search(r"; its log is (\S+raylet.out)$", out, re.M)
        assert log is not None
        assert Path(log[1]).stat().st_size
    assert_nothing_left(session, members)


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group for memory, without a limit yet."""
    try:
        (parent, *_) = control_groups(SandboxSettings())
    except ValueError:
        pytest.fail("this test needs root, or a control group that may be divided: it limits a process's memory")
    folder = Path(parent) / f"slimelite-test-{os.getpid()}"
    folder.mkdir()
    yield folder
    folder.rmdir()


@pytest.mark.slow
@pytest.mark.chaos(
    "the kernel kills the trainer for its memory",
    "one message that says so, with what the run needs; exit 1",
)
def test_the_kernel_kills_the_trainer_for_its_memory(small: Path, small_group: Path, record_property: Record) -> None:
    process = start(small, "--hang-timeout", "3")
    wait_until(lambda: done(small, 2), process)
    session, members, victim = session_of(process), family(process), find(process, "ray::trainer")
    (small_group / "cgroup.procs").write_text(str(victim.pid))
    one, two = small_group / "memory.limit_in_bytes", small_group / "memory.max"
    (one if one.exists() else two).write_text(str(1 << 20))
    began = time.monotonic()
    out, _ = process.communicate(timeout=1200)
    record_property("seconds", f"{time.monotonic() - began:.1f} until the exit")
    assert process.returncode == 1
    said = rf"train.py: trainer_0 \(process {victim.pid} on \S+\) was killed: in the last 30 s the kernel has killed "
    assert re.search(said + r".*; its log is \S+trainer_0.log\. Predicted: ", out), out
    assert "Traceback" not in out
    assert_nothing_left(session, members)
