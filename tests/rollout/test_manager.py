"""Whole rollouts on the embedded engine."""

from __future__ import annotations

import gc
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slimelite.arguments import EvalDataset
from slimelite.engines.embedded import EmbeddedEngine
from slimelite.samples.table import OFFSETS, SampleTable

from .conftest import MakeArgs, MakeManager, plugin
from .scripted import ScriptedEngine

NONZERO_STD = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"


def same(a: SampleTable, b: SampleTable) -> bool:
    """Bit for bit, NaN (no teacher) being equal to itself."""
    floats = [column.name for column in a.columns() if column.dtype.startswith("float")]
    names = [*(column.name for column in a.columns()), *OFFSETS.values()]
    return a.columns() == b.columns() and all(
        np.array_equal(getattr(a, n), getattr(b, n), equal_nan=n in floats) for n in names
    )


def test_a_rollout_is_a_table_of_scored_groups(make_args: MakeArgs, make_manager: MakeManager) -> None:
    seen: list[tuple[int, int, str]] = []
    manager = make_manager(make_args())
    manager._context.progress = lambda *step: seen.append(step)
    assert gc.get_freeze_count() > 1000, "the collector leaves alone what is there before the first rollout"
    output = manager.generate(0)
    table = output.table
    assert len(table) == 12
    assert table.group_id.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert table.loss_mask.all()
    assert np.isfinite(table.rollout_log_probs).all()
    assert (table.rollout_log_probs < 0).all()
    for row in range(12):
        response = table.row_slice("response_tokens", row)
        assert table.reward[row] == response.sum() % 2
        assert 0 < len(response) <= 12
    for group in range(3):
        rewards, advantages = table.reward[table.group_id == group], table.advantage[table.group_id == group]
        expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
        np.testing.assert_allclose(advantages, expected, atol=1e-6)
    assert [step[:2] for step in seen] == [(1, 3), (2, 3), (3, 3)]

    metrics = output.metrics
    assert metrics["rollout/raw_reward"] == pytest.approx(table.reward.mean())
    assert metrics["rollout/response_len/mean"] == pytest.approx(table.response_lengths.mean())
    assert metrics["rollout/truncated_ratio"] == table.status.count("truncated") / 12
    assert metrics["rollout/weight_staleness/max"] == 0
    # three of the four prompts of a group come from the first one's keys and values
    assert metrics["rollout/prefix_cache_hit_rate"] > 0.5
    tokens = table.response_lengths.sum()
    assert metrics["perf/tokens_per_gpu_per_sec"] == pytest.approx(tokens / metrics["perf/rollout_time"])


def test_shaping_moves_training_rewards_and_nothing_else(make_args: MakeArgs, make_manager: MakeManager) -> None:
    plain = make_manager(make_args(rollout_stop=["3", "4"])).generate(0)
    args = make_args(
        rollout_stop=["3", "4"],
        overlong_buffer_len=8,
        overlong_penalty_factor=0.5,
        format_reward_coef=0.25,
        format_regex=r".*[02468]",
    )
    shaped = make_manager(args).generate(0)
    lengths = plain.table.response_lengths
    assert shaped.table.response == plain.table.response
    penalty = -0.5 * np.clip((lengths - (12 - 8)) / 8, 0, 1)
    in_format = np.array([text.strip()[-1:] in tuple("02468") for text in plain.table.response])
    assert len(set(penalty)) > 1
    assert 0 < in_format.sum() < len(in_format)
    np.testing.assert_allclose(shaped.table.reward, plain.table.reward + penalty + 0.25 * in_format)
    assert shaped.metrics["rollout/overlong_penalty"] == pytest.approx(penalty.mean())
    assert shaped.metrics["rollout/format_reward"] == pytest.approx(in_format.mean())
    assert shaped.metrics["rollout/raw_reward"] == plain.metrics["rollout/raw_reward"]
    assert not np.allclose(shaped.table.advantage, plain.table.advantage)
    assert "rollout/overlong_penalty" not in plain.metrics
    assert "rollout/format_reward" not in plain.metrics


def test_messages_are_kept_for_a_reward_model_alone(
    make_args: MakeArgs, make_manager: MakeManager, prompt_file: str
) -> None:
    with open(prompt_file) as file:
        first = json.loads(file.readline())["messages"]
    (group,) = make_manager(make_args(reward_model_path="not/loaded")).source.get_samples(1)
    assert [s.metadata["messages"] for s in group] == [first] * 4
    (group,) = make_manager(make_args()).source.get_samples(1)
    assert "messages" not in group[0].metadata


