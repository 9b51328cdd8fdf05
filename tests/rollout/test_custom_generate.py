"""Generate functions of users: native ones, and slime's, unchanged, over HTTP."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from slimelite.base.http_client import Retry
from slimelite.engines.embedded import EmbeddedEngine
from slimelite.engines.protocol import EngineInfo
from slimelite.rollout import generate, groups

from .conftest import MakeArgs, MakeManager, plugin
from .scripted import ScriptedEngine


@pytest.fixture(autouse=True)
def no_waiting_between_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "RETRY_SECONDS", 0.0)


def test_a_slime_plugin_runs_over_http_unchanged(
    make_args: MakeArgs, make_manager: MakeManager, tokenizer: PreTrainedTokenizerBase, http_engine: EmbeddedEngine
) -> None:
    args = make_args(custom_generate_function_path=plugin("slime_style.py:generate"), log_multi_turn=True)
    output = make_manager(args, [http_engine]).generate(0)
    table = output.table
    assert len(table) == 12
    tool = tokenizer("3+4=7\n", add_special_tokens=False)["input_ids"]
    for row in range(12):
        mask, tokens = table.row_slice("loss_mask", row), table.row_slice("response_tokens", row)
        assert tokens[~mask].tolist() == tool
        log_probs = table.row_slice("rollout_log_probs", row)
        assert (log_probs[mask] < 0).all()
        assert (log_probs[~mask] == 0).all()
    assert output.metrics["multi_turn/turns/mean"] == 2
    assert output.metrics["multi_turn/environment_tokens"] == len(tool)
    assert output.metrics["perf/generated_tokens"] == len(table.response_tokens)
    effective = output.metrics["perf/effective_tokens_per_gpu_per_sec"] / output.metrics["perf/tokens_per_gpu_per_sec"]
    assert effective == pytest.approx(table.loss_mask.mean())
    assert output.metrics["rollout/weight_staleness/max"] == 0


def test_log_probs_over_http_are_those_of_the_engine(
    make_args: MakeArgs, make_manager: MakeManager, http_engine: EmbeddedEngine
) -> None:
    """With the seed that deterministic mode hands to plugins, HTTP gives the tokens of a direct request."""
    path = plugin("slime_style.py:generate_with_meta_info")
    args = make_args(deterministic_mode=True, rollout_batch_size=2)
    direct = make_manager(args).generate(0).table
    args = make_args(deterministic_mode=True, rollout_batch_size=2, custom_generate_function_path=path)
    over_http = make_manager(args, [http_engine]).generate(0).table
    np.testing.assert_array_equal(direct.response_tokens, over_http.response_tokens)
    np.testing.assert_allclose(direct.rollout_log_probs, over_http.rollout_log_probs, atol=1e-5)
    assert direct.status == over_http.status
    assert direct.response == over_http.response


def test_a_fan_out_shares_rollout_and_advantage(
    make_args: MakeArgs, make_manager: MakeManager, http_engine: EmbeddedEngine
) -> None:
    args = make_args(custom_generate_function_path=plugin("slime_style.py:solver_and_critic"))
    table = make_manager(args, [http_engine]).generate(0).table
    assert len(table) == 24
    assert np.bincount(table.rollout_id).tolist() == [2] * 12
    assert np.bincount(table.group_id).tolist() == [8, 8, 8]
    assert [sorted(pair) for pair in table.reward.reshape(12, 2).tolist()] == [[0.0, 6.0]] * 12  # the plugin's own
    assert (table.advantage == 0).all()  # every rollout of a group has the same mean reward
    prompts = [len(table.row_slice("prompt_tokens", row)) for row in range(2)]
    assert prompts[0] != prompts[1]


def test_fan_outs_survive_a_checkpoint_as_surplus(make_args: MakeArgs, make_manager: MakeManager) -> None:
    args = make_args(custom_generate_function_path=plugin("native.py:twins"), over_sampling_batch_size=5)
    manager = make_manager(args, [ScriptedEngine()])
    manager.generate(0)
    resumed = make_manager(args, [ScriptedEngine()])
    resumed.load_state_dict(json.loads(json.dumps(manager.state_dict())))
    table = resumed.generate(1).table
    assert np.bincount(table.rollout_id)[12:].tolist() == [2] * 12
    assert table.group_id.min() == 3


def test_siblings_are_scored_together(make_args: MakeArgs, make_manager: MakeManager) -> None:
    args = make_args(
        custom_generate_function_path=plugin("native.py:twins"), custom_rm_path=plugin("hooks.py:rank_in_group")
    )
    assert make_manager(args, [ScriptedEngine()]).generate(0).table.reward.tolist() == [0, 1] * 12


@pytest.mark.parametrize("deterministic", [False, True])
def test_plugins_get_slimes_sampling_params(
    make_args: MakeArgs, make_manager: MakeManager, deterministic: bool
) -> None:
    args = make_args(
        custom_generate_function_path=plugin("native.py:sees_params"),
        rollout_stop=["####"],
        rollout_temperature=0.7,
        deterministic_mode=deterministic,
    )
    table = make_manager(args, [ScriptedEngine()]).generate(0).table
    seen = [json.loads(m) for m in table.metadata]
    params = seen[0]["params"]
    assert (params["temperature"], params["stop"], params["max_new_tokens"]) == (0.7, ["####"], 12)
    assert params["no_stop_trim"] is True
    seeds = {s["params"].get("sampling_seed") for s in seen}
    # one seed for several requests would make them equal: only where slime gives one as well
    assert len(seeds) == 12 if deterministic else seeds == {None}
    assert len({s["session"] for s in seen}) == 12
    assert not seen[0]["evaluation"]
    assert set(table.status) == {"completed"}  # the plugin left it pending
    assert (table.weight_versions == 0).all()


def test_tokens_are_of_the_weights_that_the_engine_has(
    make_args: MakeArgs, make_manager: MakeManager, caplog: pytest.LogCaptureFixture
) -> None:
    """A plugin that says nothing of weights: nothing is stale, warned of, masked or dropped."""
    engine = ScriptedEngine()
    args = make_args(
        custom_generate_function_path=plugin("native.py:uses_a_tool"),
        over_sampling_batch_size=4,
        mask_offpolicy_in_partial_rollout=True,
        max_weight_staleness=1,
    )
    manager = make_manager(args, [engine])
    for version in (3, 4):
        engine.version = version
        output = manager.generate(version)
        masks, versions = (getattr(output.table, name).reshape(12, 5) for name in ("loss_mask", "weight_versions"))
        fresh = masks.any(axis=1)
        assert masks[fresh].tolist() == [[True, True, False, False, True]] * fresh.sum()
        assert (versions[fresh] == version).all()
        assert output.metrics["rollout/stale_groups"] == 0
        # only the surplus of rollout 3, which comes first in rollout 4, is masked
        assert fresh.tolist() == [version == 3] * 4 + [True] * 8
    assert "older weights" not in caplog.text


def test_a_tools_tokens_are_never_stale(make_args: MakeArgs, make_manager: MakeManager) -> None:
    engine = ScriptedEngine()
    engine.version = 5
    args = make_args(
        custom_generate_function_path=plugin("native.py:tool_speaks_first"),
        over_sampling_batch_size=4,
        max_weight_staleness=1,
    )
    manager = make_manager(args, [engine])
    assert manager.generate(5).metrics["rollout/weight_staleness/max"] == 0
    assert manager.generate(6).metrics["rollout/stale_groups"] == 0


def test_the_engines_answer_says_which_weights(make_args: MakeArgs, make_manager: MakeManager) -> None:
    engine = ScriptedEngine()
    engine.version = 3
    args = make_args(custom_generate_function_path=plugin("native.py:answers_with_meta_info"), rollout_batch_size=1)
    table = make_manager(args, [engine]).generate(3).table
    assert table.weight_versions.reshape(4, 2).tolist() == [[2, 3], [3, 3], [2, 3], [3, 3]]


def test_a_rollout_function_need_not_know_the_weights(make_args: MakeArgs, make_manager: MakeManager) -> None:
    engine = ScriptedEngine()
    engine.version = 3
    output = make_manager(make_args(rollout_function_path=plugin("hooks.py:echo_rollout")), [engine]).generate(3)
    assert (output.table.weight_versions == 3).all()
    assert output.metrics["rollout/weight_staleness/max"] == 0


@pytest.mark.parametrize("function", ["generate", "generate_in_a_thread"])
def test_a_plugin_waits_for_no_engine_that_is_gone(
    make_args: MakeArgs, make_manager: MakeManager, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """slime's `post` tries again for a minute, for a server may come back; a dead engine comes back without weights."""
    loops: set[asyncio.AbstractEventLoop] = set()

    class Dying(ScriptedEngine):
        dead = False

        async def info(self) -> EngineInfo:
            loops.add(asyncio.get_running_loop())
            if self.dead:
                raise ConnectionError("nobody is there")
            return await super().info()

        async def start_http(self) -> str:
            self.dead = True
            return "http://127.0.0.1:9"

    waits: list[int] = []
    monkeypatch.setattr(Retry, "wait_s", lambda _, attempt: 0.0 * (waits.append(attempt) or 0))
    args = make_args(custom_generate_function_path=plugin(f"slime_style.py:{function}"))
    with pytest.raises(ValueError, match="engine 0 has died: nobody is there"):
        make_manager(args, [Dying()]).generate(0)
    assert waits == []
    assert len(loops) == 1  # where the engine is started anew, which a plugin's own loop would end with itself


