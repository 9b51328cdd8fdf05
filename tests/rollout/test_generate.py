"""How a batch fills up: refill, surplus, abort, resumption, failures. The engine's timing is scripted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slimelite.engines.params import MOST_KEPT
from slimelite.engines.protocol import GenerateRequest
from slimelite.rollout import groups
from slimelite.rollout.manager import RolloutManager
from slimelite.samples.table import SampleTable

from .conftest import MakeArgs, MakeManager, plugin
from .scripted import EOS, ScriptedEngine, kept_ids, log_prob, token


@pytest.fixture(autouse=True)
def no_waiting_between_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "RETRY_SECONDS", 0.0)


def group_of(request: GenerateRequest) -> int:
    """prefix_key is train-<group>."""
    assert request.prefix_key is not None
    return int(request.prefix_key.removeprefix("train-"))


def groups_in(table: SampleTable) -> list[int]:
    return list(dict.fromkeys(table.group_id.tolist()))


def returned(manager: RolloutManager) -> list[list[dict[str, Any]]]:
    return manager.state_dict()["data_source"]["returned"]


def test_a_group_is_one_call_to_one_engine(make_args: MakeArgs, make_manager: MakeManager) -> None:
    engines = [ScriptedEngine(), ScriptedEngine()]
    make_manager(make_args(rollout_batch_size=4), engines).generate(0)
    for engine in engines:
        assert len(engine.calls) == 2  # the least loaded takes the next one
        for call in engine.calls:
            assert len(call) == 4
            assert len({r.prefix_key for r in call}) == 1
            assert len({r.input_ids for r in call}) == 1
            assert len({r.params.seed for r in call}) == 4


def test_requests_in_flight_are_bounded(make_args: MakeArgs, make_manager: MakeManager) -> None:
    engine = ScriptedEngine(delay=lambda requests: 0.01)
    args = make_args(rollout_batch_size=6, sglang_server_concurrency=9)
    table = make_manager(args, [engine]).generate(0).table
    assert engine.most_in_flight == 8  # two whole groups
    assert len(table) == 24


def test_a_dropped_group_is_replaced_by_one_prompt(make_args: MakeArgs, make_manager: MakeManager) -> None:
    engine = ScriptedEngine()
    args = make_args(dynamic_sampling_filter_path=plugin("hooks.py:drops_even_groups"))
    output = make_manager(args, [engine]).generate(0)
    assert groups_in(output.table) == [1, 3, 5]
    assert output.metrics["rollout/dropped_groups"] == output.metrics["rollout/submitted_groups"] - 3
    assert output.metrics["rollout/dynamic_filter/drop_filter"] == output.metrics["rollout/dropped_groups"]
    assert output.metrics["rollout/dropped_groups"] in (3, 4)


def test_over_sampling_absorbs_drops_before_anything_is_refilled(
    make_args: MakeArgs, make_manager: MakeManager
) -> None:
    engine = ScriptedEngine(delay=lambda requests: 0.001 * group_of(requests[0]))
    args = make_args(dynamic_sampling_filter_path=plugin("hooks.py:drops_even_groups"), over_sampling_batch_size=6)
    manager = make_manager(args, [engine])
    output = manager.generate(0)
    assert [group_of(call[0]) for call in engine.calls] == [0, 1, 2, 3, 4, 5]
    assert groups_in(output.table) == [1, 3, 5]
    assert output.metrics["rollout/submitted_groups"] == 6
    assert returned(manager) == []


def test_surplus_is_kept_and_comes_first(make_args: MakeArgs, make_manager: MakeManager) -> None:
    engine = ScriptedEngine()
    manager = make_manager(make_args(over_sampling_batch_size=5), [engine])
    first = manager.generate(0)
    assert first.metrics["rollout/surplus_groups"] == 2
    assert all(s["reward"] is not None for group in returned(manager) for s in group)
    engine.version = 1
    second = manager.generate(1)
    assert second.metrics["rollout/reused_groups"] == 2
    assert groups_in(first.table) + groups_in(second.table) == [0, 1, 2, 3, 4, 5]
    # one group was missing: two were asked for, at 5 / 3
    assert second.metrics["rollout/submitted_groups"] == 2
    generated = [group_of(call[0]) for call in engine.calls]
    assert sorted(generated) == [0, 1, 2, 3, 4, 5, 6]
    assert second.metrics["rollout/weight_staleness/max"] == 1
    assert second.metrics["rollout/weight_staleness/mean"] == pytest.approx(2 / 3)
    # 5 tokens a response: those of the surplus belong to the rollout that generated them
    assert first.metrics["perf/generated_tokens"] == 5 * 4 * 5
    assert second.metrics["perf/generated_tokens"] == 2 * 4 * 5


def test_reused_groups_have_no_speed(make_args: MakeArgs, make_manager: MakeManager) -> None:
    manager = make_manager(make_args(over_sampling_batch_size=6), [ScriptedEngine()])
    assert manager.generate(0).metrics["perf/tokens_per_gpu_per_sec"] > 0
    second = manager.generate(1).metrics
    assert second["rollout/submitted_groups"] == 0
    assert second["perf/generated_tokens"] == 0
    assert not [name for name in second if name.endswith("per_sec")]


def test_unfinished_prompts_are_sampled_afresh(make_args: MakeArgs, make_manager: MakeManager) -> None:
    engine = ScriptedEngine(holds=lambda request: group_of(request) == 1 and not request.position)
    manager = make_manager(make_args(over_sampling_batch_size=4), [engine])
    first = manager.generate(0)
    assert groups_in(first.table) == [0, 2, 3]
    assert first.metrics["rollout/unfinished_groups"] == 1
    assert [(s["response_length"], s["status"]) for s in returned(manager)[0]] == [(0, "pending")] * 4
    engine.holds = lambda request: False
    engine.version = 1
    second = manager.generate(1).table
    assert groups_in(second)[0] == 1
    assert (second.weight_versions == 1).all()


def check_alignment(table: SampleTable) -> None:
    """Every token's log-prob and version belong to it."""
    for row in range(len(table)):
        tokens = table.row_slice("response_tokens", row)
        expected = [
            log_prob(int(t), int(v)) for t, v in zip(tokens, table.row_slice("weight_versions", row), strict=True)
        ]
        np.testing.assert_array_equal(table.row_slice("rollout_log_probs", row), np.float32(expected))


