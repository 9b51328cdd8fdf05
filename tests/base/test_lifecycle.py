"""Runs that are ended before their time, seen from outside: real processes and real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from slimelite.base.lifecycle import SAME_SIGNAL_S, WITHOUT_A_WORD, read_status, this_process

# a run that starts a daemon (another session, not waited for) and then hangs
RUN = """
import contextlib, json, subprocess, sys, time
from slimelite.base.guard import kept_alive
from slimelite.base.lifecycle import StopSignals, Watchdog, this_process
from pathlib import Path
folder, how = sys.argv[1:]
session = Path(folder) / "session"
session.mkdir()
with StopSignals() as stop:
    words = "echo Predicted: more than there is"
    with Watchdog(folder, ["sh", "-c", f"until [ -e {folder}/go ]; do sleep 0.02; done; " * (how == "slow") + words]):
        open(folder + "/status.json", "w").write(json.dumps({"status": "running", "rollouts_done": 3} | this_process()))
        daemon = subprocess.Popen(["sh", "-c", "sleep 300 & wait"], start_new_session=True, stdout=subprocess.DEVNULL)
        Watchdog.note_session(session)
        print(daemon.pid, flush=True)
        try:
            time.sleep(0 if how == "well" else 300)
        finally:
            with kept_alive() if how == "stubborn plugin" else contextlib.nullcontext():
                time.sleep(300 if "stubborn" in how else 0)
sys.exit(stop.status)
"""


class Run:
    """The script above in a process of its own."""

    def __init__(self, folder: Path, how: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUN, str(folder), how],
            stdout=subprocess.PIPE,
            text=True,
            # a test run in the background ignores Ctrl-C, and its children with it
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        assert self.process.stdout is not None
        self.daemon = int(self.process.stdout.readline())

    def end(self, *signals: int, apart: float = 0.0) -> tuple[int, str]:
        """Send the signals; the exit status and what was said."""
        for number in signals:
            self.process.send_signal(number)
            time.sleep(apart)
        said = self.process.communicate(timeout=600)[0]
        return self.process.returncode, said

    def daemon_ends(self) -> bool:
        """Whether all that the run left is gone soon; a busy machine takes its time."""
        deadline = time.monotonic() + 120
        while session(self.daemon):
            if time.monotonic() > deadline:
                watching = [line for line in commands() if str(self.folder) in line]
                print("processes of the daemon:", session(self.daemon), "watchdogs:", watching)
                return False
            time.sleep(0.02)
        return True


def session(leader: int) -> list[int]:
    """Processes of a session that are alive."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[3] == str(leader) and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_one_signal_ends_the_run_and_all_that_it_started(tmp_path: Path, number: int, status: int) -> None:
    run = Run(tmp_path, "hang")
    assert session(run.daemon)
    # twice at once is once: `timeout` and others send a signal to a process and to its group
    code, said = run.end(number, number)
    assert code == status
    assert said.count("ends it at once") == 1
    assert session(run.daemon) == [], "gone before the run itself"


@pytest.mark.parametrize("how", ["stubborn", "stubborn plugin"])
def test_a_second_signal_ends_it_at_once(how: str, tmp_path: Path) -> None:
    run = Run(tmp_path, how)
    assert run.end(signal.SIGTERM, signal.SIGTERM, apart=SAME_SIGNAL_S + 0.2)[0] == 143
    assert run.daemon_ends()


def commands() -> Iterator[str]:
    """The command lines of Python programs that run."""
    for process in psutil.process_iter(["name", "cmdline"]):
        if (process.info["name"] or "").startswith("python"):
            yield " ".join(process.info["cmdline"] or ())


def test_after_sigkill_nothing_is_left_and_the_status_says_so(tmp_path: Path) -> None:
    run = Run(tmp_path, "hang")
    (tmp_path / "curves.png.partial").write_text("half")
    code, _ = run.end(signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert run.daemon_ends()
    deadline = time.monotonic() + 120
    while "Predicted" not in (tmp_path / "status.json").read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    found = json.loads((tmp_path / "status.json").read_text())
    assert (found["status"], found["rollouts_done"]) == (WITHOUT_A_WORD, 3)
    assert found["message"].endswith("ran out of memory. Predicted: more than there is")
    assert "SIGKILL" in found["message"]
    assert not list(tmp_path.glob("*.partial"))
    assert not (tmp_path / "session").exists(), "though its daemons may have been gone before the watchdog looked"


def test_the_status_of_a_run_that_goes_on_in_the_folder_stays(tmp_path: Path) -> None:
    """The watchdog of a killed run may need seconds to explain why, and the next run has ended by then."""
    run, status = Run(tmp_path, "slow"), tmp_path / "status.json"
    assert run.end(signal.SIGKILL)[0] == -signal.SIGKILL
    deadline = time.monotonic() + 120
    while json.loads(status.read_text())["status"] != WITHOUT_A_WORD:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    status.write_text(json.dumps({"status": "finished"} | this_process()))
    (tmp_path / "go").touch()
    deadline = time.monotonic() + 120
    while any(str(tmp_path) in watchdogs for watchdogs in commands()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert json.loads(status.read_text())["status"] == "finished"


def test_a_run_that_ends_well_leaves_its_children_alone(tmp_path: Path) -> None:
    run = Run(tmp_path, "well")
    try:
        assert run.end()[0] == 0
        time.sleep(0.3)
        assert session(run.daemon)
        assert (tmp_path / "session").exists()
        assert json.loads((tmp_path / "status.json").read_text())["status"] == "running", "not the watchdog's business"
    finally:
        os.killpg(run.daemon, signal.SIGKILL)


def test_a_reader_sees_that_a_run_is_gone(tmp_path: Path) -> None:
    """Without its watchdog, which a scheduler may kill with the rest of the job."""

    def status_of(**process: object) -> object:
        (tmp_path / "status.json").write_text(json.dumps({"status": "running", **this_process(), **process}))
        return read_status(tmp_path)["status"]

    child = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    assert status_of() == "running"
    assert status_of(pid=child.pid) == WITHOUT_A_WORD
    child.wait()
    assert status_of(pid=child.pid) == WITHOUT_A_WORD
    assert status_of(started=1) == WITHOUT_A_WORD, "the number was given to another process"
    assert status_of(pid=child.pid, host="another") == "running", "nobody here knows"
    assert status_of(pid=child.pid, status="failed") == "failed"
    (tmp_path / "status.json").write_text('{"status": "running", "pid": 1}')  # nobody knows of which process
    assert read_status(tmp_path)["status"] == "running"
    assert read_status(tmp_path / "nothing") == {}
