"""Rows as a rollout: conversations with the mask of their replies, and pairs of replies that stay together."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from scripts.lib.arithmetic import conversation_row, pair_row
from slimelite.arguments import Args
from slimelite.data.conversations import ChatReader

from .conftest import MakeArgs, MakeManager

CONVERSATIONS = [conversation_row((i, 2, 3, 4), random.Random(i), 0.5) for i in range(6)]
CONVERSATIONS[1]["messages"] = [
    *CONVERSATIONS[1]["messages"],
    {"role": "user", "content": "1+1=?"},
    {"role": "assistant", "content": "#### 2"},
]


@pytest.fixture
def sft_args(make_args: MakeArgs, tmp_path: Path) -> Args:
    path = tmp_path / "sft.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in CONVERSATIONS))
    return make_args(
        prompt_data=[str(path)],
        label_key=None,
        apply_chat_template=False,
        custom_rm_path=None,
        n_samples_per_prompt=1,
        rollout_batch_size=4,
        loss_type="sft_loss",
        compute_advantages_and_returns=False,
        rollout_function_path="slime.rollout.sft_rollout.generate_rollout",
    )


def test_conversations_become_samples(
    sft_args: Args, make_manager: MakeManager, tokenizer: PreTrainedTokenizerBase
) -> None:
    manager = make_manager(sft_args, [])
    output = manager.generate(0)
    table = output.table
    for row in range(4):
        ids, mask = ChatReader(tokenizer).tokens(CONVERSATIONS[row]["messages"])
        got = [*table.row_slice("prompt_tokens", row), *table.row_slice("response_tokens", row)]
        assert got == ids
        masked = [0] * len(table.row_slice("prompt_tokens", row)) + table.row_slice("loss_mask", row).tolist()
        assert masked == mask
        assert table.row_slice("loss_mask", row)[0]
    assert table.response[0] == CONVERSATIONS[0]["messages"][1]["content"] + "<|im_end|>\n"
    assert not table.row_slice("loss_mask", 1).all()  # the second question is not trained on
    assert np.isnan(table.rollout_log_probs).all()
    assert output.metrics["rollout/response_len/mean"] == pytest.approx(table.mask_sums.mean())
    assert "rollout/raw_reward" not in output.metrics
    assert manager.generate(1).table.group_id.tolist() == [4, 5, 6, 7]  # into the next epoch


def test_long_conversations_are_cut(
    sft_args: Args, make_manager: MakeManager, caplog: pytest.LogCaptureFixture
) -> None:
    cut = Args(**{**vars(sft_args), "rollout_max_context_len": 14})
    table = make_manager(cut, []).generate(0).table
    assert set(table.total_lengths.tolist()) == {14}
    assert set(table.status) == {"truncated"}
    nothing_left = Args(**{**vars(sft_args), "rollout_max_context_len": 4})
    output = make_manager(nothing_left, []).generate(0)
    assert output.table.removed.all()
    assert output.table.mask_sums.sum() == 0
    assert output.metrics["rollout/untrained_samples"] == 4
    assert "4 of 4 conversations have no token to train on" in caplog.text


def test_templated_text_is_refused(sft_args: Args, make_manager: MakeManager) -> None:
    templated = Args(**{**vars(sft_args), "apply_chat_template": True})
    with pytest.raises(ValueError, match="leave --apply-chat-template out"):
        make_manager(templated, []).generate(0)


PAIRS = [pair_row((i, 2, 3, 4), random.Random(i)) for i in range(6)]


@pytest.fixture
def dpo_args(make_args: MakeArgs, tmp_path: Path) -> Args:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    return make_args(
        prompt_data=[str(path)],
        label_key=None,
        n_samples_per_prompt=1,
        rollout_batch_size=4,
        loss_type="dpo_loss",
        rollout_function_path="slimelite.rollout.generate.offline_rollout",
    )


def test_pairs_become_two_rows_of_one_unit(dpo_args: Args, make_manager: MakeManager) -> None:
    manager = make_manager(dpo_args, [])
    output = manager.generate(0)
    table = output.table
    assert table.unit_id.tolist() == table.rollout_id.tolist() == table.group_id.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert table.reward.tolist() == [1, 0] * 4
    assert table.label == ["chosen", "rejected"] * 4
    for row in range(8):
        reply = PAIRS[row // 2][table.label[row]][0]["content"]
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
