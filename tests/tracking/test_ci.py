"""Checks of a run's own metrics that end it with an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slimelite.tracking.tracker import RunChecks
from tests.tracking.fake_run import make_args, play


def run(folder: Path, **flags: Any) -> None:
    play(make_args(folder, num_rollout=4, **flags), range(4))


def test_a_metric_that_must_be_reached(tmp_path: Path) -> None:
    run(tmp_path / "a", ci_metric_checker_key="eval/sums", ci_metric_checker_threshold=0.6)
    with pytest.raises(AssertionError, match=r"eval/sums reached at most 0\.65, not 0\.7"):
        run(tmp_path / "b", ci_metric_checker_key="eval/sums", ci_metric_checker_threshold=0.7)
    with pytest.raises(AssertionError, match=r"eval/sum was never logged; did you mean eval/sums\?$"):
        run(tmp_path / "c", ci_metric_checker_key="eval/sum", ci_metric_checker_threshold=0.1)
    assert json.loads((tmp_path / "b" / "status.json").read_text())["status"] == "failed"


def test_gradient_norms_of_another_run(tmp_path: Path) -> None:
    path = tmp_path / "new" / "norms.json"
    with pytest.raises(ValueError, match=f"{path}: is missing"):
        RunChecks(make_args(tmp_path, ci_load_grad_norm=str(path)))
    saving = RunChecks(make_args(tmp_path, ci_save_grad_norm=str(path)))
    saving.note_grad_norm(0, 0, 1.0)
    saving.note_grad_norm(0, 1, 0.001)
    assert json.loads(path.read_text()) == {"0/0": 1.0, "0/1": 0.001}
    loading = RunChecks(make_args(tmp_path, ci_load_grad_norm=str(path)))
    loading.note_grad_norm(0, 0, 1.02)
    with pytest.raises(AssertionError, match=r"0/1.*0.0011, and 0.001 was recorded"):
        loading.note_grad_norm(0, 1, 0.0011)
    with pytest.raises(AssertionError, match=r"1/0.*none was recorded"):
        loading.note_grad_norm(1, 0, 1.0)
    path.write_text("{}")  # of a run that ended before its first step: nothing in it agrees with anything
    with pytest.raises(AssertionError, match=r"0/0.*none was recorded"):
        RunChecks(make_args(tmp_path, ci_load_grad_norm=str(path))).note_grad_norm(0, 0, 1.0)
