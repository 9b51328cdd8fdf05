"""What commit b7a4ee0 wrote goes on loading: see tests/fixtures/b7a4ee0/README.md."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slimelite.apps.runs import Run
from slimelite.arguments import parse_args
from slimelite.samples.table import SampleTable
from slimelite.tracking.metrics_file import read_metrics
from slimelite.tracking.plot import draw_run

from .conftest import FIRST_VERSION_FLAGS as FLAGS
from .conftest import ROOT, run_process

pytestmark = pytest.mark.e2e
# the fixture was made so, with the slowest kernels
SLOWEST = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "OMP_NUM_THREADS": "1"}
EVALS = [f"heldout-{i}.parquet" for i in ("0000001", "0000003", "start")]


def measured(run: Path) -> dict[tuple[Any, ...], float]:
    """Every metric that is no time, by kind and step."""
    found = {}
    for row in read_metrics(run):
        step = tuple(row.get(f"{kind}/step") for kind in ("rollout", "train", "eval"))
        found |= {(row["kind"], *step, name): value for name, value in row.items() if not name.startswith("perf/")}
    return {key: value for key, value in found.items() if key[-1] not in ("time", "kind") and key[0] != "start"}


def test_its_checkpoint_goes_on(old: Path) -> None:
    straight = measured(old / "run")
    after = {key for key in straight if max(key[1] or 0, key[3] or 0) >= 2}
    assert len(after) >= 190
    flags = (*FLAGS, "--run-dir", "run", "--load", "checkpoints", "--save-hf", "resumed")
    done = run_process(sys.executable, str(ROOT / "train.py"), *flags, cwd=old, env=SLOWEST)
    assert done.returncode == 0, done.stderr
    resumed = measured(old / "run")
    assert sorted(p.name for p in (old / "run" / "eval").iterdir()) == EVALS, "renamed, as evaluations are named now"
    # shared prefixes in the trainer and merged attention in the engine round otherwise than the first version did
    rel, tol = 1e-4, 1e-6
    assert resumed.keys() >= straight.keys()
    for key, value in straight.items():
        assert resumed[key] == pytest.approx(value, rel=rel, abs=tol), key
    weights, expected = load_file(old / "resumed" / "model.safetensors"), load_file(old / "final.safetensors")
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=rel, atol=tol)


def test_its_run_folder_opens(old: Path, tmp_path: Path) -> None:
    run = old / "run"
    draw_run(read_metrics(run), tmp_path / "curves.png")
    seen = Run.read(run)
    assert list(seen.series["eval/heldout"][0]) == list(seen.evals["heldout"]) == [-1, 1, 3], "it wrote 0, 2 and 4"
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    tables = [SampleTable.from_parquet(path) for path in sorted(run.glob("*/*.parquet"))]
    assert [len(table) for table in tables] == [3] * 3 + [12] * 4
    again, once = parse_args(["--config", str(run / "config.yaml")]), parse_args(FLAGS)
    for name in ("lr", "advantage_estimator", "num_rollout", "prompt_data", "dynamic_sampling_filter_path"):
        assert getattr(again, name) == getattr(once, name), name
