"""A column that is declared once goes from a sample to the loss: through table, file, wire and trainer."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import one_rank, random_table, save_tiny_model, tiny_args
from torch import Tensor

from slimelite.algorithms.losses import LOSSES, LossType
from slimelite.arguments import Args
from slimelite.samples.sample import COLUMNS, Column
from slimelite.samples.table import SampleTable
from slimelite.training.batch import MicroBatch

SEEN: list[tuple[int, float, float]] = []


def weighted_likelihood(args: Args, batch: MicroBatch, log_probs: Tensor, entropy: Tensor) -> tuple[Tensor, Any]:
    """A token counts by its difficulty and by that of its prompt."""
    weights, prompts = batch.column("difficulty"), batch.column("hardness")
    SEEN.extend(zip(batch.targets.tolist(), weights.tolist(), prompts[batch.segments].tolist(), strict=True))
    return -torch.where(batch.mask, log_probs * weights * prompts[batch.segments], 0.0), {}


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    own = LossType("weighted_likelihood", "", weighted_likelihood, columns=("difficulty", "hardness"))
    monkeypatch.setitem(COLUMNS, "difficulty", Column("difficulty", "float32", per="token"))
    monkeypatch.setitem(COLUMNS, "hardness", Column("hardness", "float32"))
    monkeypatch.setitem(LOSSES, own.name, own)
    SEEN.clear()


def filled() -> tuple[SampleTable, list[tuple[int, float, float]]]:
    """A table whose samples have both, and what the loss is to see of each response token."""
    groups, expected = random_table(groups=2, group_size=3, masked=0.0).to_samples(), []
    for sample in (sample for group in groups for sample in group):
        sample.difficulty = [0.5 + i for i in range(sample.response_length)]  # type: ignore[attr-defined]
        sample.hardness = 1.0 + sample.index  # type: ignore[attr-defined]
        tokens = sample.tokens[sample.prompt_length :]
        expected += [(t, 0.5 + i, 1.0 + sample.index) for i, t in enumerate(tokens)]
    return SampleTable.from_samples(groups), expected


def test_a_column_declared_once_reaches_the_loss(tmp_path: Path) -> None:
    table, expected = filled()
    table.to_parquet(tmp_path / "rollout.parquet")
    saved = SampleTable.from_parquet(tmp_path / "rollout.parquet")
    again = SampleTable.from_samples(saved.select(range(5, -1, -1)).to_samples())
    table = pickle.loads(pickle.dumps(again.without_text()))
    args = tiny_args(save_tiny_model(tmp_path / "model"), loss_type="weighted_likelihood", max_tokens_per_gpu=20)
    with one_rank(args) as trainer:
        metrics = trainer.train(0, table)
    assert metrics["train/loss"] > 0
    assert sorted(SEEN) == sorted(expected)


def test_a_loss_says_what_its_samples_lack(tmp_path: Path) -> None:
    table, _ = filled()
    args = tiny_args(save_tiny_model(tmp_path / "model"), loss_type="weighted_likelihood")
    with one_rank(args) as trainer:
        table.difficulty[table.row_slice("difficulty", 0).size] = np.nan  # type: ignore[attr-defined]
        with pytest.raises(
            ValueError, match=r"samples \[1\] have no difficulty, which --loss-type weighted_likelihood"
        ):
            trainer.train(0, table)
        with pytest.raises(ValueError, match="have no difficulty"):
            trainer.train(0, random_table(groups=1))


def test_a_column_is_as_long_as_the_response() -> None:
    groups = random_table(groups=1).to_samples()
    groups[0][1].difficulty = [1.0] * 99  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="sample 1: difficulty has 99 entries but the response has"):
        SampleTable.from_samples(groups)
    assert random_table(groups=1).difficulty is None  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no attribute 'dificulty'"):
        _ = random_table(groups=1).dificulty  # type: ignore[attr-defined]
