"""Contracts of what looks on: hooks, reward post-processing, log functions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rollout.conftest import MakeArgs, MakeManager

from slimelite.arguments import EvalDataset

from .conftest import Given


def test_sample_hook(given: Given, make_args: MakeArgs, make_manager: MakeManager) -> None:
    """``fn(args, sample[, rollout_id, evaluation])``, plain or async -> a Sample, or None for the one it was given."""
    args = make_args(rollout_sample_hook_path=[given("--rollout-sample-hook-path")])
    table = make_manager(args).generate(1).table
    assert table.group_id.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert np.isfinite(table.reward).all()


def test_all_samples_process(given: Given, make_args: MakeArgs, make_manager: MakeManager, tmp_path: Path) -> None:
    """``fn(args, groups, data_source)`` sees every finished group after the batch is full; its result is not used."""
    plain = make_manager(make_args()).generate(0).table
    args = make_args(
        rollout_all_samples_process_path=given("--rollout-all-samples-process-path"), dump_details=str(tmp_path)
    )
    np.testing.assert_array_equal(make_manager(args).generate(0).table.response_tokens, plain.response_tokens)


def test_reward_post_process(given: Given, make_args: MakeArgs, make_manager: MakeManager) -> None:
    """``fn(args, samples)`` -> (raw rewards, rewards): two lists as long as ``samples``, of finite numbers."""
    args = make_args(custom_reward_post_process_path=given("--custom-reward-post-process-path"))
    table = make_manager(args).generate(0).table
    assert len(table.reward) == len(table.advantage) == 12
    assert np.isfinite(table.reward).all()
    assert np.isfinite(table.advantage).all()


def test_log_function(given: Given, make_args: MakeArgs, make_manager: MakeManager) -> None:
    """``fn(rollout_id, args, samples, metrics, seconds)``: may add metrics; true replaces the default ones."""
    args = make_args(custom_rollout_log_function_path=given("--custom-rollout-log-function-path"), num_rollout=1)
    metrics = make_manager(args).generate(0).metrics
    assert all(np.isfinite(value) for value in metrics.values())


def test_eval_log_function(given: Given, make_args: MakeArgs, make_manager: MakeManager, prompt_file: str) -> None:
    """``fn(rollout_id, args, data, metrics)``: as above; ``data``: samples, rewards, truncated of each."""
    dataset = EvalDataset(
        name="few",
        path=prompt_file + "@[:2]",
        input_key="messages",
        label_key="label",
        apply_chat_template=True,
        max_response_len=4,
        rm_type="gsm8k",
    )
    path = given("--custom-eval-rollout-log-function-path")
    args = make_args(eval_datasets=(dataset,), custom_eval_rollout_log_function_path=path)
    metrics = make_manager(args).evaluate(0).metrics
    assert all(np.isfinite(value) for value in metrics.values())