def test_only_the_samples_that_failed_are_tried_again(
    make_args: MakeArgs, make_manager: MakeManager, caplog: pytest.LogCaptureFixture
) -> None:
    args = make_args(custom_generate_function_path=plugin("native.py:spoils_then_fails"))
    with caplog.at_level("INFO"):
        output = make_manager(args, [ScriptedEngine()]).generate(0)
    assert output.metrics["rollout/retries"] == 3  # once a group
    # all are in the log, one is on the console, from the plugin's line on
    assert [r.levelname for r in caplog.records if "tool broke" in r.message] == ["WARNING", "INFO", "INFO"]
    lines = next(r.message for r in caplog.records if "tool broke" in r.message).splitlines()
    assert [line.split('"')[1] for line in lines if line.startswith("  File")] == [plugin("native.py")]
    assert output.metrics["rollout/failed_groups"] == 0
    # nothing of the failed attempt is left
    assert set(output.table.response_lengths.tolist()) == {1}
    assert set(output.table.metadata) == {"{}"}


def test_plugins_of_a_repeatable_run_take_turns(make_args: MakeArgs, make_manager: MakeManager) -> None:
    args = make_args(
        deterministic_mode=True,
        custom_generate_function_path=plugin("native.py:notes_its_turn"),
        rollout_sample_hook_path=[plugin("native.py:notes_its_hook")],
    )
    table = make_manager(args, [ScriptedEngine()]).generate(0).table
    turns = [json.loads(row)["turn"] for row in table.metadata]
    assert [end - begin for begin, end, _ in turns] == [1] * 12
    # sample 1 was tried again after the other groups: all that fail wait at the same time, not one after the other
    assert sorted(range(12), key=lambda row: turns[row][0]) == [0, *range(2, 12), 1]
    assert sorted(hook for _, _, hook in turns) == list(range(25, 37))  # when every response is there