def test_samples_of_a_group_differ_and_every_sample_has_its_own_seed(
    make_args: MakeArgs, make_manager: MakeManager
) -> None:
    table = make_manager(make_args(n_samples_per_prompt=8)).generate(0).table
    for group in range(3):
        rows = np.flatnonzero(table.group_id == group)
        assert len({tuple(table.row_slice("response_tokens", int(r))) for r in rows}) > 4


def test_straight_equals_resumed_bit_for_bit(make_args: MakeArgs, make_manager: MakeManager) -> None:
    args = make_args(
        deterministic_mode=True,
        rollout_shuffle=True,
        over_sampling_batch_size=5,
        dynamic_sampling_filter_path=NONZERO_STD,
    )
    straight = make_manager(args)
    tables = [straight.generate(i).table for i in range(4)]
    again = make_manager(args)
    first = [again.generate(i).table for i in range(2)]
    state = json.loads(json.dumps(again.state_dict()))
    assert state["data_source"]["returned"], "the test should have surplus groups to carry over"
    resumed = make_manager(args)
    resumed.load_state_dict(state)
    rest = [resumed.generate(i).table for i in (2, 3)]
    for expected, got in zip(tables, first + rest, strict=True):
        assert same(expected, got)
    dealt = [set(t.group_id.tolist()) for t in tables]
    assert not set.intersection(*dealt)


def test_straight_equals_resumed_with_a_header_that_rollouts_share(
    make_args: MakeArgs,
    make_manager: MakeManager,
    repeatable_engine: EmbeddedEngine,
    prompt_file: str,
    tmp_path: Path,
) -> None:
    """What the engine has cached differs between the two: the resumed run begins with a cold cache."""
    rows = [json.loads(line) for line in Path(prompt_file).read_text().splitlines()]
    for row in rows:
        row["messages"].insert(0, {"role": "user", "content": "1+2=3 4+5=9 7+1=8 2+2=4 3+5=8 6+2=8"})
    shared = tmp_path / "shared.jsonl"
    shared.write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = make_args(deterministic_mode=True, prompt_data=[str(shared)], rollout_max_response_len=24)
    straight = make_manager(args, [repeatable_engine])
    outputs = [straight.generate(i) for i in range(3)]
    first = make_manager(args, [repeatable_engine])
    assert same(outputs[0].table, first.generate(0).table)
    repeatable_engine._scheduler.release_cache()
    resumed = make_manager(args, [repeatable_engine])
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for index in (1, 2):
        again = resumed.generate(index)
        assert same(outputs[index].table, again.table)
        # equal bits may be luck; equal work is not
        name = "rollout/avg_cached_tokens_per_sample"
        assert again.metrics[name] == outputs[index].metrics[name]
    assert (again.table.total_lengths - again.table.response_lengths).min() > 40


def test_a_saved_rollout_replays_without_engines_or_prompts(
    make_args: MakeArgs, make_manager: MakeManager, tmp_path: Path
) -> None:
    template = str(tmp_path / "rollout_{rollout_id:03d}.parquet")
    written = make_manager(make_args(save_debug_rollout_data=template)).generate(3)
    offline = make_args(load_debug_rollout_data=template, prompt_data=[])
    replayed = make_manager(offline, []).generate(3)
    assert same(replayed.table, written.table)
    for name in ("rollout/raw_reward", "rollout/response_len/mean", "rollout/truncated_ratio"):
        assert replayed.metrics[name] == pytest.approx(written.metrics[name])

    part = make_args(load_debug_rollout_data=template, load_debug_rollout_data_subsample=0.67)
    assert make_manager(part, []).generate(3).table.group_id.tolist() == [0] * 4 + [1] * 4
    with pytest.raises(ValueError, match=r"rollout_004\.parquet"):
        make_manager(offline, []).generate(4)


def test_replay_with_another_estimator_is_offline_rl(
    make_args: MakeArgs, make_manager: MakeManager, tmp_path: Path
) -> None:
    template = str(tmp_path / "{rollout_id}")
    make_manager(make_args(save_debug_rollout_data=template)).generate(0)
    table = make_manager(make_args(load_debug_rollout_data=template, advantage_estimator="rloo"), []).generate(0).table
    rewards = table.reward[:4]
    np.testing.assert_allclose(table.advantage[:4], rewards - (rewards.sum() - rewards) / 3, atol=1e-6)


