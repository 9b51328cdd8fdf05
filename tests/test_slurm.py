"""The Slurm example with stand-ins for Slurm, Ray and train.py: programs that note how they were called."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "docs" / "examples" / "slurm" / "train.sbatch"
# every line of `calls` is a call; `nodes` has a line for each node that has joined
PROGRAMS = {
    "scontrol": 'echo "scontrol $*" >> calls\nif [ "$1" = show ]; then printf "n1\\nn2\\n"; fi',
    # the options of srun, then the program, which runs here
    "srun": """
        while [ "${1#--}" != "$1" ]; do
            case "$1" in --overlap) shift;; --export) export "${2#ALL,}"; shift 2;; *) shift 2;; esac
        done
        exec "$@"
    """,
    "hostname": "echo 10.0.0.1 172.17.0.1",
    "sleep": "exec /bin/sleep 0.05",
    "ray": """
        echo "ray $*" >> calls
        [ "$2" = --address ] && [ -n "$LOST" ] && exit 1
        [ "$2" = --address ] && [ -n "$MISSING" ] && exec /bin/sleep 60
        [ "$2" = --address ] && /bin/sleep 0.3
        echo joined >> nodes
        exec /bin/sleep 60
    """,
    "python": """
        case "$*" in
            *secrets*) echo token;;
            *ray.nodes*) cat nodes 2>/dev/null | wc -l;;
            *) echo "train $* at $RAY_ADDRESS with $RAY_AUTH_TOKEN, $(wc -l < nodes) nodes" >> calls
               trap 'echo "train ended" >> calls; exit 143' TERM
               [ -n "$STATUS" ] && exit "$STATUS"
               touch training; while true; do /bin/sleep 0.05; done;;
        esac
    """,
}


@pytest.fixture
def submitted(tmp_path: Path) -> Path:
    """The folder that a job is submitted from, with the programs of its environment."""
    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    for name, script in PROGRAMS.items():
        (binaries / name).write_text(f"#!/bin/bash\n{script}\n")
        (binaries / name).chmod(0o755)
    (binaries / "activate").write_text(f"export PATH={binaries}:$PATH\n")
    return tmp_path


def start(folder: Path, *flags: str, **variables: str) -> subprocess.Popen[str]:
    job = {"SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "41234"}
    job |= {"SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8", "PATH": "/usr/bin:/bin", **variables}
    command = ["bash", str(SCRIPT), *flags]
    return subprocess.Popen(command, env=job, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def calls(folder: Path, program: str) -> list[str]:
    return [line for line in (folder / "calls").read_text().splitlines() if line.startswith(program)]


def signalled(folder: Path, what: signal.Signals, *flags: str, **variables: str) -> tuple[int, str]:
    """Exit status and errors of a job that gets a signal while train.py runs."""
    job = start(folder, *flags, **variables)
    while not (folder / "training").exists():
        assert job.poll() is None
        time.sleep(0.02)
    os.kill(job.pid, what)
    _, errors = job.communicate()
    assert calls(folder, "train ended") == ["train ended"], "it got SIGTERM, and had time to end in order"
    return job.returncode, errors


def test_train_py_starts_once_every_node_has_joined(submitted: Path) -> None:
    job = start(submitted, "--lr", "1e-6", STATUS="3")
    assert job.wait() == 3, "the status of train.py"
    assert calls(submitted, "train") == ["train train.py --lr 1e-6 at 10.0.0.1:21234 with token, 2 nodes"]
    head, worker = sorted(calls(submitted, "ray"), key=lambda call: "--address" in call)
    assert head.startswith("ray start --head --node-ip-address 10.0.0.1 --port 21234 --num-gpus 8")
    assert worker.startswith("ray start --address 10.0.0.1:21234 --num-gpus 8")
    assert calls(submitted, "scontrol requeue") == []


def test_a_node_that_does_not_come_is_said(submitted: Path) -> None:
    job = start(submitted, MISSING="1", NODE_WAIT="0")
    _, errors = job.communicate()
    assert job.returncode == 1
    assert re.search(r"train.sbatch: [01] of 2 nodes joined within 0 s", errors)
    assert calls(submitted, "train") == []


def test_ray_that_does_not_start_on_a_node_ends_the_job(submitted: Path) -> None:
    job = start(submitted, LOST="1")
    _, errors = job.communicate()
    assert job.returncode == 1
    assert "train.sbatch: ray start ended" in errors
    assert calls(submitted, "train") == []


@pytest.mark.parametrize("load", [("--load", "D"), ("--load=D",)], ids=["word", "equals"])
def test_before_the_time_limit_the_job_is_put_back_into_the_queue(submitted: Path, load: tuple[str, ...]) -> None:
    status, errors = signalled(submitted, signal.SIGUSR1, "--save", "D", *load)
    assert (status, calls(submitted, "scontrol requeue"), errors) == (143, ["scontrol requeue 41234"], "")


@pytest.mark.parametrize(
    ("flags", "count", "why"),
    [((), "0", "without --load the run would begin anew"), (("--load", "D"), "50", "started again 50 times")],
)
def test_what_would_not_go_on_is_not_put_back(submitted: Path, flags: tuple[str, ...], count: str, why: str) -> None:
    status, errors = signalled(submitted, signal.SIGUSR1, *flags, SLURM_RESTART_COUNT=count)
    assert status == 143
    assert f"train.sbatch: not requeued: {why}" in errors or f"not requeued: it has been {why}" in errors
    assert calls(submitted, "scontrol requeue") == []


def test_a_cancelled_job_is_not_put_back(submitted: Path) -> None:
    status, _ = signalled(submitted, signal.SIGTERM, "--load", "D")
    assert status == 143
    assert calls(submitted, "scontrol requeue") == []
