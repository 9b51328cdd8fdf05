"""Runs that are ended in the middle of each phase, with and without Ray."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

import train

pytestmark = pytest.mark.e2e


def status(run: Path) -> dict[str, object]:
    return json.loads((run / "status.json").read_text())


PHASES = {
    "start": ("slimelite.training.trainer.Trainer", "__init__"),
    "generate": ("slimelite.engines.embedded.engine.EmbeddedEngine", "generate"),
    "train": ("slimelite.training.trainer.Trainer", "train"),
    "sync": ("slimelite.cluster.local.LocalSink", "send"),
    "save": ("slimelite.training.trainer.Trainer", "save"),
}


@pytest.fixture
def args(task: Path) -> list[str]:
    """GRPO from random weights, 8 x 4 samples of up to 32 tokens."""
    return [
        *("--hf-checkpoint", str(task / "model"), "--prompt-data", str(task / "train.parquet")),
        *("--input-key", "messages", "--label-key", "label", "--apply-chat-template", "--rm-type", "gsm8k"),
        *("--rollout-batch-size", "8", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "32"),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "512", "--lr", "1e-3", "--colocate"),
    ]


@pytest.mark.parametrize("phase", PHASES)
def test_sigterm_in_each_phase(
    phase: str, args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In one process; the signal comes from within the phase, in the second rollout where there is one."""
    owner, name = PHASES[phase]
    module, _, owner = owner.rpartition(".")
    target = getattr(__import__(module, fromlist=[owner]), owner)
    real, calls = getattr(target, name), []

    def interrupted(*given: object, **named: object) -> object:
        calls.append(name)
        if phase == "start" or (tmp_path / "run" / "rollouts" / "0000000.parquet").is_file():
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*given, **named)

    monkeypatch.setattr(target, name, interrupted)
    before = signal.getsignal(signal.SIGTERM)
    flags = ["--num-rollout", "9", "--save", str(tmp_path / "saved"), "--save-interval", "2"]
    run = tmp_path / "run"
    assert train.main([*args, "--launcher", "local", *flags, "--run-dir", str(run)]) == 143
    assert signal.getsignal(signal.SIGTERM) is before
    found, out = status(run), capfd.readouterr()
    assert (found["status"], found["message"]) == ("interrupted", "SIGTERM")
    done = found["rollouts_done"] or 0
    assert done == {"start": 0, "train": 0, "sync": 0}.get(phase, 1)
    assert out.out.splitlines()[-2:] == [
        "SIGTERM: the run is being ended; a second SIGTERM ends it at once",
        next(line for line in out.out.splitlines() if line.startswith(f"interrupted after {done} ")),
    ]
    assert "Traceback" not in out.out + out.err
    assert (run / "curves.png").is_file() == bool(done)
    assert not [left for left in run.rglob("*.partial") if left.is_file()]
