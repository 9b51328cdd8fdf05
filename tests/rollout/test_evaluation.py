"""Evaluation: datasets with settings of their own, pass@k, repeatability, and what goes wrong."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slimelite.arguments import EvalDataset
from slimelite.engines.embedded import EmbeddedEngine
from slimelite.engines.protocol import GenerateRequest
from slimelite.rollout import groups
from slimelite.samples.table import SampleTable

from .conftest import MakeArgs, MakeManager, plugin
from .scripted import ScriptedEngine


@pytest.fixture
def dataset(prompt_file: str) -> EvalDataset:
    return EvalDataset(
        name="sums",
        path=prompt_file + "@[:6]",
        input_key="messages",
        label_key="label",
        apply_chat_template=True,
        n_samples_per_eval_prompt=4,
        pass_at_k=[3],
        max_response_len=8,
        custom_rm_path=plugin("rewards.py:parity"),
    )


def test_each_dataset_has_its_own_settings(
    make_args: MakeArgs, make_manager: MakeManager, dataset: EvalDataset, prompt_file: str
) -> None:
    greedy = EvalDataset(
        name="greedy",
        path=prompt_file + "@[6:9]",
        input_key="messages",
        label_key="label",
        apply_chat_template=True,
        temperature=0.0,
        max_response_len=3,
        min_new_tokens=3,
        rm_type="gsm8k",
        metadata_overrides={"split": "test"},
    )
    args = make_args(eval_datasets=(dataset, greedy), custom_rm_path=None)
    manager = make_manager(args)
    output = manager.evaluate(0)
    assert {name: len(table) for name, table in output.tables.items()} == {"sums": 24, "greedy": 3}
    assert set(output.tables["greedy"].response_lengths.tolist()) == {3}
    assert set(output.tables["greedy"].metadata) == {'{"split": "test"}'}
    assert output.tables["sums"].response_lengths.max() <= 8
    assert manager.progress()[:2] == (9, 9)

    table, metrics = output.tables["sums"], output.metrics
    assert metrics["eval/sums"] == pytest.approx(table.reward.mean())
    assert metrics["eval/sums/response_len/max"] == table.response_lengths.max()
    assert metrics["eval/sums-truncated_ratio"] == table.status.count("truncated") / 24
    rewards = table.reward.reshape(6, 4)
    assert metrics["eval/sums-pass@1"] == pytest.approx(table.reward.mean())
    assert metrics["eval/sums-pass@4"] == pytest.approx(rewards.max(1).mean())
    draws = np.stack([rewards[:, list(drawn)].max(1) for drawn in itertools.combinations(range(4), 3)])
    assert metrics["eval/sums-pass@3"] == pytest.approx(draws.mean())
    assert metrics["eval/sums-stderr"] == pytest.approx(rewards.mean(1).std(ddof=1) / 6**0.5)
    assert metrics["eval/sums-pass@4-stderr"] == pytest.approx(rewards.max(1).std(ddof=1) / 6**0.5)
    assert metrics["eval/greedy"] == 0
    assert not [name for name in metrics if name.startswith("eval/greedy-pass")]  # one response each
    said = {*dataset.metrics(), *greedy.metrics()}
    assert said == {name for name in metrics if name.startswith(("eval/sums", "eval/greedy")) and "stderr" not in name}


def test_evaluations_repeat_and_leave_training_alone(
    make_args: MakeArgs, make_manager: MakeManager, dataset: EvalDataset
) -> None:
    args = make_args(eval_datasets=(dataset,), deterministic_mode=True)
    manager = make_manager(args)
    first, second = manager.evaluate(0).tables["sums"], manager.evaluate(5).tables["sums"]
    np.testing.assert_array_equal(first.response_tokens, second.response_tokens)
    np.testing.assert_array_equal(first.rollout_log_probs, second.rollout_log_probs)
    trained = manager.generate(0).table
    np.testing.assert_array_equal(trained.response_tokens, make_manager(args).generate(0).table.response_tokens)


def test_an_evaluation_of_some_datasets_leaves_the_others_to_plugins(
    make_args: MakeArgs, make_manager: MakeManager, dataset: EvalDataset
) -> None:
    both = dataset, replace(dataset, name="again")
    log = plugin("hooks.py:adds_a_metric")
    manager = make_manager(make_args(eval_datasets=both, custom_rollout_log_function_path=log))
    assert manager.evaluate(0, ["again"]).tables.keys() == {"again"}
    assert manager.generate(0).metrics["eval_datasets"] == 2


def test_evaluations_are_saved_one_file_a_dataset(
    make_args: MakeArgs, make_manager: MakeManager, dataset: EvalDataset, tmp_path: Path
) -> None:
    args = make_args(eval_datasets=(dataset,), save_debug_rollout_data=str(tmp_path / "{rollout_id}.parquet"))
    output = make_manager(args).evaluate(3)
    saved = SampleTable.from_parquet(tmp_path / "eval_3_sums.parquet")
    assert saved.response_tokens.tolist() == output.tables["sums"].response_tokens.tolist()


def test_an_unreadable_dataset_is_named(make_args: MakeArgs, make_manager: MakeManager, tmp_path: Path) -> None:
    (tmp_path / "none.jsonl").write_text("")
    empty = EvalDataset(name="hollow", path=str(tmp_path / "none.jsonl"), rm_type="gsm8k", max_response_len=4)
    with pytest.raises(ValueError, match="eval dataset 'hollow'"):
        make_manager(make_args(eval_datasets=(empty,)), [ScriptedEngine()]).evaluate(0)


def test_failed_prompts_are_left_out_and_counted(
    make_args: MakeArgs, make_manager: MakeManager, dataset: EvalDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "RETRY_SECONDS", 0.0)

    def breaks(request: GenerateRequest) -> Exception | None:
        return OSError("lost") if request.prefix_key == "eval/sums-2" or engine.version else None

    engine = ScriptedEngine(breaks=breaks)
    manager = make_manager(make_args(eval_datasets=(dataset,)), [engine])
    output = manager.evaluate(0)
    assert output.metrics["eval/sums/failed_prompts"] == 1
    assert sorted(set(output.tables["sums"].group_id.tolist())) == [0, 1, 3, 4, 5]
    engine.version = 1
    with pytest.raises(ValueError, match=r"eval dataset 'sums': none of 6 prompts got a scored response.*lost"):
        manager.evaluate(1)


def test_an_evaluation_without_any_reward_is_no_score_of_zero(
    make_args: MakeArgs, make_manager: MakeManager, dataset: EvalDataset
) -> None:
    broken = EvalDataset(**{**vars(dataset), "rm_type": None, "custom_rm_path": plugin("rewards.py:of_one")})
    args = make_args(eval_datasets=(broken,))
    with pytest.raises(ValueError, match=r"eval dataset 'sums': the reward of every sample failed .* a number, not"):
        make_manager(args, [ScriptedEngine()]).evaluate(0)


def test_custom_functions_of_evaluation(make_args: MakeArgs, make_manager: MakeManager, dataset: EvalDataset) -> None:
    args = make_args(eval_datasets=(dataset,), eval_function_path=plugin("hooks.py:fixed_scores"))
    output = make_manager(args, [ScriptedEngine()]).evaluate(0)
    assert output.metrics["eval/quiz"] == 0.25
    assert output.metrics["eval/quiz-truncated_ratio"] == 0.5
    args = make_args(
        eval_datasets=(dataset,), custom_eval_rollout_log_function_path=plugin("hooks.py:adds_eval_metric")
    )
    assert make_manager(args, [ScriptedEngine()]).evaluate(4).metrics["eval/samples"] == 24


def test_generate_functions_know_that_it_is_evaluation(
    make_args: MakeArgs, make_manager: MakeManager, dataset: EvalDataset, http_engine: EmbeddedEngine
) -> None:
    path = plugin("slime_style.py:generate_with_meta_info")
    custom = EvalDataset(**{**vars(dataset), "custom_generate_function_path": path})
    table = make_manager(make_args(eval_datasets=(custom,)), [http_engine]).evaluate(0).tables["sums"]
    assert set(table.metadata) == {'{"evaluation": true}'}