def test_without_engines_nothing_is_generated(make_args: MakeArgs, make_manager: MakeManager) -> None:
    with pytest.raises(ValueError, match="there is no engine"):
        make_manager(make_args(), []).generate(0)


def test_a_rollout_function_of_the_user(make_args: MakeArgs, make_manager: MakeManager) -> None:
    manager = make_manager(make_args(rollout_function_path=plugin("hooks.py:echo_rollout")))
    output = manager.generate(7)
    assert output.metrics["custom/rollout_id"] == 7
    assert output.table.response == ["echo"] * 12
    assert output.table.reward.tolist() == [0, 1, 2, 3] * 3


def test_a_rollout_function_may_wrap_ours(make_args: MakeArgs, make_manager: MakeManager) -> None:
    manager = make_manager(make_args(rollout_function_path=plugin("slime_style.py:wrapped_rollout")))
    table = manager.generate(0).table
    assert len(table) == 12
    assert {json.loads(m)["wrapped"] for m in table.metadata} == {True}
    plain = make_manager(make_args()).generate(0).table
    assert plain.response_tokens.tolist() == table.response_tokens.tolist()


def test_rewards_of_the_users_own_normalisation(make_args: MakeArgs, make_manager: MakeManager) -> None:
    output = make_manager(make_args(custom_reward_post_process_path=plugin("hooks.py:tenfold"))).generate(0)
    np.testing.assert_array_equal(output.table.advantage, 10 * output.table.reward)
    assert output.metrics["rollout/advantages_abs_max"] == np.abs(output.table.advantage).max() > 0


def test_log_functions_add_metrics_or_replace_them(make_args: MakeArgs, make_manager: MakeManager) -> None:
    manager = make_manager(make_args(custom_rollout_log_function_path=plugin("hooks.py:adds_a_metric")))
    manager.complete_args(start_rollout_id=5, num_rollout=77)
    adds = manager.generate(5)
    assert adds.metrics["mine"] == 12
    # the length of the run may follow from the data: plugins see the real one
    assert adds.metrics["of_run"] == 77
    assert "rollout/raw_reward" in adds.metrics
    replaces = make_manager(make_args(custom_rollout_log_function_path=plugin("hooks.py:replaces_the_log")))
    assert replaces.generate(5).metrics == {}


def test_dict_rewards_need_a_key_and_are_counted_by_category(make_args: MakeArgs, make_manager: MakeManager) -> None:
    args = make_args(
        custom_rm_path=plugin("rewards.py:two_parts"), reward_key="score", log_reward_category="kind", log_passrate=True
    )
    output = make_manager(args).generate(0)
    assert output.table.reward.tolist() == output.table.response_lengths.tolist()
    even = float((output.table.response_lengths % 2 == 0).mean())
    assert output.metrics.get("rollout/error_cat/even", 0.0) == pytest.approx(even)
    assert {"passrate/pass@1", "passrate/pass@2", "passrate/pass@4"} <= set(output.metrics)


def test_group_rewards_see_the_whole_group(make_args: MakeArgs, make_manager: MakeManager) -> None:
    args = make_args(custom_rm_path=plugin("hooks.py:rank_in_group"), group_rm=True)
    assert make_manager(args).generate(0).table.reward.tolist() == [0, 1, 2, 3] * 3


def test_rules_that_judge_the_whole_text_do_not_get_the_token_that_ended_it(
    make_args: MakeArgs, make_manager: MakeManager
) -> None:
    args = make_args(custom_rm_path=None, rm_type="format", format_regex="[^<]*")
    table = make_manager(args, [ScriptedEngine()]).generate(0).table
    assert all(text.endswith("<|im_end|>") for text in table.response)
    assert table.reward.tolist() == [1.0] * 12


def test_sample_hooks_run_in_order_before_the_reward(make_args: MakeArgs, make_manager: MakeManager) -> None:
    args = make_args(
        rollout_sample_hook_path=[plugin("hooks.py:note_rollout"), plugin("hooks.py:note_again")],
        custom_rm_path=plugin("hooks.py:reward_from_notes"),
    )
    table = make_manager(args).generate(9).table
    assert set(table.reward.tolist()) == {9.5}


