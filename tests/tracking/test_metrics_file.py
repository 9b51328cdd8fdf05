from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from slimelite.tracking.metrics_file import FILE_NAME, MetricsFile, axis_of, read_metrics, series, unknown_metrics


def test_a_line_is_strict_json_and_in_the_file_at_once(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    file.write("train", {"rollout/step": 0, "train/step": 3, "train/loss": math.nan, "train/ois": -math.inf})

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is not JSON")

    line = json.loads((tmp_path / FILE_NAME).read_text(), parse_constant=refuse)
    assert (line["kind"], line["train/step"], line["train/loss"], line["train/ois"]) == ("train", 3, "NaN", "-Infinity")
    assert line["time"] > 1.7e9
    (record,) = read_metrics(tmp_path)
    assert math.isnan(record["train/loss"])
    assert record["train/ois"] == -math.inf
    file.close(False)


def test_axes() -> None:
    names = ("train/loss", "eval/gsm8k", "rollout/raw_reward", "perf/train_time", "passrate/pass@2", "my/metric")
    assert [axis_of(n).partition("/")[0] for n in names] == ["train", "eval", *["rollout"] * 4]


def test_a_resumed_run_takes_back_what_came_after_its_start(tmp_path: Path) -> None:
    first = MetricsFile(tmp_path)
    first.write("start", {"rollout/step": 0, "eval/step": -1})
    first.write("eval", {"eval/step": -1, "eval/sums": 0.1})
    for i in range(4):
        first.write("rollout", {"rollout/step": i, "rollout/raw_reward": i})
        first.write("train", {"rollout/step": i, "train/step": 2 * i + 1, "train/loss": i})
        first.write("eval", {"eval/step": i, "eval/sums": i})
    first.close(True)
    second = MetricsFile(tmp_path)
    second.write("start", {"rollout/step": 2, "eval/step": 1})
    second.write("rollout", {"rollout/step": 2, "rollout/raw_reward": 20})
    records = read_metrics(tmp_path)
    assert series(records, "rollout/raw_reward") == ([0, 1, 2], [0, 1, 20])
    assert series(records, "train/loss") == ([1, 3], [0, 1])
    # the evaluation after rollout 1 saw the weights that the run went on with
    assert series(records, "eval/sums") == ([-1, 0, 1], [0.1, 0, 1])

    third = MetricsFile(tmp_path)
    third.write("start", {"rollout/step": 0, "eval/step": -1})
    assert series(read_metrics(tmp_path), "eval/sums") == ([], [])
    second.close(False)
    third.close(False)


def test_a_line_cut_short_by_a_crash_costs_that_line_alone(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    path.write_text('{"time": 1, "kind": "rollout", "rollout/step": 0, "a": 1}\n{"time": 2, "kind": "rol')
    assert series(read_metrics(tmp_path), "a") == ([0], [1])
    file = MetricsFile(tmp_path)
    file.write("start", {"rollout/step": 1})
    file.write("rollout", {"rollout/step": 1, "a": 2})
    file.close(False)
    assert series(read_metrics(tmp_path), "a") == ([0, 1], [1, 2])


def test_a_run_of_another_format_is_refused(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path)
    file.write("start", {"rollout/step": 0, "eval/step": -1})
    file.close(False)
    line = (tmp_path / FILE_NAME).read_text()
    assert json.loads(line)["format"] == 1
    assert read_metrics(tmp_path)[0].keys() == {"time", "kind", "rollout/step", "eval/step"}
    (tmp_path / FILE_NAME).write_text(line.replace('"format": 1, ', ""))
    assert len(read_metrics(tmp_path)) == 1
    (tmp_path / FILE_NAME).write_text(line.replace('"format": 1', '"format": 2'))
    with pytest.raises(ValueError, match=r"metrics\.jsonl: has format 2, but this slimelite reads format 1: use the"):
        read_metrics(tmp_path)


def test_a_broken_line_elsewhere_is_an_error_with_its_number(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(
        '{"time": 1, "kind": "start", "rollout/step": 0}\noops\n{"time": 1, "kind": "train"}\n'
    )
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: not JSON: 'oops'"):
        read_metrics(tmp_path)
    with pytest.raises(ValueError, match="not a run folder"):
        read_metrics(tmp_path / "nothing")


def test_the_nearest_names_come_first_when_a_metric_is_unknown() -> None:
    names = ["rollout/mixed_groups", "rollout/raw_reward", "train/loss", "rollout/tokens"]
    records = [{"rollout/step": 0.0, **dict.fromkeys(names, 1.0)}]
    for wanted in ("rollout/mixed", "mixed", "rollout/mixed_group"):
        said = unknown_metrics([wanted], [records])
        assert said.startswith(
            f"no run has {wanted}; did you mean rollout/mixed_groups? other metrics are: rollout/raw"
        ), said
    assert unknown_metrics(["zzz"], [records]) == f"no run has zzz; the metrics are: {', '.join(sorted(names))}"
