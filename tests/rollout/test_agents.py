"""Agents in a rollout: their sessions outlive it, under --partial-rollout, and are ended otherwise."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

from slimelite.arguments import EvalDataset
from slimelite.engines.protocol import GenerateRequest, SamplingParams, stream_seed
from slimelite.rollout import generate
from slimelite.rollout.manager import RolloutManager
from slimelite.rollout.sessions import PooledSessions
from tests.rollout.conftest import MakeArgs, MakeManager
from tests.rollout.plugins import agents
from tests.rollout.scripted import EOS, ScriptedEngine, log_prob, token

ROOT = Path(__file__).parents[2]
TALK = "tests.rollout.plugins.agents.talk"


class Interrupted(ScriptedEngine):
    """Holds the second turn of groups 2 and later, at three of five tokens, while the weights are version 0."""

    def __init__(self) -> None:
        super().__init__(holds=lambda r: self.version == 0 and _place(r)[0] >= 4 and _place(r)[1] == 1)


def _place(request: GenerateRequest) -> tuple[int, int]:
    """(sample, turn) of a request; of one in an evaluation the sample is -1."""
    session, turn, _ = request.request_id.split("/")
    return int(session.removeprefix("train-")) if session.startswith("train-") else -1, int(turn)


@pytest.fixture
def manager(make_args: MakeArgs, make_manager: MakeManager, request: pytest.FixtureRequest) -> RolloutManager:
    agents.begun.clear()
    agents.ended.clear()
    sizes = {"rollout_batch_size": 2, "over_sampling_batch_size": 4, "n_samples_per_prompt": 2}
    settings = {"custom_generate_function_path": TALK, "sglang_server_concurrency": 8}
    args = make_args(**{**sizes, **settings, **request.param})
    return make_manager(args, [Interrupted()])


def update(manager: RolloutManager) -> None:
    """Bring the engine the next weights."""
    (engine,) = manager._context.engines.engines
    asyncio.run(engine.begin_weight_update(1))


OVER_HTTP = {"custom_generate_function_path": "tests.rollout.plugins.agents.talk_over_http"}
PARTIAL = {"partial_rollout": True, "generate_timeout": 60.0}


@pytest.mark.parametrize("manager", [PARTIAL, {**PARTIAL, **OVER_HTTP}], indirect=True)
def test_an_agent_goes_on_where_it_was_under_new_weights(
    manager: RolloutManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = manager.generate(0)
    assert sorted(set(first.table.group_id.tolist())) == [0, 1]
    assert first.metrics["rollout/unfinished_groups"] == 2
    assert first.metrics["rollout/turns_per_episode"] == 3
    assert first.metrics["rollout/branches_per_episode"] == 1
    # a checkpoint has their prompts, as a run that begins with it has nothing else of them
    returned = manager.state_dict()["data_source"]["returned"]
    assert [(s["index"], s["response_length"], s["status"]) for group in returned for s in group] == [
        (index, 0, "pending") for index in range(4, 8)
    ]
    update(manager)
    # the wait does not count as the agent's time
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + 1000)
    second = manager.generate(1)
    assert sorted(set(second.table.group_id.tolist())) == [2, 3]
    assert second.metrics["rollout/resumed_groups"] == 2
    # nobody had to begin anew, and nothing is left of these; a later group may wait in its turn
    assert set(agents.begun.values()) == {1}
    assert [agents.ended[f"train-{index}"] for index in range(8)] == [1] * 8
    assert not {0, 1, 2, 3} & manager._context.sessions().waiting.keys()
    for row, sample in enumerate(second.table.to_samples()[0] + second.table.to_samples()[1]):
        sampled = np.flatnonzero(sample.loss_mask)
        tokens, versions = (
            np.asarray(x)[sampled] for x in (sample.tokens[sample.prompt_length :], sample.weight_versions)
        )
        assert versions.tolist() == [0] * 5 + [0] * 3 + [1] * 2 + [1] * 5, row
        assert np.asarray(sample.rollout_log_probs)[sampled].tolist() == [
            log_prob(t, v) for t, v in zip(tokens, versions, strict=True)
        ]
        seed = stream_seed(manager.args.rollout_seed, f"train-{sample.index}")
        for turn, at in enumerate(range(0, 15, 5)):
            request = GenerateRequest("", (0,), SamplingParams(5, seed=stream_seed(seed, turn)))
            assert tokens[at : at + 5].tolist() == [*(token(request, i) for i in range(4)), EOS]


@pytest.mark.parametrize("manager", [PARTIAL], indirect=True)
def test_the_clock_of_an_agent_stands_still_until_it_is_taken_again(
    manager: RolloutManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager.generate(0)
    waiting = manager.source.get_samples(2)
    assert {group[0].group_index for group in waiting} == {2, 3}
    update(manager)
    real, later, admit = time.monotonic, [0.0], PooledSessions.admit
    monkeypatch.setattr(time, "monotonic", lambda: real() + later[0])

    def and_time_passes(sessions: PooledSessions) -> None:
        admit(sessions)
        later[0] = 1000.0

    with monkeypatch.context() as patched:
        patched.setattr(PooledSessions, "admit", and_time_passes)
        manager.generate(1)  # of other prompts
    assert agents.ended.keys().isdisjoint({"train-4", "train-5", "train-6", "train-7"})
    manager.source.add_samples(waiting)
    for rollout_id in range(2, 4):  # what the second rollout has left comes first
        manager.generate(rollout_id)
    assert [agents.begun[f"train-{index}"] for index in range(4, 8)] == [1] * 4
    assert [agents.ended[f"train-{index}"] for index in range(4, 8)] == [1] * 4


@pytest.mark.parametrize("manager", [{}, OVER_HTTP], indirect=True)
def test_without_partial_rollouts_an_agent_is_ended_and_begins_anew(manager: RolloutManager) -> None:
    first = manager.generate(0)
    assert first.metrics["rollout/unfinished_groups"] == 2
    assert agents.begun == agents.ended
    update(manager)
    second = manager.generate(1)
    assert sorted(set(second.table.group_id.tolist())) == [2, 3]
    assert [agents.begun[f"train-{index}"] for index in range(8)] == [1] * 4 + [2] * 4
    assert set(second.table.weight_versions[second.table.loss_mask].tolist()) == {1}


@pytest.mark.parametrize("manager", [{"partial_rollout": True, "max_weight_staleness": 0}], indirect=True)
def test_an_agent_whose_tokens_are_too_old_begins_anew(manager: RolloutManager) -> None:
    manager.generate(0)
    update(manager)
    second = manager.generate(1)
    assert second.metrics["rollout/stale_groups"] == 2
    assert second.metrics["rollout/resumed_groups"] == 0
    assert [agents.begun[f"train-{index}"] for index in range(8)] == [1] * 4 + [2] * 4
    assert agents.begun == agents.ended
    assert set(second.table.weight_versions[second.table.loss_mask].tolist()) == {1}


def test_a_request_whose_engine_fails_is_sent_again(make_args: MakeArgs, make_manager: MakeManager) -> None:
    agents.begun.clear()
    lost: list[str] = []

    def breaks(request: GenerateRequest) -> Exception | None:
        if _place(request)[1] != 1 or request.request_id in lost:
            return None
        lost.append(request.request_id)
        return ConnectionError("the connection was reset")

    engine = ScriptedEngine(breaks=breaks)
    args = make_args(rollout_batch_size=2, n_samples_per_prompt=2, custom_generate_function_path=TALK)
    output = make_manager(args, [engine]).generate(0)
    assert len(lost) == 4
    assert set(agents.begun.values()) == {1}
    assert output.metrics["rollout/turns_per_episode"] == 3


def test_a_rule_scores_the_branch_that_ended_the_session(make_args: MakeArgs, make_manager: MakeManager) -> None:
    path = "tests.rollout.plugins.agents.compact"
    args = make_args(custom_generate_function_path=path, custom_rm_path=None, rm_type="math")
    table = make_manager(args, [ScriptedEngine()]).generate(0).table
    assert len(table) == 24
    assert set(table.reward.tolist()) == {1.0}


def test_the_generate_function_of_the_docs(make_args: MakeArgs, make_manager: MakeManager, tmp_path: Path) -> None:
    section = (ROOT / "docs" / "agents.md").read_text().partition("## Exact tokens")[2]
    (tmp_path / "asks.py").write_text(section.partition("```python\n")[2].partition("```")[0])
    path = f"{tmp_path}/asks.py:generate"
    args = make_args(rollout_batch_size=1, n_samples_per_prompt=2, custom_generate_function_path=path)
    output = make_manager(args, [ScriptedEngine()]).generate(0)
    assert output.metrics["rollout/turns_per_episode"] == 3
    assert output.metrics["rollout/branches_per_episode"] == 1


def test_groups_that_wait_for_room_and_an_evaluation_need_not_wait_for_waiting_ones(
    make_args: MakeArgs, make_manager: MakeManager, monkeypatch: pytest.MonkeyPatch, prompt_file: str
) -> None:
    monkeypatch.setattr(generate, "STOP_SECONDS", 5.0)
    agents.begun.clear()
    agents.ended.clear()
    sizes = {"rollout_batch_size": 2, "over_sampling_batch_size": 8, "n_samples_per_prompt": 2}
    dataset = EvalDataset(
        name="asked",
        path=f"{prompt_file}@[:1]",
        input_key="messages",
        label_key="label",
        apply_chat_template=True,
        n_samples_per_eval_prompt=6,
        max_response_len=12,
        custom_generate_function_path=TALK,
    )
    settings = {"custom_generate_function_path": TALK, "sglang_server_concurrency": 6, "partial_rollout": True}
    manager = make_manager(make_args(**sizes, **settings, eval_datasets=[dataset]), [Interrupted()])
    first = manager.generate(0)
    waiting = set(manager._context.sessions().waiting)
    assert waiting
    assert first.metrics["rollout/unfinished_groups"] == 6 > len(waiting)
    assert len(manager.evaluate(0).tables["asked"]) == 6
    update(manager)
    manager.generate(1)
    assert not waiting & set(manager._context.sessions().waiting)
    assert set(agents.begun.values()) == {1}
