from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_run import make_args, make_table, make_tracker, play

from slimelite.models.checkpoints import MARKER
from slimelite.samples.table import SampleTable
from slimelite.tracking.metrics_file import read_metrics, series
from slimelite.tracking.tracker import Tracker


def status(run_dir: Path) -> dict[str, object]:
    return json.loads((run_dir / "status.json").read_text())


def test_a_whole_run_leaves_everything_in_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    play(make_args(tmp_path), range(5), draws=True)
    records = read_metrics(tmp_path)
    assert [r["kind"] for r in records[:6]] == ["start", "eval", "rollout", "train", "perf", "rollout"]
    assert series(records, "rollout/raw_reward") == ([0, 1, 2, 3, 4], [0.25, 0.375, 0.5, 0.75, 0.875])
    assert series(records, "train/loss")[0] == [0, 1, 2, 3, 4]
    assert series(records, "eval/sums") == ([-1, 1, 3], [0.1, 0.35, 0.65])
    assert series(records, "rollout/response_len/mean")[1] == [5.5] * 5, "from the table: the rollout did not say"
    for name in ("rollout_time", "train_time", "update_weights_time", "wait_time_ratio", "update_weights_bytes"):
        assert series(records, f"perf/{name}")[0] == [0, 1, 2, 3, 4], name
    assert series(records, "perf/eval_time") == ([1, 3], [7.0, 7.0]), "the evaluation before training is in no rollout"
    assert SampleTable.from_parquet(tmp_path / "rollouts" / "0000004.parquet").reward.mean() == 0.875
    assert SampleTable.from_parquet(tmp_path / "eval" / "sums-start.parquet").reward.sum() == 1
    evals = [f"sums-{i}.parquet" for i in ("0000001", "0000003", "start")]
    assert sorted(p.name for p in (tmp_path / "eval").iterdir()) == evals
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (status(tmp_path)["status"], status(tmp_path)["rollouts_done"]) == ("finished", 5)
    assert json.loads((tmp_path / "versions.json").read_text())["python"]
    assert not list(tmp_path.rglob("*.partial"))

    out = capsys.readouterr().out
    assert "  batch     4 prompts x 2 samples = 8 = 1 step of 8\n" in out
    assert "  eval before training: sums 0.100 (length 6, truncated 5%)\n" in out
    rows = [line.split() for line in out.splitlines() if line.strip().startswith(("1 of 5", "2 of 5", "5 of 5"))]
    assert [row[3] for row in rows] == ["0.250", "0.375", "0.875"]
    assert rows[1][4] == "0.350", "the row of a rollout that ended with an evaluation shows it"
    assert out.count("samples of 1 of 5 (rollout 0 in files)") == 1
    assert out.count("answers to sums after 2 of 5 (rollout 1 in files)") == 1
    assert "  rollouts  5, numbered 0 to 4 in files\n" in out
    assert "eval/sums   first 0.100, best 0.650 after 4 rollouts (rollout 3 in files), last 0.650" in out
    assert "What is 0 + 0?" in (tmp_path / "log.txt").read_text()


def test_a_resumed_run_goes_on_in_the_same_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    play(make_args(tmp_path), range(4))
    play(make_args(tmp_path), range(3, 5))
    records = read_metrics(tmp_path)
    assert [r["rollout/step"] for r in records if r["kind"] == "rollout"] == [0, 1, 2, 3, 4]
    assert series(records, "eval/sums")[0] == [-1, 1, 3]
    assert "rollouts  5, numbered 0 to 4 in files, continuing at 3" in capsys.readouterr().out


def test_a_long_run_keeps_its_newest_rollouts(tmp_path: Path) -> None:
    args = make_args(tmp_path, save_rollouts="2")
    play(args, range(4))
    evals = {f"eval/sums-{i}.parquet" for i in ("start", "0000001", "0000003")}
    assert files_of_tables(tmp_path) == {f"rollouts/{i:07d}.parquet" for i in (2, 3)} | evals
    for folder in ("dropped", "token_stats"):
        for i in (0, 2, 3):
            make_table().to_parquet(tmp_path / folder / f"{i:07d}.parquet")
    (tmp_path / "rollouts/first.parquet").touch()  # the user's
    later = replace(args, start_rollout_id=4)
    play(later, range(4, 5))
    (tmp_path / "rollouts/first.parquet").unlink()
    kept = {f"{folder}/0000003.parquet" for folder in ("rollouts", "dropped", "token_stats")}
    assert files_of_tables(tmp_path) == {*kept, "rollouts/0000004.parquet"} | evals
    play(replace(later, save_rollouts="none"), range(4, 5))
    assert files_of_tables(tmp_path) == kept | evals, "rollout 4 was made again, and has no file"
    assert series(read_metrics(tmp_path), "rollout/raw_reward")[0] == [0, 1, 2, 3, 4]