@pytest.mark.parametrize("partial", [False, True])
def test_an_abort_of_a_plugins_responses(make_args: MakeArgs, make_manager: MakeManager, partial: bool) -> None:
    """Half of group 1 is cut off: it starts afresh as a whole, or goes on where it was."""
    held = ("train-4-0", "train-5-0")
    engine = ScriptedEngine(length=lambda request: 9, holds=lambda request: request.request_id in held)
    args = make_args(
        custom_generate_function_path=plugin("native.py:asks_the_engine"),
        over_sampling_batch_size=4,
        partial_rollout=partial,
    )
    manager = make_manager(args, [engine])
    assert set(manager.generate(0).table.group_id.tolist()) == {0, 2, 3}
    (group,) = manager.state_dict()["data_source"]["returned"]
    assert [s["response_length"] for s in group] == ([3, 3, 9, 9] if partial else [0, 0, 0, 0])
    engine.holds = lambda request: False
    engine.version = 1
    table = manager.generate(1).table
    versions = [table.row_slice("weight_versions", row).tolist() for row in range(4)]
    assert table.group_id[:4].tolist() == [1] * 4
    assert versions == ([[0] * 3 + [1] * 6] * 2 + [[0] * 9] * 2 if partial else [[1] * 9] * 4)


def test_a_plugin_that_returns_something_else_is_told(make_args: MakeArgs, make_manager: MakeManager) -> None:
    args = make_args(custom_generate_function_path=plugin("native.py:returns_nonsense"))
    with pytest.raises(ValueError, match="expected a Sample in a group, got a str"):
        make_manager(args, [ScriptedEngine()]).generate(0)


def test_a_data_source_written_for_slime(make_args: MakeArgs, make_manager: MakeManager) -> None:
    manager = make_manager(make_args(data_source_path=plugin("sources.py:Hinted")), [ScriptedEngine()])
    table = manager.generate(0).table
    assert {json.loads(m)["hint"] for m in table.metadata} == {True}
    assert manager.num_prompts() == 59
    assert manager.state_dict()["data_source"]["next_group"] == 3


@pytest.mark.parametrize("name", ["hangs_once", "hangs_once_and_ignores_cancelling"])
def test_a_call_that_never_returns_is_tried_again(make_args: MakeArgs, make_manager: MakeManager, name: str) -> None:
    args = make_args(custom_generate_function_path=plugin(f"native.py:{name}"), generate_timeout=5.0)
    output = make_manager(args, [ScriptedEngine()]).generate(0)
    assert output.metrics["rollout/retries"] == 1
    assert len(output.table) == 12


def test_calls_that_never_return_end_the_rollout(make_args: MakeArgs, make_manager: MakeManager) -> None:
    args = make_args(custom_generate_function_path=plugin("native.py:hangs"), generate_timeout=0.05)
    with pytest.raises(ValueError, match=r"could not be generated.*--generate-timeout 0\.05 s"):
        make_manager(args, [ScriptedEngine()]).generate(0)


def test_a_full_batch_does_not_wait_for_what_will_not_stop(
    make_args: MakeArgs,
    make_manager: MakeManager,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(generate, "STOP_SECONDS", 0.3)
    args = make_args(custom_generate_function_path=plugin("native.py:hangs_in_group_1"), over_sampling_batch_size=4)
    manager = make_manager(args, [ScriptedEngine()])
    output = manager.generate(0)
    assert set(output.table.group_id.tolist()) == {0, 2, 3}
    assert output.metrics["rollout/unfinished_groups"] == 1
    assert "prompts 1 did not stop within 0.3 s" in caplog.text
    (group,) = manager.state_dict()["data_source"]["returned"]
    assert [(s["group_index"], s["response_length"]) for s in group] == [(1, 0)] * 4