@pytest.mark.parametrize("mask", [False, True])
def test_partial_rollouts_go_on_where_they_were(make_args: MakeArgs, make_manager: MakeManager, mask: bool) -> None:
    # of group 1 two samples are held with three tokens, the other two finish
    engine = ScriptedEngine(
        length=lambda request: 9,
        holds=lambda request: group_of(request) == 1 and request.request_id.split("-")[1] in ("4", "5"),
    )
    cut = {} if mask else {"rollout_top_p": 0.9}
    args = make_args(over_sampling_batch_size=4, partial_rollout=True, mask_offpolicy_in_partial_rollout=mask, **cut)
    manager = make_manager(args, [engine])
    manager.generate(0)
    assert [s["response_length"] for s in returned(manager)[0]] == [3, 3, 9, 9]

    state = json.loads(json.dumps(manager.state_dict()))
    resumed = make_manager(args, [engine])
    resumed.load_state_dict(state)
    engine.holds = lambda request: False
    engine.version = 1
    engine.calls.clear()
    output = resumed.generate(1)
    assert output.metrics["rollout/resumed_groups"] == 1
    others = [call for call in engine.calls if group_of(call[0]) != 1]
    assert output.metrics["perf/generated_tokens"] == 2 * (9 - 3) + 4 * 9 * len(others)
    (again,) = [call for call in engine.calls if group_of(call[0]) == 1]
    assert [(r.position, r.params.max_new_tokens) for r in again] == [(3, 9), (3, 9)]

    rows = np.flatnonzero(output.table.group_id == 1)
    table = output.table.select(rows)
    check_alignment(table)
    assert [table.row_slice("weight_versions", r).tolist() for r in range(4)] == [
        *[[0] * 3 + [1] * 6] * 2,
        *[[0] * 9] * 2,
    ]
    # the stream of random numbers went on: the same tokens as without the interruption
    for row, request in enumerate(again):
        assert list(request.input_ids[-3:]) == table.row_slice("response_tokens", row).tolist()[:3]
        uninterrupted = [token(request, position) for position in range(8)] + [EOS]
        assert table.row_slice("response_tokens", row).tolist() == uninterrupted
    if cut:  # what each token was drawn from comes along, through the state of the data source too
        assert table.kept_ids is not None
        assert table.kept_ids.tolist() == [i for t in table.response_tokens.tolist() for i in kept_ids(t)]
        assert engine.requests[0].params.top_k == MOST_KEPT
    assert (table.kept_ids is None) == mask
    expected = table.weight_versions == 1 if mask else np.ones(len(table.weight_versions), bool)
    np.testing.assert_array_equal(table.loss_mask, expected)


