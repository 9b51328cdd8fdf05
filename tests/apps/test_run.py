"""The reader of run folders, on folders that the real Tracker wrote."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from slimelite.apps.command import main
from slimelite.apps.runs import Run, read_runs
from slimelite.samples.table import SampleTable
from slimelite.tracking.metrics_file import MetricsFile
from tests.tracking.fake_run import make_args, make_table, play


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("runs") / "a"
    play(make_args(made, num_rollout=4), range(4))
    for name in ("dropped", "token_stats"):
        (made / name).mkdir()
        shutil.copy(made / "rollouts" / "0000002.parquet", made / name)
    return made


def test_everything_a_run_folder_holds_is_found(folder: Path) -> None:
    run = Run.read(folder)
    assert run.name == "a"
    assert (run.config["hf_checkpoint"], run.config["rollout_batch_size"]) == ("models/tiny", 4)
    assert "derivations" not in run.config
    assert run.status["status"] == "finished"
    assert "torch" in run.versions
    assert list(run.rollouts) == [0, 1, 2, 3]
    assert list(run.dropped) == list(run.token_stats) == [2]
    assert len(SampleTable.from_parquet(run.rollouts[3])) == 8
    assert "done in" in run.log.read_text()
    assert run.alarms == []


def test_series_stand_on_their_own_axes(folder: Path) -> None:
    series = Run.read(folder).series
    x, values = series["train/entropy_loss"]
    np.testing.assert_allclose(x, [0, 1, 2, 3])
    np.testing.assert_allclose(values, [1.5, 1.4, 1.3, 1.2])
    assert {"eval/step", "train/step", "rollout/step", "time", "kind"} & set(series) == set()


def test_the_file_of_an_evaluation_has_the_x_of_its_score(folder: Path) -> None:
    run = Run.read(folder)
    assert run.scores == ["eval/sums"]
    x, scores = run.series["eval/sums"]
    assert list(run.evals) == ["sums"]
    assert list(run.evals["sums"]) == x.tolist()
    means = [SampleTable.from_parquet(path).reward.mean() for path in run.evals["sums"].values()]
    # fake_run.make_table rounds a score up to whole samples
    np.testing.assert_allclose(means, [np.ceil(8 * score) / 8 for score in scores])


def test_the_evaluation_before_training_is_minus_one(tmp_path: Path, folder: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(folder, run)
    shutil.rmtree(run / "eval")
    for name in ("a-b-start", "a-b-0000000", "a-b-0000012", "other"):
        make_table().to_parquet(run / "eval" / f"{name}.parquet")
    assert {n: p.name for n, p in Run.read(run).evals["a-b"].items()} == {
        -1: "a-b-start.parquet",
        0: "a-b-0000000.parquet",
        12: "a-b-0000012.parquet",
    }


def test_a_run_that_goes_on_is_read_up_to_its_last_whole_line(tmp_path: Path, folder: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(folder, run)
    whole = Run.read(run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"time": 1.0, "kind": "rollout", "rollout/step": 4, "rollout/raw_rew')
    (run / "alarms.jsonl").write_text(json.dumps({"kind": "flat", "rollout_id": 3}) + '\n{"kind": "en')
    torn = Run.read(run)
    assert torn.records == whole.records
    assert torn.alarms == [{"kind": "flat", "rollout_id": 3}]


def test_metrics_alone_are_a_run(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    file.write("rollout", {"rollout/step": 0, "rollout/raw_reward": 1.0})
    file.close(False)
    run = Run.read(tmp_path)
    assert (run.config, run.versions, run.status, run.rollouts, run.evals) == ({}, {}, {}, {}, {})
    assert list(run.series) == ["rollout/raw_reward"]


def test_what_is_no_run_is_said(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ValueError, match="nowhere is not a run folder: there is no such folder"):
        Run.read(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"is not a run folder: it has no metrics\.jsonl"):
        Run.read(tmp_path)
    MetricsFile(tmp_path).write("start", {"rollout/step": 0})
    (tmp_path / "status.json").write_text(json.dumps({"status": "failed", "message": "ValueError: no such file"}))
    with pytest.raises(ValueError, match="has no metrics yet: status failed; ValueError: no such file"):
        Run.read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        _ = Run(tmp_path, "x", ()).config
    with pytest.raises(ValueError, match="a is given twice"):
        read_runs([folder, folder.parent / "." / "a"])


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("metrics.jsonl", "[]", r"metrics\.jsonl:1: not a record of metrics: '\[\]'"),
        ("metrics.jsonl", '{"kind": "rollout", "rollout/step": []}', r"metrics\.jsonl:1: not a record of metrics"),
        ("metrics.jsonl", '{"rollout/step": 1}', r"metrics\.jsonl:1: not a record of metrics"),
        ("config.json", "[]", r"config\.json is not a file of a run: it does not contain a JSON object"),
        ("status.json", "[]", None),
        ("status.json", '{"status": "running", "started": 1}', None),
    ],
)
def test_files_of_something_else_are_one_line(
    tmp_path: Path, folder: Path, file: str, content: str, said: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / file).write_text(content)
    assert main(["view", str(copy)]) == (said is not None)
    errors = capsys.readouterr().err
    assert errors.count("\n") == (said is not None)
    assert re.search(said or "", errors)


def test_a_file_of_samples_that_is_cut_short_is_said(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page has the rest."""
    shutil.copytree(folder, tmp_path / "copy")
    os.truncate(tmp_path / "copy" / "rollouts" / "0000001.parquet", 500)
    assert main(["view", str(tmp_path / "copy")]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("slimelite view: 0000001.parquet of rollouts could not be read: ")


def test_names_are_as_short_as_they_differ(tmp_path: Path, folder: Path) -> None:
    for name in ("x/grpo", "y/grpo", "y/other"):
        shutil.copytree(folder, tmp_path / name)
    assert [r.name for r in read_runs([tmp_path / "x/grpo", tmp_path / "y/other"])] == ["grpo", "other"]
    assert [r.name for r in read_runs([tmp_path / "x/grpo", tmp_path / "y/grpo"])] == ["x/grpo", "y/grpo"]
