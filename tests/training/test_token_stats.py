"""Log-probs and entropies of response tokens: right, of the rows that are promised, and training is as without them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from exact import awkward_table
from test_pairs import pair_table
from tiny import one_rank, save_tiny_model, tiny_args, weights_of

from slimelite.samples.table import SampleTable, TokenStats
from slimelite.training.columns import TokenColumns
from slimelite.training.learner import table_scores
from slimelite.training.trainer import Trainer

REFERENCE = {"use_reference": True, "kl_coef": 0.1}
PPO = {"advantage_estimator": "ppo", "use_critic": True, "critic_lr": 1e-2}
SFT = {"loss_type": "sft_loss"}
# flags -> the rows that training computes before the weights change: "gradient", "trained", "first step" or "none"
CASES = {
    "one step": ({}, "gradient"),
    "two steps": ({"global_batch_size": 10}, "gradient"),
    "KL in the reward": (REFERENCE, "trained"),
    "critic": (PPO, "trained"),
    "critic alone": (PPO | {"num_critic_only_steps": 9}, "none"),
    "SFT": (SFT, "trained"),
    "SFT in two steps": (SFT | {"global_batch_size": 10}, "first step"),
    "DPO": ({"loss_type": "dpo_loss", "use_reference": True}, "trained"),
}


class Found(NamedTuple):
    """A rollout's ``before``: log-probs and entropies by a pass of their own, and what training it gave."""

    before: tuple[torch.Tensor, torch.Tensor]
    stats: TokenStats | None
    metrics: dict[str, float]


def two_rollouts(trainer: Trainer, table: SampleTable) -> tuple[list[Found], dict[str, torch.Tensor]]:
    """The weights have moved before the second; in the first, a new critic gives no advantages that differ."""
    found = []
    for i in range(2):
        dealt = trainer._deal(table, np.arange(len(table)))
        before = table_scores(trainer.model, TokenColumns.from_table(table), dealt, trainer.world, trainer.temperature)
        metrics = {k: v for k, v in trainer.train(i, table).items() if not k.startswith("perf/")}
        found.append(Found(before, trainer.token_stats, metrics))
    return found, weights_of(trainer)


def make_table(case: str) -> SampleTable:
    """Siblings, a removed and a masked row; in the policy's, rows without an advantage, which training skips."""
    table = pair_table() if case == "DPO" else awkward_table()
    if CASES[case][1] == "gradient":
        table.advantage[::3] = 0.0
    return table


def rows_of(kind: str, table: SampleTable) -> np.ndarray:
    """[n] bool."""
    trained = table.mask_sums > 0
    if kind == "first step":
        return trained & np.isin(table.rollout_id, np.unique(table.rollout_id)[:10])
    return {"gradient": trained & (table.advantage != 0), "trained": trained, "none": np.zeros(len(table), bool)}[kind]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("case", CASES)
def test_they_are_those_before_the_first_step_and_training_is_the_same_without(
    model: Path, case: str, tmp_path: Path
) -> None:
    given, promised = CASES[case]
    table, runs = make_table(case), {}
    for mode in ("none", "computed", "all"):
        args = tiny_args(model, **given, token_stats=mode, num_steps_per_rollout=1 + ("two" in case))
        with one_rank(args) as trainer:
            runs[mode] = two_rollouts(trainer, table)
    every = {"computed": rows_of(promised, table), "all": np.ones(len(table), bool)}
    for mode, rows in every.items():
        for found in runs[mode][0]:
            assert found.stats is not None
            found.stats.to_parquet(tmp_path / "stats.parquet")
            saved = pq.read_table(tmp_path / "stats.parquet").to_pydict()
            assert saved["sample_id"] == table.sample_id.tolist()
            for name, expected in zip(("log_probs", "entropy"), found.before, strict=True):
                assert [values is not None for values in saved[name]] == rows.tolist()
                for row in np.flatnonzero(rows):
                    start, end = table.response_offsets[row : row + 2]
                    np.testing.assert_allclose(saved[name][row], expected[start:end], rtol=1e-5, atol=1e-5)
    (plain, weights), *others = runs.values()
    assert [found.stats for found in plain] == [None, None]
    for other, theirs in others:
        assert [found.metrics for found in other] == [found.metrics for found in plain]
        assert all(torch.equal(weights[name], weight) for name, weight in theirs.items())


def test_a_response_without_tokens_has_an_empty_list(tmp_path: Path) -> None:
    values = np.array([-1, -2, np.nan], np.float32)
    TokenStats(np.array([7, 8, 9]), np.array([0, 2, 2, 3]), values, -values).to_parquet(tmp_path / "stats.parquet")
    saved = pq.read_table(tmp_path / "stats.parquet").to_pydict()
    assert saved == {"sample_id": [7, 8, 9], "log_probs": [[-1, -2], [], None], "entropy": [[1, 2], [], None]}
