"""Runs that evaluations end early, and the best checkpoint; interrupted or not, they leave the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import train
from slimelite.cluster import Cluster
from slimelite.loop import Evaluations
from slimelite.models.checkpoints import CHECKSUMS
from slimelite.tracking.metrics_file import read_metrics

from .conftest import SMALL_FLAGS

pytestmark = pytest.mark.e2e

# the metric that decides: before training, then after each rollout; the fifth evaluation is the second no better one
PLAN = """
def plan(rollout_id, args, data, metrics):
    metrics["eval/planned"] = [0.1, 0.3, 0.5, 0.4, 0.45, 0.6][rollout_id + 1]
"""
FLAGS = [
    *("--num-rollout", "8", "--eval-interval", "1", "--custom-eval-rollout-log-function-path", "plan.py:plan"),
    *("--early-stop-metric", "eval/planned", "--early-stop-patience", "2", "--save-best", "--load", "saved"),
    *("--save", "saved", "--save-interval", "3", "--save-retain-interval", "6", "--save-hf", "hf/{rollout_id}"),
]
Start = Callable[[str], int]


@pytest.fixture
def start(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """``start(name)``: one run, or one more, in a folder of its own; its exit status."""

    def run(name: str) -> int:
        folder = tmp_path / name
        if not folder.exists():
            folder.mkdir()
            (folder / "plan.py").write_text(PLAN)
            for part in ("model", "data", "reward.py"):
                (folder / part).symlink_to(small / part)
        monkeypatch.chdir(folder)
        return train.main([*SMALL_FLAGS, *FLAGS, "--run-dir", "run"])

    return run


def checkpoint(folder: Path) -> dict[str, Any]:
    """All but .metadata, which has the folder's own name, and the times of the rollout that was made ahead."""
    files = json.loads((folder / CHECKSUMS).read_text())["files"]
    state = json.loads((folder / "rollout_state.json").read_text())
    timeless = ("distcp", "trainer.json", "ahead.parquet")
    return {"files": {n: f for n, f in files.items() if n.endswith(timeless)}, "source": state["data_source"]}


def left(folder: Path) -> dict[str, Any]:
    """All that a run leaves, without times: what decided, checkpoints to the bit, the names of models, metrics."""
    saved = folder / "saved"
    rows = read_metrics(folder / "run")
    return {
        "evaluations": json.loads((saved / "evaluations.json").read_text()),
        "markers": {path.name: path.read_text() for path in saved.glob("*.txt")},
        "checkpoints": {path.name: checkpoint(path) for path in saved.glob("iter_*")},
        "models": {path.parent.name: load_file(path) for path in folder.glob("hf/*/model.safetensors")},
        "rollouts": sorted(path.name for path in (folder / "run" / "rollouts").iterdir()),
        # a set, since an evaluation that is made again leaves the same rows again
        "metrics": {
            (row["kind"], *(row.get(f"{kind}/step", -9.0) for kind in ("rollout", "train", "eval")), name, value)
            for row in rows
            for name, value in row.items()
            if row["kind"] in ("rollout", "train", "eval") and not name.startswith(("perf/", "time"))
        },
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    models, wanted = found.pop("models"), dict(expected)
    assert models.keys() == wanted["models"].keys()
    for folder, weights in wanted.pop("models").items():
        assert all(torch.equal(models[folder][name], weight) for name, weight in weights.items()), folder
    for part, content in wanted.items():
        assert found[part] == content, part


def test_a_run_ends_early_and_leaves_its_best(start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert start("straight") == 0
    folder = tmp_path / "straight"
    found, status = left(folder), json.loads((folder / "run" / "status.json").read_text())
    assert [each["value"] for each in found["evaluations"]["evaluations"]] == [0.1, 0.3, 0.5, 0.4, 0.45]
    why = "finished early: 2 evaluations were no better than eval/planned 0.500 after 2 rollouts (rollout 1 in files)"
    assert (status["status"], status["message"], status["rollouts_done"]) == ("finished", why, 4)
    out = capsys.readouterr().out
    assert f"\n{why}\n" in out
    assert (
        f"eval/planned 0.500 after 2 rollouts (rollout 1 in files): {folder}/saved/iter_0000001, {folder}/hf/best\n"
        in out
    )

    # 0 was the best before 1, and 2 was due; neither is the best or retained. 3 is the last.
    assert found["checkpoints"].keys() == {"iter_0000001", "iter_0000003"}
    assert found["markers"] == {"best_checkpointed_iteration.txt": "1", "latest_checkpointed_iteration.txt": "3"}
    assert found["models"].keys() == {"best", "2", "3"}
    dcp_to_torch_save(folder / "saved" / "iter_0000001", folder / "best.pt")
    best = torch.load(folder / "best.pt", weights_only=False)["model"]
    assert all(torch.equal(best[name], weight) for name, weight in found["models"]["best"].items())
    assert not all(torch.equal(best[name], weight) for name, weight in found["models"]["3"].items())

    # the rollout that was made ahead is not recorded, and a run that goes on after all has it
    assert found["rollouts"] == [f"000000{i}.parquet" for i in range(4)]
    assert (folder / "saved" / "iter_0000003" / "ahead.parquet").is_file()
    assert start("straight") == 0
    assert why in capsys.readouterr().out
    assert_same(left(folder), found)
    (folder / "saved" / "evaluations.json").write_text("{}")
    assert start("straight") == 2
    assert "evaluations.json: is damaged (KeyError: 'evaluations'): remove the file; the" in capsys.readouterr().err


def test_interrupted_it_leaves_the_same(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ended between a save and its evaluation, before the best is marked, and in the last evaluation."""
    assert start("straight") == 0
    straight = left(tmp_path / "straight")
    moments: list[tuple[type[Any], str, int]] = [
        (Cluster, "evaluate", 2),
        (Evaluations, "mark", 1),
        (Evaluations, "note", 3),
    ]
    for owner, verb, moment in moments:
        real = getattr(owner, verb)

        def dies(self: object, rollout_id: int, *rest: Any, real: Any = real, moment: int = moment) -> Any:
            if rollout_id == moment:
                raise OSError("the lights went out")
            return real(self, rollout_id, *rest)

        name = f"{verb}-{moment}"
        with monkeypatch.context() as patch:
            patch.setattr(owner, verb, dies)
            assert start(name) == 1
        assert start(name) == 0
        assert_same(left(tmp_path / name), straight)
