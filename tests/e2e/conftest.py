"""The arithmetic task, and a model that SFT has started on it: made once, by the commands that a user would run."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

import train  # noqa: E402
from slimelite.preflight import problems_of  # noqa: E402
from slimelite.stages import run_stages  # noqa: E402

Rows = list[dict[str, Any]]
FIRST_VERSION = ROOT / "tests" / "fixtures" / "b7a4ee0"
FIRST_VERSION_FLAGS = (FIRST_VERSION / "flags.txt").read_text().split()


def metrics(run_dir: Path, name: str) -> list[float]:
    """Every value of a metric, in order."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


def run_process(
    *command: str, env: dict[str, str] | None = None, cwd: Path = ROOT, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """A command as a user types it, from the repository's root or from ``cwd``; what outlasts it is ended with it."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    process = subprocess.Popen(
        command, cwd=cwd, env={**clean, **(env or {})}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # scripts stop the Ray head that they started
        out, err = process.communicate(timeout=60)
        pytest.fail(f"{command[:3]} took longer than {timeout} s:\n{out[-2000:]}\n{err[-2000:]}")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


TrainPy = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def train_py(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> TrainPy:
    """``train_py(*words)``: the program train.py with a command line in this process, which has its imports."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        status = run_stages(train.main, problems_of)
        return subprocess.CompletedProcess(words, status, *capfd.readouterr())

    return run


Shared = Callable[[str, Callable[[Path], None]], Path]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    """``shared(name, make)``: a folder that ``make`` fills once for all processes in which pytest runs the tests."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent

    def folder(name: str, make: Callable[[Path], None]) -> Path:
        made = root / f"{name}.made"
        with (root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                make(root / name)
                made.touch()
        return root / name

    return folder


@pytest.fixture(scope="session")
def task(shared: Shared) -> Path:
    """The quickstart's data folder, smaller."""
    return shared("task", make_task)


def make_task(out: Path) -> None:
    script = str(ROOT / "scripts" / "prepare_data.py")
    done = run_process(
        sys.executable,
        script,
        "quickstart",
        "--out",
        str(out),
        "--held-out",
        "64",
        "--sft-rows",
        "12800",
        "--worked-share",
        "0.4",
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def sft(task: Path, shared: Shared) -> Path:
    """The run folder of 200 optimizer steps of SFT; the model is in ``model``."""
    return shared("sft", partial(make_sft, task))


def make_sft(task: Path, run: Path) -> None:
    status = train.main(
        [
            *("--launcher", "local", "--hf-checkpoint", str(task / "model")),
            *("--prompt-data", str(task / "sft.parquet"), "--input-key", "messages"),
            *("--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout", "--debug-train-only"),
            *("--loss-type", "sft_loss", "--calculate-per-token-loss", "--disable-compute-advantages-and-returns"),
            *("--num-epoch", "1", "--rollout-batch-size", "640", "--global-batch-size", "64"),
            *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "4096"),
            *("--optimizer", "muon", "--muon-lr", "0.02", "--lr", "5e-3"),
            *("--save-hf", str(run / "model"), "--run-dir", str(run)),
        ]
    )
    assert status == 0


@pytest.fixture(scope="session")
def grpo_args(task: Path, sft: Path) -> list[str]:
    """GRPO on the task from the SFT model; tests add what they are about."""
    return [
        *("--hf-checkpoint", str(sft / "model"), "--prompt-data", str(task / "train.parquet")),
        *("--input-key", "messages", "--label-key", "label", "--apply-chat-template", "--rollout-shuffle"),
        *("--rm-type", "gsm8k", "--rollout-batch-size", "8", "--n-samples-per-prompt", "4"),
        *("--rollout-max-response-len", "32", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "512"),
        *("--lr", "1e-3", "--colocate"),
    ]


@pytest.fixture
def local_run(grpo_args: list[str], tmp_path: Path) -> Callable[..., Path]:
    """``local_run(name, *flags)``: a run in this process that must succeed; returns its folder."""

    def run(name: str, *flags: str) -> Path:
        folder = tmp_path / name
        assert train.main([*grpo_args, "--launcher", "local", "--run-dir", str(folder), *flags]) == 0
        return folder

    return run


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A folder with a run of commit b7a4ee0, its checkpoint, and the tiny model and data to go on with."""
    with tarfile.open(FIRST_VERSION / "run.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    shutil.copy(FIRST_VERSION / "reward.py", tmp_path)
    return tmp_path