def test_a_partial_response_at_its_limit_is_truncated(make_args: MakeArgs, make_manager: MakeManager) -> None:
    engine = ScriptedEngine(length=lambda request: 99, holds=lambda request: group_of(request) == 0)
    args = make_args(over_sampling_batch_size=4, partial_rollout=True, rollout_max_response_len=3)
    manager = make_manager(args, [engine])
    manager.generate(0)
    engine.calls.clear()
    table = manager.generate(1).table
    assert groups_in(table)[0] == 0
    assert 0 not in [group_of(r) for r in engine.requests]
    assert set(table.status) == {"truncated"}
    assert set(table.response_lengths.tolist()) == {3}


def test_no_prompt_is_lost_over_many_rollouts(make_args: MakeArgs, make_manager: MakeManager) -> None:
    engine = ScriptedEngine(
        delay=lambda requests: 0.0005 * (group_of(requests[0]) % 5),
        holds=lambda request: group_of(request) % 3 == 2 and group_of(request) >= engine.version * 5,
    )
    manager = make_manager(make_args(over_sampling_batch_size=5), [engine])
    trained: list[int] = []
    for rollout_id in range(8):
        engine.version = rollout_id
        trained += groups_in(manager.generate(rollout_id).table)
    waiting = [group[0]["group_index"] for group in returned(manager)]
    assert sorted(trained + waiting) == list(range(len(trained) + len(waiting)))


@pytest.mark.parametrize("fan_out", [False, True])
def test_stale_samples_are_not_trained_on(make_args: MakeArgs, make_manager: MakeManager, fan_out: bool) -> None:
    engine = ScriptedEngine()
    extra = {"custom_generate_function_path": plugin("native.py:twins")} if fan_out else {}
    manager = make_manager(make_args(over_sampling_batch_size=4, max_weight_staleness=1, **extra), [engine])
    assert manager.generate(0).metrics["rollout/surplus_groups"] == 1
    engine.version = 2
    output = manager.generate(1)
    assert output.metrics["rollout/stale_groups"] == 1
    assert (output.table.weight_versions == 2).all()
    # a fan-out does not tell what its prompt was; any other prompt gets new responses
    assert (3 in groups_in(output.table)) is not fan_out
    assert len(groups_in(output.table)) == 3


def test_surplus_within_the_bound_is_used(make_args: MakeArgs, make_manager: MakeManager) -> None:
    engine = ScriptedEngine()
    manager = make_manager(make_args(over_sampling_batch_size=4, max_weight_staleness=1), [engine])
    manager.generate(0)
    engine.version = 1
    assert manager.generate(1).metrics["rollout/stale_groups"] == 0


def test_a_filter_that_never_passes_ends_with_the_reason(make_args: MakeArgs, make_manager: MakeManager) -> None:
    args = make_args(
        custom_rm_path=plugin("rewards.py:constant"),
        dynamic_sampling_filter_path="slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
    )
    engine = ScriptedEngine()
    with pytest.raises(
        ValueError, match=r"dropped 128 groups in a row.*zero_std_0\.5.*128.*from 0\.5 to 0\.5.*5 tokens"
    ):
        make_manager(args, [engine]).generate(0)
    assert engine.in_flight == 0


def test_a_fallback_filter_keeps_rather_than_samples_again(make_args: MakeArgs, make_manager: MakeManager) -> None:
    name = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std_with_fallback"
    args = make_args(
        custom_rm_path=plugin("rewards.py:constant"), dynamic_sampling_filter_path=name, over_sampling_batch_size=5
    )
    output = make_manager(args, [ScriptedEngine()]).generate(0)
    assert len(groups_in(output.table)) == 3
    assert output.metrics["rollout/submitted_groups"] == 5
    assert output.metrics["rollout/dropped_groups"] == 2
    assert output.metrics["rollout/kept_for_lack"] == 3


def breaks_first(times: int, group: int) -> Any:
    left = [times]

    def breaks(request: GenerateRequest) -> Exception | None:
        if group_of(request) != group or not left[0]:
            return None
        left[0] -= 1
        return ConnectionError("engine went away")

    return breaks


def test_a_failed_group_is_tried_again(make_args: MakeArgs, make_manager: MakeManager) -> None:
    engine = ScriptedEngine(breaks=breaks_first(2, group=1))
    output = make_manager(make_args(), [engine]).generate(0)
    assert groups_in(output.table) == [0, 1, 2]
    assert output.metrics["rollout/retries"] == 2
    assert output.metrics["rollout/failed_groups"] == 0


