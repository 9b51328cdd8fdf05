"""Rows of two replies as a rollout: two rows of the table each, which stay together."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from slimelite.arguments import Args
from slimelite.data.arithmetic import pair_row

from .conftest import MakeArgs, MakeManager

ROWS = [pair_row((i, 2, 3, 4), random.Random(i)) for i in range(6)]


@pytest.fixture
def dpo_args(make_args: MakeArgs, tmp_path: Path) -> Args:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return make_args(
        prompt_data=[str(path)],
        label_key=None,
        n_samples_per_prompt=1,
        rollout_batch_size=4,
        loss_type="dpo_loss",
        rollout_function_path="slimelite.rollout.dpo.generate_rollout",
    )


def test_pairs_become_two_rows_of_one_unit(dpo_args: Args, make_manager: MakeManager) -> None:
    manager = make_manager(dpo_args, [])
    output = manager.generate(0)
    table = output.table
    assert table.unit_id.tolist() == table.rollout_id.tolist() == table.group_id.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert table.reward.tolist() == [1, 0] * 4
    assert table.label == ["chosen", "rejected"] * 4
    for row in range(8):
        reply = ROWS[row // 2][table.label[row]][0]["content"]
        assert table.response[row] == reply + "<|im_end|>\n"
    assert np.isnan(table.rollout_log_probs).all()
    assert not table.advantage.any()
    assert output.metrics["rollout/untrained_pairs"] == 0
    assert "rollout/raw_reward" not in output.metrics
    following = manager.generate(1).table
    assert following.unit_id.tolist() == [4, 4, 5, 5, 6, 6, 7, 7]  # into the next epoch
    assert following.sample_id.tolist() == list(range(8, 16))


def test_pairs_that_are_cut_short_are_counted(
    dpo_args: Args, make_manager: MakeManager, caplog: pytest.LogCaptureFixture
) -> None:
    cut = Args(**{**vars(dpo_args), "rollout_max_context_len": 14})
    output = make_manager(cut, []).generate(0)
    assert output.table.removed.all()
    assert output.metrics["rollout/untrained_pairs"] == 4
    assert "4 of 4 pairs have a reply without a token to train on" in caplog.text
