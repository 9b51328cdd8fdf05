"""``slimelite compare`` on folders that the real Tracker wrote, and on records with known sums."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slimelite.apps.command import main
from slimelite.apps.compare import comparison
from slimelite.apps.permutations import paired_test
from slimelite.apps.runs import Run, read_runs
from slimelite.arguments import Derivation
from slimelite.samples.sample import Sample
from slimelite.samples.table import SampleTable
from slimelite.tracking.metrics_file import MetricsFile
from tests.tracking.fake_run import make_args, play, play_pairs
from tests.tracking.terminal import terminal

Rewards = list[tuple[str, list[float]]]  # prompt, the rewards of its answers


def answers(rewards: Rewards) -> SampleTable:
    groups = []
    for number, (prompt, of_prompt) in enumerate(rewards):
        group = [
            Sample(group_index=number, index=10 * number + i, prompt=prompt, tokens=[1], label="7", reward=reward)
            for i, reward in enumerate(of_prompt)
        ]
        for sample in group:
            sample.append_response_tokens([5], [-0.5], text="7")
        groups.append(group)
    return SampleTable.from_samples(groups)


def write(folder: Path, scores: dict[int, float], last: Rewards = ()) -> Run:  # type: ignore[assignment]
    """A run with an evaluation of ``d`` at each step of ``scores``; the answers of the last one are saved."""
    folder.mkdir()
    file = MetricsFile(folder)
    file.write("start", {"rollout/step": 0, "eval/step": -1})
    for step, score in scores.items():
        file.write("eval", {"eval/step": step, "eval/d": score, "eval/d-stderr": score / 10})
    file.close(False)
    if last:
        answers(last).to_parquet(folder / "eval" / f"d-{max(scores):07d}.parquet")
    return Run.read(folder)


def against_first(*runs: Run) -> dict[str, Any]:
    found: dict[str, Any] = comparison(runs)["runs"][1]["evals"]["d"]["against_first"]
    return found


def test_prompts_are_paired_by_their_text_whatever_their_order(tmp_path: Path) -> None:
    first = write(tmp_path / "a", {0: 0.1}, [("x", [0.0, 1.0]), ("y", [1.0, 1.0]), ("z", [0.0, 0.0]), ("only a", [9])])
    second = write(tmp_path / "b", {4: 0.2}, [("z", [1.0, 0.0]), ("only b", [9]), ("y", [0.0, 1.0]), ("x", [1.0, 1.0])])
    expected = paired_test(np.array([1.0 - 0.5, 0.5 - 1.0, 0.5 - 0.0]))
    assert against_first(first, second) == expected._asdict() | {"of_prompts": 4}


def test_a_prompt_that_stands_twice_in_the_file_is_two_prompts(tmp_path: Path) -> None:
    first = write(tmp_path / "a", {0: 0.1}, [("x", [0.0]), ("x", [1.0])])
    second = write(tmp_path / "b", {0: 0.1}, [("x", [0.5]), ("x", [0.25])])
    assert against_first(first, second)["prompts"] == 2
    assert against_first(first, second)["difference"] == pytest.approx((0.5 - 0.75) / 2)


def test_what_cannot_be_paired_is_said(tmp_path: Path) -> None:
    first = write(tmp_path / "a", {0: 0.1}, [("x", [0.0])])
    assert against_first(first, write(tmp_path / "b", {0: 0.1}, [("X", [0.0])])) == {
        "why_not": "the prompts are not the same"
    }
    lost = write(tmp_path / "lost", {0: 0.1}, [("x", [float("nan")])])
    assert against_first(first, lost) == {"why_not": "some rewards of answers are not numbers"}
    nothing = write(tmp_path / "c", {0: 0.1})
    assert against_first(first, nothing) == {"why_not": "c has no saved answers of its last evaluation"}


def test_best_and_last_have_their_step_and_standard_error(tmp_path: Path) -> None:
    run = write(tmp_path / "a", {-1: 0.3, 4: 0.8, 9: float("nan"), 14: 0.5})
    (facts,) = comparison([run])["runs"]
    assert facts["evals"]["d"]["best"] == {"value": 0.8, "standard_error": pytest.approx(0.08), "at": 4}
    assert facts["evals"]["d"]["last"] == {"value": 0.5, "standard_error": pytest.approx(0.05), "at": 14}


def record(folder: Path, rollouts: range, cpu: float) -> None:
    """The records of one process of a run: each rollout takes 5 CPU-seconds after ``cpu`` at the start."""
    file = MetricsFile(folder)
    file.write("start", {"rollout/step": rollouts.start})
    for i in rollouts:
        file.write("rollout", {"rollout/step": i, "rollout/raw_reward": i / 10, "perf/generated_tokens": 100 + i})
        file.write(
            "train",
            {"rollout/step": i, "train/step": i, "perf/actor_train_tok_per_s": 50.0, "perf/actor_train_time": 2.0 + i},
        )
        times = {"perf/rollout_time": 1.5, "perf/train_time": 2.5, "perf/cpu_seconds": cpu + 5.0 * (i + 1)}
        file.write("perf", {"rollout/step": i, **times})
    file.close(False)


def test_sums_of_a_run_that_was_resumed_count_each_rollout_once(tmp_path: Path) -> None:
    record(tmp_path, range(6), cpu=20)
    record(tmp_path, range(4, 15), cpu=30)  # the second process resumed at rollout 4
    (facts,) = comparison([Run.read(tmp_path)])["runs"]
    assert facts["rollouts"] == 15
    assert facts["reward"] == pytest.approx(sum(i / 10 for i in range(5, 15)) / 10)
    assert facts["tokens_generated"] == sum(100 + i for i in range(15))
    assert facts["tokens_trained"] == pytest.approx(sum(50 * (2 + i) for i in range(15)))
    assert facts["seconds"] == {"gen": 22.5, "train": 37.5, "sync": None, "save": None, "eval": None}
    # the first process counted 20 + 5 * 4 at rollout 3, the second 30 + 5 * 15 at its end
    assert facts["cpu_hours"] == pytest.approx((40 + 105) / 3600)
    assert facts["gpu_hours"] is None


@pytest.mark.parametrize(
    ("changes", "gpus"),
    [({}, 6), ({"colocate": True}, 4), ({"debug_train_only": True}, 4), ({"debug_rollout_only": True}, 2)],
)
def test_gpu_hours_are_those_of_all_gpus_for_the_whole_time(
    tmp_path: Path, changes: dict[str, bool], gpus: int
) -> None:
    write(tmp_path / "a", {0: 0.5})
    lines = (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()
    times = [json.loads(line) | {"time": 1000.0 + 1800 * i} for i, line in enumerate(lines)]
    (tmp_path / "a" / "metrics.jsonl").write_text("\n".join(map(json.dumps, times)) + "\n")
    config = {"device": "cuda", "actor_num_nodes": 2, "actor_num_gpus_per_node": 2, "rollout_num_gpus": 2}
    config |= {"colocate": False, "debug_train_only": False, "debug_rollout_only": False, **changes}
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    (facts,) = comparison([Run.read(tmp_path / "a")])["runs"]
    assert (facts["wall_seconds"], facts["gpu_hours"]) == (1800, gpus / 2)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("two")
    args = make_args(folder / "a", num_rollout=4, lr=1e-3)
    play(args, range(4))
    changed = replace(args, run_dir=str(folder / "b"), lr=2e-3, num_engines=2, micro_batch_size=4, seed=3)
    play(replace(changed, derivations=(Derivation("seed", 3, "a reason"),)), range(4))
    return [str(folder / name) for name in "ab"]


def test_flags_that_differ_are_those_that_somebody_chose(two: list[str], tmp_path: Path) -> None:
    first, second = two
    found = comparison(read_runs(two))["flags"]
    # the seed was derived in one run alone; --run-dir and num_engines, which is no flag, say nothing
    assert found == {"--lr": [1e-3, 2e-3], "--micro-batch-size": [1, 4], "--seed": [1234, 3]}
    older = shutil.copytree(first, tmp_path / "older")
    config = json.loads((older / "config.json").read_text())
    del config["lr"]
    config |= {"derivations": {"seed": "another"}, "seed": 4}
    (older / "config.json").write_text(json.dumps(config))
    assert list(comparison(read_runs([second, older]))["flags"]) == ["--micro-batch-size"]


def test_the_table_as_text_and_json(two: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    shown = {}
    for form in ("", "--json"):
        assert main(["compare", *two, *filter(None, [form])]) == 0
        shown[form] = capsys.readouterr().out
    for text in ("--lr", "0.001", "0.002", "finished", "sums, last − last of a", "p 1, 4 prompts", "sign-flip"):
        assert text in shown[""], text
    assert "\x1b" not in shown[""], "no colours where there is no terminal"
    facts = json.loads(shown["--json"], parse_constant=pytest.fail)
    assert [run["name"] for run in facts["runs"]] == ["a", "b"]
    assert facts["runs"][1]["evals"]["sums"]["against_first"]["difference"] == 0


def test_alarms_are_named(two: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = shutil.copytree(two[1], tmp_path / "other")
    alarms = [{"kind": "stall", "rollout_id": 1, "ended": 2}, {"kind": "mismatch", "rollout_id": 3, "ended": None}]
    (other / "alarms.jsonl").write_text("".join(json.dumps(alarm) + "\n" for alarm in alarms))
    assert main(["compare", two[0], str(other)]) == 0
    said = capsys.readouterr().out
    assert ["alarms", "stall", "in", "1,", "mismatch", "since", "3"] in [line.split() for line in said.splitlines()]
    assert "Rollouts are numbered from 0, as in files." in said


def test_runs_of_preferences_show_loss_accuracy_and_margin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        play_pairs(make_args(tmp_path / name, loss_type="dpo_loss", num_rollout=4, eval_datasets=()), batches=2)
    runs = [str(tmp_path / name) for name in "ab"]
    assert main(["compare", *runs]) == 0
    cells = [re.split(" {2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    rows = {title: values for title, *values in cells}
    assert rows["batches"] == ["2 of 4"] * 2
    shown = {title: rows[f"{title}, mean of the last 10 batches"] for title in ("loss", "accuracy", "margin")}
    assert shown == {"loss": ["0.6250"] * 2, "accuracy": ["0.250"] * 2, "margin": ["0.062"] * 2}
    assert "rollouts" not in rows
    assert main(["compare", "--group", "one", runs[0], "--group", "two", runs[1]]) == 0
    said = capsys.readouterr().out
    assert all(f"{title}, mean of the last 10" in said for title in ("loss", "accuracy", "margin"))


def test_one_run_alone_is_described(two: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", two[0]]) == 0
    said = capsys.readouterr().out
    assert "--lr" not in said
    assert "sums, best" in said
    assert main(["compare", two[0], two[0]]) == 1
    assert "is given twice" in capsys.readouterr().err


def test_a_narrow_terminal_cuts_nothing_off(two: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [str(shutil.copytree(two[1], tmp_path / f"a-run-with-a-long-name-{i}")) for i in range(3)]
    monkeypatch.setenv("COLUMNS", "80")
    with terminal() as screen:
        monkeypatch.setattr("sys.stdout", screen.stream)
        assert main(["compare", *two, *others]) == 0
    assert "--micro-batch-size" in screen.shown
    assert "…" not in screen.shown
    assert "\x1b[1m" in screen.shown, "bold"