def test_filters_on_the_finished_batch(make_args: MakeArgs, make_manager: MakeManager, tmp_path: Path) -> None:
    args = make_args(
        rollout_sample_filter_path=plugin("hooks.py:remove_truncated"),
        rollout_all_samples_process_path=plugin("hooks.py:count_everything"),
        dynamic_sampling_filter_path=plugin("hooks.py:drops_even_groups"),
        dump_details=str(tmp_path),
    )
    table = make_manager(args).generate(0).table
    assert table.removed.tolist() == [status == "truncated" for status in table.status]
    assert (table.group_id % 2).all()
    seen: dict[str, Any] = json.loads((tmp_path / "seen.json").read_text())
    assert seen["groups"] == sorted(seen["groups"])
    assert len(seen["groups"]) == 3 + sum(g % 2 == 0 for g in seen["groups"])


def test_the_metrics_are_finite_numbers(make_args: MakeArgs, make_manager: MakeManager) -> None:
    metrics = make_manager(make_args(log_multi_turn=True)).generate(0).metrics
    assert metrics["multi_turn/turns/mean"] == 1
    assert metrics["multi_turn/environment_tokens"] == 0
    assert all(isinstance(v, float) and math.isfinite(v) for v in metrics.values()), metrics


def test_interrupted_responses_are_those_of_no_interruption(make_args: MakeArgs, make_manager: MakeManager) -> None:
    """Under the same weights, cutting responses off and going on later changes no token."""
    uneven = {"rollout_max_response_len": 60, "rollout_stop_token_ids": list(range(20, 26))}
    partial = make_manager(make_args(**uneven, rollout_batch_size=2, over_sampling_batch_size=5, partial_rollout=True))
    outputs = [partial.generate(i) for i in range(3)]
    # on a busy machine all five groups may be done before the rest is interrupted
    while not sum(o.metrics["rollout/resumed_groups"] for o in outputs):
        outputs.append(partial.generate(len(outputs)))
    whole = make_manager(make_args(**uneven, rollout_batch_size=1 + max(max(o.table.group_id) for o in outputs)))
    expected = {}
    table = whole.generate(0).table
    for row, sample_id in enumerate(table.sample_id.tolist()):
        expected[sample_id] = (table.row_slice("response_tokens", row), table.row_slice("rollout_log_probs", row))
    for table in (o.table for o in outputs):
        for row, sample_id in enumerate(table.sample_id.tolist()):
            tokens, log_probs = expected[sample_id]
            np.testing.assert_array_equal(table.row_slice("response_tokens", row), tokens)
            np.testing.assert_allclose(table.row_slice("rollout_log_probs", row), log_probs, atol=1e-4)


def test_every_component_of_a_reward_is_kept(
    make_args: MakeArgs, make_manager: MakeManager, prompt_file: str, tmp_path: Path
) -> None:
    args = make_args(
        custom_rm_path=plugin("rewards.py:correctness_and_brevity"),
        reward_key="total",
        eval_datasets=(
            EvalDataset("quiz", prompt_file + "@[:4]", input_key="messages", label_key="label", max_response_len=9),
        ),
        eval_interval=1,
        save_debug_rollout_data=str(tmp_path / "{rollout_id}.parquet"),
    )
    manager = make_manager(args, [ScriptedEngine()])
    output = manager.generate(0)
    found = {name: value for name, value in output.metrics.items() if name.startswith("rollout/reward/")}
    # a mean over the samples that have the component; True counts as 1
    means = {"total": 5.0, "correct": 0.5, "brevity": 0.25, "polite": 2.0}
    assert found == {f"rollout/reward/{name}": value for name, value in means.items()}
    saved = SampleTable.from_parquet(tmp_path / "0.parquet")
    first, second = (json.loads(row) for row in saved.reward_components[:2])
    assert first == {"total": 5.0, "correct": True, "brevity": 0.25, "polite": 2, "comment": "fine"}
    assert second == {"total": 5.0, "correct": False, "brevity": 0.25, "comment": "fine"}
    scores = manager.evaluate(0).metrics
    assert {scores[f"eval/quiz/reward/{name}"] for name in ("total", "brevity")} == {5.0, 0.25}
    # a run on the saved rollout has them too
    replayed = make_manager(replace(args, load_debug_rollout_data=args.save_debug_rollout_data, reward_key=None), [])
    assert replayed.generate(0).metrics["rollout/reward/correct"] == 0.5
