"""scripts/benchmarks: what it counts is what processes used, and what became slower is named."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts" / "benchmarks"

# burns 0.4 s itself, 0.6 s in a daemon that has left the session, and 0.3 s in ten children too short to be looked at;
# the parent of five of them ignores their end. A line to the file after its own 0.4 s.
BURNER = """
import os, resource, signal, sys, time

def burn(seconds):
    began = time.process_time()
    while time.process_time() - began < seconds:
        sum(range(1000))

with open(sys.argv[1], "w") as marks:
    burn(0.4)
    resident = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    marks.write(f'{{"kind": "step", "resident": {resident}}}\\n')
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        burn(0.6)
    os._exit(0)
os.wait()
for _ in range(10):
    if (child := os.fork()) == 0:
        burn(0.03)
        os._exit(0)
    os.waitpid(child, 0)
if sys.argv[2:] and os.fork() == 0:
    time.sleep(300)
"""


def measured(tmp_path: Path, *words: str) -> dict[str, Any]:
    (tmp_path / "burner.py").write_text(BURNER)
    marks = tmp_path / "marks.jsonl"
    command = [sys.executable, SCRIPTS / "tree.py", "--out", tmp_path / "used.json", "--watch", marks, "--mark", "step"]
    subprocess.run([*command, "--", sys.executable, tmp_path / "burner.py", marks, *words], check=True, timeout=600)
    return json.loads((tmp_path / "used.json").read_text())


def test_a_daemon_and_short_children_are_counted(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(3):
        subprocess.run([sys.executable, "-c", "import os, resource, signal, sys, time"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    starts = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    used = measured(tmp_path)
    assert 1.3 <= used["cpu"] < 1.3 + max(2 * starts, 0.5)
    assert used["status"] == used["left_over"] == 0
    (mark,) = used["marks"]
    assert 0.3 <= mark["cpu"] < used["cpu"]
    # three processes share most of what Python has of its own
    assert mark["line"]["resident"] / 4 < used["peak_pss"] < 4 * mark["line"]["resident"]


def test_what_outlives_the_command_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCHMARKS_LEFT_OVER_S", "0.5")
    assert measured(tmp_path, "leave")["left_over"] >= 1  # on a busy machine the daemon burns on, too


def test_an_evaluation_is_no_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from sides import step_figures

    spent = [("start", 5), ("eval", 6), ("train", 8), ("perf", 9), ("train", 10), ("eval", 30), ("perf", 31)]
    spent += [("train", 33), ("perf", 34)]
    lines = [{"cpu": float(c), "wall": 0.0, "line": {"kind": k, "score": c / 40}} for k, c in spent]
    figures = step_figures(0, goal=0.7)({"marks": lines})
    # 1 of the 6 CPU-seconds before the first rollout and 20 of the second step are evaluations
    assert figures["start_cpu"] == [8.0]
    assert figures["step_cpu"] == [(13.0 - 8.0) / 2]
    assert figures["to_goal_cpu"] == [9.0]
    assert figures["reached"] == [1.0]
    assert step_figures(0, goal=0.99)({"marks": lines})["reached"] == [0.0]


def report(**answers: tuple[float, float, float, bool]) -> dict[str, Any]:
    found = [
        {"title": title, "median": median, "low": low, "high": high, "higher_is_better": higher}
        for title, (median, low, high, higher) in answers.items()
    ]
    return {"questions": {"q": {"answers": found}}}


OLD = report(ratio=(2.0, 1.9, 2.1, True), seconds=(10.0, 9.0, 11.0, False), single=(1.0, 1.0, 1.0, True))


@pytest.mark.parametrize(
    ("new", "slower"),
    [
        (OLD, []),
        (report(ratio=(1.75, 1.7, 1.8, True), seconds=(10, 9, 11, False), single=(1, 1, 1, True)), ["ratio"]),
        # within both spreads, and one round's figure within 5 %
        (report(ratio=(1.85, 1.75, 1.95, True), seconds=(11.5, 11, 12, False), single=(0.96, 0.96, 0.96, True)), []),
        (
            report(ratio=(2, 1.9, 2.1, True), seconds=(12, 11.5, 12.5, False), single=(0.9, 0.9, 0.9, True)),
            ["seconds", "single"],
        ),
        (report(ratio=(3, 2.9, 3.1, True), seconds=(5, 4, 6, False)), ["single"]),
    ],
)
def test_compare_names_what_became_slower(tmp_path: Path, new: dict[str, Any], slower: list[str]) -> None:
    for name, data in (("old", OLD), ("new", new)):
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    command = [sys.executable, SCRIPTS / "compare.py", tmp_path / "old.json", tmp_path / "new.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == (1 if slower else 0), done.stderr
    named = done.stdout.split("slower:")[1]
    assert [title for title in ("ratio", "seconds", "single") if f"q: {title}" in named] == slower


@pytest.mark.e2e
@pytest.mark.slow
def test_the_short_run_answers_every_quick_question(tmp_path: Path) -> None:
    """Times on a shared machine prove nothing: each question runs, and its figures are possible ones."""
    out = tmp_path / "report.json"
    command = [
        sys.executable,
        SCRIPTS / "run.py",
        "--quick",
        "--rounds",
        "1",
        "--work",
        tmp_path / "work",
        "--out",
        out,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert set(found["questions"]) == {"grpo-tiny", "sft-tiny", "engine-tiny", "path"}
    for name, entry in found["questions"].items():
        assert entry["answers"], name
        for side in entry["sides"].values():
            assert side["figures"]["cpu"][0] > 0
            assert side["figures"]["peak_pss_gb"][0] > 0
    local = found["questions"]["grpo-tiny"]["sides"]["local"]["figures"]
    # coins of eight samples are all equal once in 128 groups
    assert 0.9 < local["rows_computed"][0] <= 1
    assert 0 < local["step_cpu"][0] < local["start_cpu"][0] < local["cpu"][0]
    assert found["questions"]["path"]["sides"]["carry"]["figures"]["peak_over_table"][0] >= 0
