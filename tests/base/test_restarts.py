"""``--max-restarts``: which ends are followed by another start, and which are not."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from slimelite.arguments import Args
from slimelite.base import restarts
from slimelite.base.lifecycle import ATTEMPT, Stopped

# a run that ends as the file of its number says, and keeps its words; as `Tracker` it says how it stands
PROGRAM = f"""
import json, os, pathlib, sys, time
folder = pathlib.Path(__file__).parent
number = int(os.environ[{ATTEMPT!r}])
(folder / f"words_{{number}}.json").write_text(json.dumps(sys.argv[1:]))
end = json.loads((folder / "ends.json").read_text())[number]
stat = pathlib.Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
status = {{"pid": os.getpid(), "host": os.uname().nodename, "started": int(stat[19])}}
if "status" in end:
    (folder / "status.json").write_text(json.dumps(status | end))
if end.get("killed"):
    os.kill(os.getpid(), 9)
while end.get("waits"):
    time.sleep(0.01)
sys.exit(end["code"])
"""
LOST = {"status": "failed", "message": "ClusterError: trainer_0 is gone", "rollouts_done": 4, "code": 1}
FINISHED = {"status": "finished", "message": None, "rollouts_done": 9, "code": 0}
Keep = Callable[..., tuple[int, list[list[str]]]]


@pytest.fixture
def keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keep:
    """``keep(*ends)``: the exit status of a command whose starts end so, and the words of each start."""
    monkeypatch.setattr(restarts, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(sys, "executable", os.path.realpath(sys.executable))
    (tmp_path / "train.py").write_text(PROGRAM)
    args = replace(Args(), run_dir=str(tmp_path), save="saved", max_restarts=4)

    def run(*ends: dict[str, object], elastic: bool = False) -> tuple[int, list[list[str]]]:
        (tmp_path / "ends.json").write_text(json.dumps(ends))
        code = restarts.keep_running(str(tmp_path / "train.py"), ["--lr", "1"], replace(args, elastic=elastic))
        files = sorted(tmp_path.glob("words_*.json"))
        return code, [json.loads(file.read_text()) for file in files]

    return run


@pytest.mark.chaos
@pytest.mark.parametrize(
    "end",
    [
        LOST,
        {"status": "running", "rollouts_done": 4, "killed": True},
        {"status": "failed", "message": "ConnectionError: nobody is there", "code": 1},
        {"status": "failed", "message": "EngineLostError: engine 0 has died: nobody is there", "code": 1},
    ],
    ids=["lost", "killed", "network", "engine"],
)
def test_a_run_that_was_ended_from_outside_goes_on_from_its_checkpoint(
    keep: Keep, tmp_path: Path, end: dict[str, object], capfd: pytest.CaptureFixture[str]
) -> None:
    code, starts = keep(end, FINISHED)
    own = ["--lr", "1", "--run-dir", str(tmp_path)]
    assert (code, starts) == (0, [own, [*own, "--load", "saved"]])
    assert capfd.readouterr().err == "train.py: start 2 of 5 in 0.01 s\n"


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("end", "code"),
    [
        ({"status": "failed", "message": "ValueError: no such column", "code": 1}, 1),
        ({"status": "failed", "message": "RestartWaitError: a restart has waited 600 s", "code": 1}, 1),
        ({"code": 2}, 2),  # before it began
        ({"status": "interrupted", "message": "SIGTERM", "code": 143}, 143),
    ],
    ids=["mistake", "waited", "arguments", "stopped"],
)
def test_a_mistake_or_a_signal_is_not_followed_by_a_start(keep: Keep, end: dict[str, object], code: int) -> None:
    found, starts = keep(end, FINISHED)
    assert (found, len(starts)) == (code, 1)


@pytest.mark.chaos
def test_the_same_rollout_three_times_is_enough(keep: Keep, capfd: pytest.CaptureFixture[str]) -> None:
    code, starts = keep({**LOST, "rollouts_done": 3}, LOST, LOST, LOST, FINISHED)
    assert (code, len(starts)) == (1, 4)
    last = "not started again: rollout 4 has failed 3 times, the last time with: ClusterError: trainer_0 is gone"
    assert capfd.readouterr().err.splitlines()[-1] == f"train.py: {last}"


@pytest.mark.chaos
def test_starts_are_counted(keep: Keep, capfd: pytest.CaptureFixture[str]) -> None:
    code, starts = keep(*({**LOST, "rollouts_done": done} for done in range(9)))
    assert (code, len(starts)) == (1, 5)
    assert "was started again 4 times (--max-restarts): ClusterError: " in capfd.readouterr().err


@pytest.mark.chaos
def test_sigterm_ends_the_run_or_the_pause(keep: Keep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def end_when(true: Callable[[], bool]) -> None:
        while not true():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    begun = threading.Thread(target=end_when, args=[lambda: (tmp_path / "status.json").is_file()])
    begun.start()
    # a run that does not handle the signal, as ours does
    code, starts = keep({"status": "running", "waits": True}, FINISHED)
    begun.join()
    assert (code, len(starts)) == (143, 1)

    monkeypatch.setattr(restarts.time, "sleep", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Stopped):
        keep(LOST, FINISHED)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.chaos
def test_a_restart_has_the_words_that_fit_the_machines_that_are_left(
    keep: Keep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The planner here answers as the files ``plan_0`` and ``plan_1`` say, and keeps its words."""
    planner = """
import pathlib, sys
file = sorted(pathlib.Path(__file__).parent.glob("plan_*"))[0]
print("a line of Ray's")
print(file.read_text())
file.rename(file.with_name("said"))
sys.exit("nothing fits" if file.name == "plan_1" else 0)
"""
    (tmp_path / "planner.py").write_text(planner)
    (tmp_path / "plan_0").write_text('["--actor-num-nodes", "1"]')
    (tmp_path / "plan_1").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(restarts, "ELASTIC", "planner")
    monkeypatch.setenv("RAY_ADDRESS", "somewhere")
    code, starts = keep(LOST, LOST | {"rollouts_done": 6}, FINISHED, elastic=True)
    own = ["--lr", "1", "--run-dir", str(tmp_path)]
    again = [*own, "--load", "saved"]
    assert (code, starts) == (0, [own, [*again, "--actor-num-nodes", "1"], again])
    said = capfd.readouterr().err.splitlines()
    assert said[1] == "train.py: fewer machines answer than before (--elastic): this start uses --actor-num-nodes 1"
    assert said[3] == "nothing fits"