def files_of_tables(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.glob("*/*.parquet")}


def test_a_finished_run_says_that_nothing_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    play(make_args(tmp_path, start_rollout_id=4), range(4, 4))
    out = capsys.readouterr().out
    assert "nothing is left" not in out
    assert f"slimeliteview{tmp_path}" in "".join(out.split()), "a line may be folded"
    play(make_args(tmp_path, start_rollout_id=5), range(5, 5))
    assert "nothing is left to do: the first rollout is number 5 of --num-rollout 5: raise" in capsys.readouterr().out
    play(make_args(tmp_path, start_rollout_id=5, load="checkpoints"), range(5, 5))
    assert "nothing is left to do: the checkpoint of --load already has all 5 rollouts" in capsys.readouterr().out


def test_an_error_is_recorded_and_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        os.write(2, b"[E] from a library\n")
        raise RuntimeError("CUDA is out of memory")

    with pytest.raises(RuntimeError, match="CUDA is out"):
        play(make_args(tmp_path), range(1), then=fail, draws=True)
    found = status(tmp_path)
    assert (found["status"], found["message"]) == ("failed", "RuntimeError: CUDA is out of memory")
    assert found["rollouts_done"] == 1
    log = (tmp_path / "log.txt").read_text()
    assert "Traceback (most recent call last)" in log
    assert "RuntimeError: CUDA is out of memory" in log
    assert (tmp_path / "stderr.txt").read_text() == "[E] from a library\n"
    out, err = capfd.readouterr()
    assert "failed after 1 of 5 rollouts, " in out
    assert "from a library" not in out + err
    assert (tmp_path / "curves.png").exists()


def test_a_run_of_supervised_training_counts_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(batches: int) -> None:
        with make_tracker(make_args(tmp_path, loss_type="sft_loss", eval_datasets=())) as tracker:
            for i in range(batches):
                tracker.log_rollout(i, make_table(), {})
                tracker.log_train(i, {"train/loss": 2.5})
                tracker.finish_rollout(i)
            raise RuntimeError("CUDA is out of memory")

    for batches, said in ((0, "failed before the end of its first batch, "), (1, "failed after 1 of 5 batches, ")):
        with pytest.raises(RuntimeError):
            fail(batches)
        assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "expected"),
    [(KeyboardInterrupt(), "interrupted"), (SystemExit(3), "failed"), (SystemExit(0), "finished")],
)
def test_how_a_run_ended(tmp_path: Path, error: BaseException, expected: str) -> None:
    with pytest.raises(type(error)), Tracker(make_args(tmp_path)):
        raise error
    assert status(tmp_path)["status"] == expected


class EngineLostError(Exception):
    """A stand-in with the name that `restarts.OUTSIDE` has; the real one belongs to a package above this one."""


def test_a_run_that_lost_its_machine_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save, advice = tmp_path / "ckpt", "to continue from the newest checkpoint, give the same command with --run-dir "
    args = make_args(tmp_path / "run", save=str(save), start_rollout_id=3)
    for error, checkpoint, said in (
        (EngineLostError("gone"), False, False),
        (EngineLostError("gone"), True, True),
        (ValueError("a mistake"), True, False),
    ):
        if checkpoint:
            save.mkdir(exist_ok=True)
            (save / MARKER).write_text("2\n")
        with pytest.raises(type(error)), Tracker(args):
            raise error
        out = " ".join(capsys.readouterr().out.split())
        assert "failed before the end of rollout 3, the first rollout after the newest checkpoint, " in out
        assert (advice in out) is said


