"""Plugins in the shape of slime's examples, unchanged, in runs of train.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import train
from scripts.lib.arithmetic import all_questions, prompt_row, write_model_folder
from slimelite.samples.table import SampleTable

from .conftest import metrics

pytestmark = pytest.mark.e2e
PLUGINS = Path(__file__).parent / "slime_plugins"
ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
Run = Callable[..., Path]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """``run(label, *flags)``: two rollouts of a fresh tiny model; ``label``: what becomes of a question's total."""

    def start(label: Callable[[int], Any], *flags: str) -> Path:
        model, data, folder = tmp_path / "model", tmp_path / "prompts.jsonl", tmp_path / "run"
        model.mkdir()
        write_model_folder(model)
        rows = [prompt_row(numbers) for numbers in all_questions()[1234:9999:400]]
        data.write_text("".join(json.dumps({**row, "label": label(int(row["label"]))}) + "\n" for row in rows))
        common = (
            f"--launcher local --hf-checkpoint {model} --prompt-data {data} --input-key messages --label-key label "
            "--apply-chat-template --rollout-batch-size 3 --n-samples-per-prompt 4 --num-rollout 2 --lr 1e-3 "
            f"--rollout-max-response-len 16 --use-dynamic-batch-size --max-tokens-per-gpu 512 --run-dir {folder}"
        )
        assert train.main([*common.split(), *flags]) == 0
        return folder

    return start


def tables(run: Path) -> list[SampleTable]:
    """The two saved rollouts, of which the policy could learn something."""
    assert min(metrics(run, "train/grad_norm")) > 0
    return [SampleTable.from_parquet(run / "rollouts" / f"000000{number}.parquet") for number in (0, 1)]


def masked(table: SampleTable, row: int) -> np.ndarray:
    """The tokens of a response that the loss does not see."""
    return table.row_slice("response_tokens", row)[~table.row_slice("loss_mask", row)]


def test_search_with_labels_that_are_objects(run: Run) -> None:
    folder = run(
        lambda total: {"ground_truth": {"target": [total, f"{total}."]}},
        *("--colocate", "--custom-generate-function-path", f"{PLUGINS}/search_r1.py:generate"),
        *("--custom-rm-path", f"{PLUGINS}/search_r1.py:reward_func"),
    )
    for table in tables(folder):
        assert len(table) == 12
        for row, label in enumerate(table.label):
            total = label["ground_truth"]["target"][0]
            assert label == {"ground_truth": {"target": [total, f"{total}."]}}
            assert isinstance(total, int)
            assert len(masked(table, row)) >= 7, "a document and two line breaks"
    assert metrics(folder, "rollout/weight_staleness/max") == [0, 0]


def test_a_python_tool_with_labels_that_are_numbers(run: Run) -> None:
    folder = run(
        lambda total: total,
        *("--colocate", "--custom-generate-function-path", f"{PLUGINS}/retool.py:generate"),
        *("--custom-rm-path", f"{PLUGINS}/retool.py:reward_func", "--reward-key", "score"),
        *("--context-parallel-size", "2"),
    )
    first = int(tables(folder)[0].weight_versions[0])
    for version, table in enumerate(tables(folder)):
        assert all(isinstance(label, int) for label in table.label)
        for row in range(len(table)):
            assert 3 <= len(masked(table, row)) <= 4, "= and a number between line breaks"
        assert set(table.weight_versions.tolist()) == {first + version}
        assert {json.loads(parts)["calls"] for parts in table.reward_components} == {1}, (
            "its attribute reached the reward"
        )


def test_fully_async_rollout_runs_ahead(run: Run) -> None:
    folder = run(
        lambda total: str(total),
        *(
            "--async-rollout",
            "--rollout-function-path",
            ASYNC,
            "--custom-rm-path",
            f"{PLUGINS}/search_r1.py:reward_length",
        ),
    )
    assert len(tables(folder)) == 2
    assert metrics(folder, "rollout/weight_staleness/max") == [0, 1], (
        "the second one began before the first was trained"
    )


def test_a_rollout_made_of_slimes_parts(run: Run) -> None:
    folder = run(
        lambda total: {"ground_truth": {"target": [total]}},
        *("--colocate", "--rollout-function-path", f"{PLUGINS}/own_rollout.py:generate_rollout"),
        *("--custom-generate-function-path", f"{PLUGINS}/own_rollout.py:generate_and_note"),
        *("--custom-rm-path", f"{PLUGINS}/search_r1.py:reward_func"),
    )
    for table in tables(folder):
        for metadata in map(json.loads, table.metadata):
            assert metadata["noted"] == [4, 1, str(folder.parent / "model")]
            assert "no_such_argument" in metadata["missing"]
        assert len(set(table.group_id.tolist())) == 3
        assert (table.rollout_log_probs < 0).all()
