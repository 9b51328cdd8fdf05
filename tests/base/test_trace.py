"""The file of `--trace`: several processes write it, it is whole after each event, and viewers can lay it out."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slimelite.base import trace
from tests.base.traces import assert_laid_out, spans

# a worker that is killed within a span
KILLED = """
import os, signal, sys
from pathlib import Path
from slimelite.base import trace
trace.begin(Path(sys.argv[1]))
with trace.span("engine_0", "calls", "first", tokens=7):
    __import__("time").sleep(0.01)
with trace.span("engine_0", "calls", "second"):
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    trace.finish()


def test_workers_append_to_one_file_and_none_loses_what_it_did_before_it_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace.begin(path, driver=True)
    with trace.span("driver", "phases", "generate"):
        done = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert done.returncode == -9
    # what a viewer makes of a file that nobody has ended
    found = spans(path.read_text().rstrip(",\n") + "]")
    assert [(bar["worker"], bar["name"]) for bar in found] == [("engine_0", "first"), ("driver", "generate")]
    first, phase = found
    assert first["args"] == {"tokens": 7}
    assert abs(phase["ts"] / 1e6 + phase["dur"] / 1e6 - time.time()) < 60, "microseconds since the epoch"
    assert phase["ts"] < first["ts"] < phase["ts"] + phase["dur"]
    trace.finish()
    assert spans(path.read_text()) == found
    # a run that goes on in the folder adds to it
    trace.begin(path, driver=True)
    with trace.span("driver", "phases", "train"):
        time.sleep(0.001)
    trace.finish()
    assert [bar["name"] for bar in spans(path.read_text())] == ["first", "generate", "train"]


def test_spans_at_the_same_time_have_lanes_of_their_own(tmp_path: Path) -> None:
    trace.begin(tmp_path / "trace.json", driver=True)

    def request(seconds: float) -> None:
        with trace.span("engine_0", "requests", f"{seconds}"):
            time.sleep(seconds)

    for _ in range(2):
        threads = [threading.Thread(target=request, args=(0.01 * i,)) for i in (3, 2, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with trace.span("engine_0", "requests", "too short to see"):
        pass
    trace.finish()
    found = spans((tmp_path / "trace.json").read_text())
    assert len(found) == 6
    assert {bar["track"] for bar in found} == {"requests", "requests 2", "requests 3"}
    assert_laid_out(found)


def test_a_run_may_end_before_its_first_bar_and_within_one(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("[\n")  # of a run that was killed at once
    trace.begin(path, driver=True)
    with trace.span("driver", "phases", "start"):
        time.sleep(0.001)
    with trace.span("driver", "phases", "train"):  # in another thread, as a rollout that is made ahead
        time.sleep(0.001)
        trace.finish()
    assert [bar["name"] for bar in spans(path.read_text())] == ["start"]


def test_without_the_flag_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with trace.span("driver", "phases", "train") as facts:
        facts["more"] = 1
    assert list(tmp_path.iterdir()) == []
