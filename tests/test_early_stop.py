"""What evaluations decide, by their values alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from slimelite.arguments import Args
from slimelite.loop import Evaluations
from slimelite.models.checkpoints import best_of, folder_of, model_folder


def evaluations(values: list[float], first: int = -1, **flags: Any) -> Evaluations:
    """After evaluations with ``values``, the first after rollout ``first``."""
    given = {"early_stop_metric": "eval/sums", "start_rollout_id": 0, "num_rollout": 99, "eval_interval": 1, **flags}
    made = Evaluations(Args(**given))
    for rollout_id, value in enumerate(values, first):
        made.note(rollout_id, {"eval/sums": value, "eval/other": 0.0})
    return made


@pytest.mark.parametrize(
    ("values", "mode", "best", "stops"),
    [
        ([0.1, 0.2, 0.3], "max", 1, False),
        ([0.1, 0.2, 0.3], "min", -1, True),
        ([0.3, 0.2, 0.1], "max", -1, True),
        ([0.3, 0.2, 0.3], "max", -1, True),  # as good is no better
        ([0.3, 0.2, 0.4, 0.1, 0.2], "max", 1, True),
        ([0.3, 0.2, 0.4, 0.1], "max", 1, False),
        ([0.3, math.nan, 0.4], "max", 1, False),
        ([math.nan, math.nan, math.nan], "max", None, True),
        ([math.nan, math.nan], "max", None, False),  # training has not begun at the first
    ],
)
def test_two_evaluations_without_a_better_one_end_the_run(
    values: list[float], mode: str, best: int | None, stops: bool
) -> None:
    found = evaluations(values, early_stop_mode=mode, early_stop_patience=2)
    assert found.best == best
    assert bool(found.stop) == stops


def test_why_it_ends_and_what_is_kept_in_words(tmp_path: Path) -> None:
    one = evaluations([0.5, 0.25], early_stop_patience=1, save_best=True)
    assert one.stop == "1 evaluation was no better than eval/sums 0.500 before training"
    nothing = "eval/sums 0.500 before training; no model was kept, because no later evaluation was better"
    assert one.facts() == {"best": nothing}
    assert not one.improved(-1), "nothing is trained yet"
    none = evaluations([math.nan], first=0, early_stop_patience=1)
    assert none.stop == "1 evaluation was no better than nothing: eval/sums was never a number"
    kept = evaluations([0.5, 0.75], save_best=True, save_hf=str(tmp_path / "small"))
    assert kept.improved(0)
    assert kept.stop is None, "there is no patience"
    (tmp_path / "small-best").mkdir()
    assert kept.facts() == {"best": f"eval/sums 0.750 after 1 rollout (rollout 0 in files): {tmp_path}/small-best"}


def test_a_metric_that_no_evaluation_measures() -> None:
    with pytest.raises(
        ValueError, match=r"--early-stop-metric eval/sum: the .* did not measure it; choose one of: eval/oth"
    ):
        evaluations([0.5], early_stop_metric="eval/sum", save_best=True)


def test_a_resumed_run_knows_what_came_before_its_checkpoint(tmp_path: Path) -> None:
    saves = {"save": str(tmp_path), "save_interval": 2, "early_stop_patience": 9}
    evaluations([0.1, 0.7, 0.3, 0.9], **saves).write()
    resumed = {**saves, "resume_directory": str(folder_of(tmp_path, 1)), "start_rollout_id": 2}
    after = evaluations([], **resumed)
    assert after.best == 0, "the evaluation after rollout 2 is yet to come"
    assert not after.due_at_start()
    assert evaluations([], **{**resumed, "start_rollout_id": 4}).due_at_start(), "that after rollout 3 was never made"
    assert not evaluations([], **{**resumed, "start_rollout_id": 4, "eval_interval": 3}).due_at_start()
    assert evaluations([], **resumed, early_stop_metric="eval/other").best is None
    assert evaluations([], **resumed, finetune=True).best is None
    after.note(2, {"eval/sums": 1 / 3})
    after.write()
    written = json.loads((tmp_path / "evaluations.json").read_text())["evaluations"]
    assert [each["value"] for each in written] == [0.1, 0.7, 0.3, 1 / 3]


def test_a_best_that_an_earlier_run_did_not_keep_is_not_said_to_be_there(tmp_path: Path) -> None:
    """The run before had another ``--save``, or no ``--save-best``; what it measured is still what there is to beat."""
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    flags = {"save_interval": 2, "save_best": True}
    evaluations([0.1, 0.7, 0.3], save=str(before), **flags).write()
    resumed = {"resume_directory": str(folder_of(before, 1)), "start_rollout_id": 2, **flags}
    found = evaluations([0.5], first=2, save=str(after), **resumed)
    gone = (
        "eval/sums 0.700 after 1 rollout (rollout 0 in files); this was before the resume, and the model was not kept"
    )
    assert found.facts() == {"best": gone}
    folder_of(after, 0).mkdir(parents=True)
    found.mark(0)
    assert found.facts() == {"best": f"eval/sums 0.700 after 1 rollout (rollout 0 in files): {after}/iter_0000000"}


def test_the_best_checkpoint_outlives_the_others(tmp_path: Path) -> None:
    """Every second rollout is saved and every fourth kept; what was the best until now goes, unless it is kept too."""
    flags = {"save": str(tmp_path), "save_interval": 2, "save_retain_interval": 4, "save_best": True}
    found = evaluations([], **flags)
    kept = []
    for rollout_id in (0, 1, 3, 4, 7):
        folder_of(tmp_path, rollout_id).mkdir()
        found.mark(rollout_id)
        assert best_of(tmp_path) == rollout_id
        kept.append(sorted(int(path.name[5:]) for path in tmp_path.glob("iter_*")))
    assert kept == [[0], [1], [3], [3, 4], [3, 7]]
    evaluations([], **flags)
    assert best_of(tmp_path) is None, "it is of another run"


def test_where_the_best_model_goes(tmp_path: Path) -> None:
    assert model_folder("/out/{rollout_id:04d}/hf", "best") == Path("/out/best/hf")
    assert model_folder("/out/{rollout_id:04d}/hf", 7) == Path("/out/0007/hf")
    assert model_folder("/out/model/", "best") == Path("/out/model-best")