def test_a_retry_goes_to_another_engine(make_args: MakeArgs, make_manager: MakeManager) -> None:
    broken = ScriptedEngine(breaks=lambda request: ConnectionError("gone"))
    output = make_manager(make_args(), [broken, ScriptedEngine()]).generate(0)
    assert len(output.table) == 12
    assert output.metrics["rollout/failed_groups"] == 0


def test_a_group_that_keeps_failing_is_reported_and_replaced(
    make_args: MakeArgs, make_manager: MakeManager, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ScriptedEngine(breaks=breaks_first(99, group=1))
    output = make_manager(make_args(), [engine]).generate(0)
    assert groups_in(output.table) == [0, 2, 3]
    assert output.metrics["rollout/failed_groups"] == 1
    assert "gave up on prompt 1: ConnectionError('engine went away')" in caplog.text


@pytest.mark.parametrize("deterministic", [False, True])
def test_when_everything_fails_the_cause_is_told(
    make_args: MakeArgs, make_manager: MakeManager, caplog: pytest.LogCaptureFixture, deterministic: bool
) -> None:
    engine = ScriptedEngine(breaks=lambda request: ConnectionError("no route"))
    with pytest.raises(ValueError, match=r"4 groups in a row could not be generated.*no route") as caught:
        make_manager(make_args(deterministic_mode=deterministic), [engine]).generate(0)
    assert isinstance(caught.value.__cause__, ConnectionError)
    assert len(caplog.records) == 2, "one attempt, and one prompt that was given up; no more of the same"


def test_what_the_engine_refuses_is_not_tried_again(make_args: MakeArgs, make_manager: MakeManager) -> None:
    engine = ScriptedEngine(breaks=lambda request: ValueError("min_p is not supported"))
    with pytest.raises(ValueError, match="min_p"):
        make_manager(make_args(rollout_batch_size=1), [engine]).generate(0)
    assert len(engine.calls) == 1


def test_the_context_bounds_the_response(make_args: MakeArgs, make_manager: MakeManager) -> None:
    engine = ScriptedEngine(length=lambda request: 99)
    manager = make_manager(make_args(rollout_max_context_len=20, rollout_max_response_len=50), [engine])
    table = manager.generate(0).table
    assert set(table.total_lengths.tolist()) == {20}
    short = ScriptedEngine(length=lambda request: 99, max_context_len=16)
    full = make_manager(make_args(rollout_max_response_len=50), [short]).generate(0).table
    assert set(full.total_lengths.tolist()) == {16}
    none = ScriptedEngine(max_context_len=4)
    empty = make_manager(make_args(), [none]).generate(0)
    assert none.requests == []
    assert set(empty.table.response_lengths.tolist()) == {0}
    assert empty.metrics["rollout/truncated_ratio"] == 1


@pytest.mark.parametrize(("policy", "sizes"), [("zero", [4, 4, 4]), ("drop", [2, 2, 2])])
def test_reward_errors(make_args: MakeArgs, make_manager: MakeManager, policy: str, sizes: list[int]) -> None:
    args = make_args(custom_rm_path=plugin("rewards.py:fails_on_odd_index"), reward_error=policy)
    output = make_manager(args, [ScriptedEngine()]).generate(0)
    assert np.bincount(output.table.group_id).tolist() == sizes
    assert output.metrics["rollout/reward_errors"] == 6


@pytest.mark.parametrize(
    ("policy", "what"),
    [("zero", "rollout 0"), ("drop", "--reward-error drop removed all samples of 4 groups in a row")],
)
def test_a_rollout_without_any_reward_ends_the_run(
    make_args: MakeArgs, make_manager: MakeManager, policy: str, what: str
) -> None:
    args = make_args(custom_rm_path=plugin("rewards.py:of_one"), group_rm=True, reward_error=policy)
    with pytest.raises(
        ValueError, match=f"{what}: the reward of every sample failed .* for 4 samples must return a list"
    ):
        make_manager(args, [ScriptedEngine()]).generate(0)


def test_a_reward_error_may_end_the_run(make_args: MakeArgs, make_manager: MakeManager) -> None:
    args = make_args(custom_rm_path=plugin("rewards.py:fails_on_odd_index"), reward_error="fail")
    engine = ScriptedEngine()
    with pytest.raises(Exception, match="odd"):
        make_manager(args, [engine]).generate(0)
    assert len(engine.calls) == 3  # generation is not what failed


def test_waves_go_out_whole_and_are_judged_in_order(make_args: MakeArgs, make_manager: MakeManager) -> None:
    engines = [ScriptedEngine(delay=lambda requests: 0.02), ScriptedEngine()]
    args = make_args(
        deterministic_mode=True,
        over_sampling_batch_size=5,
        dynamic_sampling_filter_path=plugin("hooks.py:drops_even_groups"),
    )
    output = make_manager(args, engines).generate(0)
    assert [[group_of(call[0]) for call in engine.calls] for engine in engines] == [[0, 2, 4, 5], [1, 3]]
    assert [engine.most_in_flight for engine in engines] == [12, 8]  # all of the first wave at once
    assert groups_in(output.table) == [1, 3, 5]


def test_the_group_order_of_the_batch_is_that_of_the_prompts(make_args: MakeArgs, make_manager: MakeManager) -> None:
    engine = ScriptedEngine(delay=lambda requests: 0.01 * (3 - group_of(requests[0])))
    assert groups_in(make_manager(make_args(), [engine]).generate(0).table) == [0, 1, 2]


def test_an_empty_data_source_is_an_error(make_args: MakeArgs, make_manager: MakeManager) -> None:
    args = make_args(data_source_path=plugin("sources.py:Empty"))
    with pytest.raises(ValueError, match="--data-source-path"):
        make_manager(args, [ScriptedEngine()]).generate(0)


@pytest.mark.parametrize("mask", [False, True])
def test_surplus_of_older_weights_is_masked_or_warned_of_once(
    make_args: MakeArgs, make_manager: MakeManager, caplog: pytest.LogCaptureFixture, mask: bool
) -> None:
    engine = ScriptedEngine()
    manager = make_manager(make_args(over_sampling_batch_size=5, mask_offpolicy_in_partial_rollout=mask), [engine])
    assert manager.generate(0).table.loss_mask.all()
    assert "older weights" not in caplog.text
    for version in (1, 2):
        engine.version = version
        output = manager.generate(version)
        assert output.metrics["rollout/reused_groups"] > 0
        old = output.table.weight_versions < version
        assert old.any()
        np.testing.assert_array_equal(output.table.loss_mask, ~old if mask else np.ones(len(old), bool))
    warnings = [r.getMessage() for r in caplog.records if "older weights" in r.getMessage()]
    assert len(warnings) == (0 if mask else 1)
    assert mask or "--correction tis" in warnings[0]


def test_the_state_is_json_whatever_plugins_put_on_samples(make_args: MakeArgs, make_manager: MakeManager) -> None:
    path = plugin("rewards.py:numpy_and_dates")
    args = make_args(over_sampling_batch_size=4, custom_rm_path=path, reward_key="score")
    manager = make_manager(args, [ScriptedEngine()])
    manager.generate(0)
    state = json.loads(json.dumps(manager.state_dict()))
    (group,) = state["data_source"]["returned"]
    assert [s["reward"]["score"] for s in group] == [0.5] * 4
    seen = group[0]["metadata"]
    assert seen["array"] == [[0, 1], [2, 3]]
    assert seen["date"] == "2026-01-02 00:00:00"
    assert seen["bytes"] == "b'x'"
    assert seen["nested"] == {"3": [True, "text"]}
    resumed = make_manager(args, [ScriptedEngine()])
    resumed.load_state_dict(state)
    assert resumed.generate(1).metrics["rollout/reused_groups"] == 1


def test_prompts_become_harder_when_enough_of_a_rollout_is_right(
    make_args: MakeArgs, make_manager: MakeManager, tmp_path: Path
) -> None:
    rows = [{"messages": "1+1=?", "label": "2", "metadata": {"level": level}} for level in (1, 2)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {"prompt_data": [str(tmp_path / "rows.jsonl")], "apply_chat_template": False, "rollout_batch_size": 2}
    args = make_args(curriculum_threshold=0.5, custom_rm_path=plugin("rewards.py:constant"), **given)
    manager = make_manager(args, [ScriptedEngine()])
    levels = []
    for rollout in range(2):
        output = manager.generate(rollout)
        assert output.metrics["rollout/level"] == 1.0  # of the next rollout
        levels.append({sample.metadata["level"] for group in output.table.to_samples() for sample in group})
    assert levels == [{1}, {2}]