def test_a_start_that_fails_leaves_nothing_redirected(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    handlers = len(logging.getLogger("slimelite").handlers), len(logging.getLogger().handlers)
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(IsADirectoryError), Tracker(make_args(tmp_path)):
        pass
    os.write(2, b"heard again\n")
    assert capfd.readouterr().err == "heard again\n"
    assert handlers == (len(logging.getLogger("slimelite").handlers), len(logging.getLogger().handlers))
    assert status(tmp_path)["status"] == "failed"


def test_several_optimizer_steps_of_a_rollout(tmp_path: Path) -> None:
    args = make_args(tmp_path, num_steps_per_rollout=2, global_batch_size=4)
    with make_tracker(args) as tracker:
        for i in range(2):
            steps = [{"train/loss": i + 0.1, "train/grad_norm": 1.0}, {"train/loss": i + 0.2, "train/grad_norm": 2.0}]
            tracker.log_train(i, {"train/loss": i + 0.15, "rollout/log_probs": -1.0}, steps)
            tracker.finish_rollout(i)
    records = read_metrics(tmp_path)
    assert series(records, "train/loss") == ([0, 1, 2, 3], [0.1, 0.2, 1.1, 1.2])
    assert series(records, "rollout/log_probs") == ([0, 1], [-1.0, -1.0])


TRAINED = {"advantages": 0.5, "loss_weights": 0.25}


def test_the_saved_rollout_has_the_advantages_and_weights_that_trained(tmp_path: Path) -> None:
    table, path = make_table(), tmp_path / "rollouts" / "0000000.parquet"
    with Tracker(make_args(tmp_path)) as tracker:
        tracker.log_rollout(0, table, {})
        assert SampleTable.from_parquet(path).advantages is None
        columns = {name: np.full(len(table.response_tokens), v, np.float32) for name, v in TRAINED.items()}
        tracker.log_train(0, {}, columns=columns)
        saved = SampleTable.from_parquet(path)
        tracker.log_train(1, {})
        assert not (tmp_path / "rollouts" / "0000001.parquet").exists()
    assert saved.advantages is not None
    assert set(saved.advantages) == {0.5}
    assert saved.loss_weights is not None
    assert set(saved.loss_weights) == {0.25}
    assert saved.response == table.response


def test_what_came_before_the_first_rollout_is_not_in_its_times(tmp_path: Path) -> None:
    ticks = iter(range(0, 1000, 10))
    tracker = make_tracker(make_args(tmp_path))
    with tracker:
        tracker.timer._clock = lambda: float(next(ticks))
        with tracker.phase("start"):
            pass
        with tracker.phase("generate"):
            pass
        tracker.log_rollout(0, make_table(), {})
        tracker.finish_rollout(0)
    perf = read_metrics(tmp_path)[-1]
    assert perf.keys() >= {"perf/rollout_time", "perf/step_time"}
    assert "perf/start_time" not in perf
    assert perf["perf/step_time"] == 30.0


def test_what_the_trainer_measured_itself_wins(tmp_path: Path) -> None:
    with make_tracker(make_args(tmp_path)) as tracker:
        with tracker.phase("train"):
            pass
        tracker.log_train(0, {"perf/train_time": 123.0})
        tracker.finish_rollout(0)
    assert series(read_metrics(tmp_path), "perf/train_time") == ([0], [123.0])


def test_speed_and_errors_of_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rollout that ran ahead is only picked up in the loop's phase; one of reused groups alone has no speed."""
    with make_tracker(make_args(tmp_path, eval_datasets=())) as tracker:
        for i, tokens in enumerate((3000, 0)):
            with tracker.phase("generate"):
                pass
            speed = {"perf/rollout_time": 10.0, "perf/generated_tokens": tokens}
            tracker.log_rollout(i, make_table(), speed | {"rollout/reward_errors": 3.0})
            tracker.log_train(i, {"train/loss": 0.5, "perf/actor_train_tok_per_s": 7.0})
            tracker.finish_rollout(i)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    header = next(line for line in lines if "tok/s" in line)
    rows = [line[2:] for line in lines if line[1:3] == ["of", "5"]]
    assert [row[header.index("tok/s")] for row in rows] == ["300", "-"]
    assert [row[header.index("errors")] for row in rows] == ["3", "3"]


def test_supervised_training_has_no_reward_and_generates_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = make_args(tmp_path, loss_type="sft_loss", eval_datasets=())
    with make_tracker(args) as tracker:
        tracker.banner(args)
        with tracker.phase("generate"):
            pass
        tracker.log_rollout(0, make_table(), {"rollout/raw_reward": 0.0})
        tracker.log_train(0, {"train/loss": 2.5})
        tracker.finish_rollout(0)
    assert series(read_metrics(tmp_path), "rollout/raw_reward") == ([], [])
    out = capsys.readouterr().out
    header = next(line for line in out.splitlines() if "loss" in line and "eta" in line)
    assert header.split() == ["batch", "length", "loss", "eta", "time"]
    assert "  method   SFT, adam lr 1e-06\n" in out
    assert "  loss        first 2.500, last 2.500\n" in out
    shown = out.split("samples of 1 of ")[1].split("\ndone in")[0]
    assert "What is 0 + 0?" in shown
    assert "reward" not in shown
    assert "label" not in shown


def test_pairs_have_accuracy_and_margin_and_say_which_reply_is_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = make_args(tmp_path, loss_type="dpo_loss", num_rollout=2, eval_datasets=(), lora_rank=16)
    with make_tracker(args) as tracker:
        tracker.banner(args)
        table = make_table(prompts=2)
        table.label = ["chosen", "rejected"] * 2
        for rollout_id, accuracy in enumerate((0.5, 0.75)):
            with tracker.phase("generate"):
                pass
            tracker.log_rollout(rollout_id, table, {})
            measured = {"train/loss": 0.6, "train/rewards/accuracies": accuracy, "train/rewards/margins": accuracy / 5}
            tracker.log_train(rollout_id, measured)
            tracker.finish_rollout(rollout_id)
    out = capsys.readouterr().out
    assert "  method   DPO, beta 0.1, LoRA of rank 16, adam lr 1e-06\n" in out
    assert "  batches  2, numbered 0 to 1 in files\n" in out
    header = next(line for line in out.splitlines() if "accuracy" in line and "eta" in line)
    assert header.split() == ["batch", "accuracy", "margin", "length", "loss", "eta", "time"]
    last = next(line for line in out.splitlines() if line.strip().startswith("2 of 2"))
    assert last.split()[3:7] == ["0.750", "0.1500", "4.5", "0.6000"]
    replies = [line.split()[0] for line in out.splitlines() if "What is" in line]
    assert replies == ["chosen", "rejected"] * 2
    assert "  accuracy    first 0.500, last 0.750\n  margin      first 0.100, last 0.150\n" in out


def test_a_metric_that_is_no_number_is_named(tmp_path: Path) -> None:
    tracker = Tracker(make_args(tmp_path))
    with pytest.raises(ValueError, match=r"metric rollout/best is 'the first', not a number"), tracker:
        tracker.log_rollout(0, make_table(), {"rollout/best": "the first"})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("statement", "unused"),
    [
        ("from slimelite.tracking.tracker import Tracker", set()),
        ("import slimelite.tracking.plot", {"rich", "numpy", "pyarrow"}),
    ],
)
def test_importing_it_loads_nothing_that_only_some_runs_use(statement: str, unused: set[str]) -> None:
    heavy = {"torch", "ray", "transformers", "matplotlib", "wandb"} | unused
    code = f"import sys; {statement}; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_the_curves_are_drawn_by_another_process_and_not_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[list[str]] = []

    class Popen(subprocess.Popen[str]):
        """Starts a process that draws nothing, since only their number counts here."""

        def __init__(self, command: list[str], **options: Any) -> None:
            drawing = "slimelite.tracking.plot" in command
            begun.extend([command] * drawing)
            super().__init__([sys.executable, "-c", ""] if drawing else command, **options)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    args = replace(make_args(tmp_path), num_rollout=4)
    play(args, range(4), draws=True)
    assert len(begun) == 1, "at the end; two evaluations within a second of the start draw nothing"
    monkeypatch.setattr("slimelite.tracking.tracker.DRAWING_SHARE", 1e9)
    play(args, range(4), draws=True)
    assert len(begun) == 1 + 2, "after both evaluations, the second of which is in the last rollout"


def test_curves_that_cannot_be_drawn_are_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "curves.png").mkdir()
    play(replace(make_args(tmp_path), num_rollout=2), range(2), draws=True)
    assert "the curves were not drawn: [Errno 21] is a folder" in capsys.readouterr().out
    assert status(tmp_path)["status"] == "finished"


def test_a_run_says_that_the_one_before_it_was_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    play(make_args(tmp_path), range(3))
    assert "the run before" not in capsys.readouterr().out
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    left = {**status(tmp_path), "status": "running", "pid": child.pid}
    (tmp_path / "status.json").write_text(json.dumps(left))
    play(make_args(tmp_path), range(3, 5))
    assert "the run before this one stopped without a word after 3 of 5 rollouts: " in capsys.readouterr().out
    assert status(tmp_path)["status"] == "finished"
