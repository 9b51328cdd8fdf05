"""``slimelite compare`` on two real runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from slimelite.apps.command import main
from slimelite.apps.permutations import paired_test
from slimelite.samples.table import SampleTable

from .conftest import metrics

pytestmark = pytest.mark.e2e


def test_two_runs_are_compared_prompt_by_prompt(
    local_run: Callable[..., Path], task: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluated = (
        "--num-rollout",
        "2",
        "--eval-interval",
        "2",
        "--eval-prompt-data",
        "heldout",
        f"{task}/heldout.parquet",
    )
    runs = [local_run(f"lr-{lr}", *evaluated, "--lr", lr) for lr in ("1e-3", "1e-2")]
    capsys.readouterr()
    assert main(["compare", *map(str, runs), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["flags"] == {"--lr": [1e-3, 1e-2]}
    answers = [SampleTable.from_parquet(sorted((run / "eval").glob("heldout-0*.parquet"))[-1]) for run in runs]
    assert len(answers[0]) == 64
    # the prompts are in file order in both
    expected = paired_test(answers[1].reward - answers[0].reward)._asdict() | {"of_prompts": 64}
    assert found["runs"][1]["evals"]["heldout"]["against_first"] == expected
    for run, facts in zip(runs, found["runs"], strict=True):
        tables = [SampleTable.from_parquet(path) for path in sorted((run / "rollouts").iterdir())]
        assert (facts["status"], facts["rollouts"]) == ("finished", 2)
        assert facts["evals"]["heldout"]["last"]["value"] == metrics(run, "eval/heldout")[-1]
        assert facts["reward"] == pytest.approx(np.mean([table.reward.mean() for table in tables]))
        assert facts["tokens_generated"] == sum(table.response_lengths.sum() for table in tables)
        assert 0 < facts["tokens_trained"] <= sum(table.total_lengths.sum() for table in tables)
        assert sum(filter(None, facts["seconds"].values())) <= facts["wall_seconds"] * 1.1
        assert facts["cpu_hours"] > 0
