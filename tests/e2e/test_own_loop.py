"""The loop of docs/examples ends where train.py ends."""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import train
from slimelite.models.checkpoints import ROLLOUT_STATE, STATE_FILE
from slimelite.samples.table import SampleTable

from .conftest import ROOT, metrics

pytestmark = pytest.mark.e2e
OWN_LOOP = ROOT / "docs" / "examples" / "own_loop.py"
ROLLOUTS = 3


@pytest.fixture(scope="module")
def own_loop() -> Callable[[list[str]], int]:
    spec = importlib.util.spec_from_file_location("own_loop", OWN_LOOP)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    main: Callable[[list[str]], int] = module.main
    return main


@pytest.fixture
def run(grpo_args: list[str], tmp_path: Path) -> Callable[..., Path]:
    def run(main: Callable[[list[str]], int], name: str, *flags: str) -> Path:
        """A whole run that ends with a checkpoint; its folder."""
        folder = tmp_path / name
        saved = ["--save", str(folder / "saved"), "--save-interval", "9", "--run-dir", str(folder)]
        assert main([*grpo_args, *saved, "--deterministic-mode", "--num-rollout", str(ROLLOUTS), *flags]) == 0
        return folder

    return run


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Weights and the optimizer's moments of a run's checkpoint."""
    dcp_to_torch_save(checkpoint(folder), folder / "whole.pt")
    found: dict[str, torch.Tensor] = {}

    def collect(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, part in value.items():
                collect(f"{name}.{key}", part)
        elif isinstance(value, torch.Tensor):
            found[name] = value

    collect("", torch.load(folder / "whole.pt", weights_only=False))
    return found


def checkpoint(folder: Path) -> Path:
    return folder / "saved" / f"iter_{ROLLOUTS - 1:07d}"


def assert_equal(mine: Path, theirs: Path) -> None:
    """Rollouts, the metrics of every step, and all that a checkpoint holds: to the bit."""
    for rollout in range(ROLLOUTS):
        a, b = (SampleTable.from_parquet(run / "rollouts" / f"{rollout:07d}.parquet") for run in (mine, theirs))
        assert (a.response_tokens == b.response_tokens).all()
        assert (a.weight_versions == b.weight_versions).all()
    rows = [json.loads(line) for line in (theirs / "metrics.jsonl").read_text().splitlines()]
    names = {name for row in rows for name in row if name.startswith(("train/", "rollout/"))}
    assert {"train/loss", "train/grad_norm", "train/lr-pg_0", "rollout/raw_reward"} <= names
    for name in names - {"rollout/step", "train/step"}:
        assert metrics(mine, name) == metrics(theirs, name), name
    a, b = tensors(mine), tensors(theirs)
    assert len(a) > 30
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    for state in (ROLLOUT_STATE, STATE_FILE):
        assert (checkpoint(mine) / state).read_text() == (checkpoint(theirs) / state).read_text()


def test_it_ends_where_train_py_ends(own_loop: Callable[[list[str]], int], run: Callable[..., Path]) -> None:
    theirs = run(train.main, "train", "--launcher", "local")
    for launcher in ("local", "ray"):
        assert_equal(run(own_loop, launcher, "--launcher", launcher), theirs)


def test_overlapped_it_is_async_rollout(own_loop: Callable[[list[str]], int], run: Callable[..., Path]) -> None:
    flags = ("--launcher", "local", "--no-colocate", "--use-tis", "--async-rollout")
    mine, theirs = run(own_loop, "mine", *flags), run(train.main, "theirs", *flags)
    assert metrics(mine, "rollout/weight_staleness/max") == [0, 1, 1]
    assert_equal(mine, theirs)


def test_it_runs_as_a_program(
    grpo_args: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(OWN_LOOP), *grpo_args, "--num-rollout", "1", "--dry-run"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(OWN_LOOP), run_name="__main__")
    assert end.value.code == 0
    assert capsys.readouterr().out.endswith("ready to start\n")
