"""Episodes of --environment in a rollout: exact samples, rewards by turn and by role, limits, and failures that end."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from transformers import PreTrainedTokenizerFast

from slimelite.arguments import Args
from slimelite.arguments.rollout import EPISODE
from slimelite.engines.protocol import GenerateRequest, GenerateResult
from slimelite.rewards.grader import RewardError
from slimelite.rollout import groups
from slimelite.rollout.manager import RolloutManager, RolloutOutput
from slimelite.samples.sample import Sample
from tests.environments import acted
from tests.rollout.scripted import ScriptedEngine
from tests.serving.chat import tokenizer as chat_tokenizer

# (sample, turn, prompt) -> what the model says
Says = Callable[[int, int, str], str]
Play = Callable[..., Any]


class Speaker(ScriptedEngine):
    """An engine that says what a function says, token by token of its tokenizer, or holds a request as scripted."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, says: Says, **settings: Any) -> None:
        super().__init__(max_context_len=4096, **settings)
        self.tokenizer, self.says = tokenizer, says
        self.ends = {token for token, one in tokenizer.added_tokens_decoder.items() if one.special}

    def _result(self, request: GenerateRequest) -> GenerateResult:
        name, turn, _ = request.request_id.rpartition("-")[2].split("/")
        text = self.says(int(name.partition(".")[0]), int(turn), self.tokenizer.decode(request.input_ids))
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += [] if ids and ids[-1] in self.ends else [self.tokenizer.eos_token_id]
        ids = ids[request.position :][: request.params.max_new_tokens]
        reason = "stop" if ids[-1] in self.ends else "length"
        if self.holds(request):
            ids, reason = ids[: self.partial], "abort"
        return GenerateResult(request.request_id, ids, [-0.25] * len(ids), [self.version] * len(ids), reason)


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Play]:
    """A rollout of two prompts with two samples each, by a model that says what a function says."""
    rows = tmp_path / "rows.jsonl"
    asked = [{"input": [{"role": "user", "content": f"row {n}"}], "label": str(n)} for n in range(2)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in asked))
    managers: list[RolloutManager] = []

    def run(
        environment: str,
        says: Says,
        holds: Callable[[GenerateRequest], bool] | None = None,
        family: str = "qwen2.5",
        **given: Any,
    ) -> Any:
        spoken = chat_tokenizer(family)
        values = {
            "prompt_data": [str(rows)],
            "label_key": "label",
            "environment": environment,
            "custom_generate_function_path": EPISODE,
            "reward_key": "total",
            "rollout_batch_size": 2,
            "over_sampling_batch_size": 2,
            "n_samples_per_prompt": 2,
            "rollout_max_response_len": 200,
            "hf_checkpoint": str(tmp_path),
            "tokenizer": str(tmp_path),
        }
        engine = Speaker(spoken, says, **({} if holds is None else {"holds": holds, "partial": 1}))
        managers.append(RolloutManager(Args(**{"rollout_backend": "embedded"} | values | given), [engine], spoken))
        if holds is None:
            return managers[-1].generate(0)
        first = managers[-1].generate(0)
        engine.version, engine.holds = 1, lambda _: False
        return first, managers[-1].generate(1)

    yield run
    for manager in managers:
        manager.close()


def of(name: str) -> str:
    """An environment of acted.py."""
    return f"{acted.__file__}:{name}"


def samples_of(output: RolloutOutput) -> list[Sample]:
    return [sample for group in output.table.to_samples() for sample in group]


def call(number: int) -> str:
    arguments = json.dumps({"town": "x" * number})
    return f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'


def test_tools_are_called_and_only_what_the_model_wrote_is_trained_on(play: Play) -> None:
    output = play(of("Weather"), lambda sample, turn, _: call(turn + 1) if turn < sample else "a" * sample)
    for sample in samples_of(output):
        assert sample.index is not None
        text = chat_tokenizer().decode(sample.tokens)
        said = [*(f"{call(n + 1)}<|im_end|>" for n in range(sample.index)), f"{'a' * sample.index}<|im_end|>"]
        mask = np.asarray(sample.loss_mask, bool)
        response = np.asarray(sample.tokens[sample.prompt_length :])
        assert chat_tokenizer().decode(response[mask]) == "".join(said)
        for number in range(sample.index):
            assert f'{{"town": "{"x" * (number + 1)}", "days": 1}}' in text
        assert "The weather in a town." in text  # the template shows the tools
        assert sample.reward == float(sample.index)
        assert str(sample.status) == "completed"
        assert sample.metadata["episode"]["tool_calls"] == sample.index
        turns = sample.metadata["episode"]["timeline"]
        assert [turn["calls"] for turn in turns] == [["weather"]] * sample.index + [[]]
        assert [turn["parent"] for turn in turns] == [None, *range(sample.index)]
        assert sum(turn["tokens"] for turn in turns) == sum(mask)
        ends = [turn["begin"] + turn["seconds"] for turn in turns]
        assert all(end <= turn["begin"] + 1e-3 for end, turn in zip(ends, turns[1:], strict=False))
        # the environment's answers lie between the replies, and its calls within its answers
        answers = [end + turn["answer"] for end, turn in zip(ends, turns, strict=True)]
        assert all(end <= turn["begin"] + 3e-3 for end, turn in zip(answers, turns[1:], strict=False))
        assert [len(turn.get("call_seconds", [])) for turn in turns] == [len(turn["calls"]) for turn in turns]
        assert all(sum(turn.get("call_seconds", [])) <= turn["answer"] + 2e-3 for turn in turns)
    found = {name.rpartition("/")[2]: v for name, v in output.metrics.items() if name.startswith("rollout/environment")}
    assert found.pop("seconds") > 0
    zeros = ["malformed_calls", "timeouts", "errors", "untrained", "context_full", "turn_limit"]
    assert found == {"episodes": 4, "turns": 2.5, "tool_calls": 1.5, **dict.fromkeys(zeros, 0.0)}


FAMILIES = {
    "gemma4_v5": ('<|tool_call>call:weather{town:<|"|>x<|"|>}<tool_call|><|tool_response>', "Rain.<turn|>"),
    "gptoss": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"town":"x"}<|call|>',
        "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>Rain.<|return|>",
    ),
    "lfm2": ('<|tool_call_start|>[weather(town="x")]<|tool_call_end|><|im_end|>', "Rain.<|im_end|>"),
    "muse_glimmer": (
        ' to=weather<|message|><atem:function_calls>\n<atem:invoke name="weather">\n<atem:parameter name="town">x'
        "</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eot|>",
        " to=user<|message|>Rain.<|eot|>",
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_of_other_families_are_answered_and_trained_on(play: Play, family: str) -> None:
    output = play(of("Weather"), lambda _sample, turn, _prompt: FAMILIES[family][turn], family=family)
    for sample in samples_of(output):
        text = chat_tokenizer(family).decode(sample.tokens)
        mask = np.asarray(sample.loss_mask, bool)
        response = np.asarray(sample.tokens[sample.prompt_length :])
        assert chat_tokenizer(family).decode(response[mask]) == "".join(FAMILIES[family])
        assert "days" in text.partition(FAMILIES[family][0])[2], "the tool has answered"
        assert (sample.reward, str(sample.status)) == (float(len("Rain.")), "completed")
        facts = sample.metadata["episode"]
        assert (facts["tool_calls"], facts["malformed_calls"], facts["turns"]) == (1, 0, 2)


def test_rewards_of_turns_end_where_their_replies_do(play: Play) -> None:
    output = play(of("Echo"), lambda _sample, turn, _prompt: "end" if turn == 2 else "on")
    table = output.table
    assert table.turn_rewards is not None
    for row, sample in enumerate(samples_of(output)):
        rewards, mask = table.row_slice("turn_rewards", row), np.asarray(sample.loss_mask)
        ends = np.flatnonzero(np.diff([*mask, 0]) == -1)  # the last token of each reply
        assert np.flatnonzero(~np.isnan(rewards)).tolist() == ends.tolist()
        assert rewards[ends].tolist() == [1.5] * 3
        assert json.loads(table.reward_components[row]) == {"a": 3.0, "b": 1.5, "total": 4.5}
        assert sample.metadata["episode"]["metrics"] == {"n": 3}
    assert table.reward.tolist() == [4.5] * 4
    assert output.metrics["rollout/reward/a"] == 3.0
    assert output.metrics["rollout/environment/n"] == 3.0


@pytest.mark.parametrize(
    ("limit", "turns"),
    [({"environment_max_turns": 2}, 2), ({"environment_max_tokens": 4}, 2), ({"rollout_max_response_len": 2}, 1)],
)
def test_limits_end_an_episode_as_truncated(play: Play, limit: dict[str, int], turns: int) -> None:
    output = play(of("Echo"), lambda _sample, _turn, _prompt: "on", **limit)
    for sample in samples_of(output):
        assert str(sample.status) == "truncated"
        assert sample.metadata["episode"]["turns"] == turns
        assert sample.reward == 1.5 * turns
    assert output.metrics["rollout/environment/turn_limit"] == float("environment_max_turns" in limit)


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize(("said", "kind"), [("raise", "exception"), ("hang", "timeout")])
def test_a_failing_environment_ends_its_own_episode(play: Play, said: str, kind: str, processes: int) -> None:
    # a call that hangs ends after the limit; other calls may take a second on a busy machine
    seconds = 4.0 if kind == "timeout" else 60.0
    limits = {"environment_call_timeout": seconds, "environment_processes": processes}

    def says(sample: int, turn: int, _: str) -> str:
        return "on" if not turn else said if sample == 1 else "end"

    output = play(of("Echo"), says, **limits)
    assert output.table.turn_rewards is not None
    for row, sample in enumerate(samples_of(output)):
        turns = output.table.row_slice("turn_rewards", row)
        assert turns[~np.isnan(turns)].tolist() == ([0.0] * 2 if sample.index == 1 else [1.5] * 2)
        failed = sample.index == 1
        assert str(sample.status) == ("failed" if failed else "completed")
        assert sample.reward == (0.0 if failed else 3.0)
        if failed:
            assert sample.metadata["reward_error"].startswith(f"{kind}: the environment: ")
    name = "timeouts" if kind == "timeout" else "errors"
    assert output.metrics[f"rollout/environment/{name}"] == 1
    assert output.metrics[f"rollout/reward_errors/{kind}"] == 1


@pytest.mark.chaos("the only environment process stopped", "replaced, and its episodes are played again")
def test_an_episode_whose_worker_freezes_is_played_once_more(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its single process is stopped (SIGSTOP) while all of the rollout's episodes are there."""
    monkeypatch.setattr("slimelite.environments.hosts.PING_SECONDS", 0.5)
    stopped: list[int] = []

    def says(_sample: int, turn: int, _prompt: str) -> str:
        if turn and not stopped:
            children = psutil.Process().children()
            alive = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
            (worker,) = [child for child in alive if "slimelite.environments.serve" in child.cmdline()]
            worker.suspend()
            stopped.append(worker.pid)
        return "on" if not turn else "end"

    output = play(of("Echo"), says, environment_call_timeout=5.0, environment_processes=1)
    assert [sample.reward for sample in samples_of(output)] == [3.0] * 4
    assert not psutil.pid_exists(stopped[0])


def test_an_episode_that_never_begins_is_a_sample_that_nothing_is_trained_on(play: Play, tmp_path: Path) -> None:
    row = {"input": "x", "label": "1"}
    (tmp_path / "some.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps({**row, 'metadata': {'never': True}})}\n")
    output = play(of("Echo"), lambda *_: "end", prompt_data=[str(tmp_path / "some.jsonl")])
    assert output.table.response_lengths.tolist()[2:] == [0, 0]
    assert output.table.removed.tolist() == [False, False, True, True]
    assert output.table.reward.tolist() == [1.5, 1.5, 0.0, 0.0]
    assert output.metrics["rollout/environment/errors"] == 2
    assert output.metrics["rollout/turns_per_episode"] > 0


def test_an_episode_that_begins_longer_than_the_context_is_counted_and_said(
    play: Play, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"input": text, "label": "1"} for text in ("x", "long " * 2000)]
    (tmp_path / "some.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    output = play(of("Echo"), lambda *_: "end", prompt_data=[str(tmp_path / "some.jsonl")])
    assert output.table.removed.tolist() == [False, False, True, True]
    assert output.metrics["rollout/environment/errors"] == output.metrics["rollout/reward_errors/too_long"] == 2
    assert output.metrics["rollout/environment/context_full"] == output.metrics["rollout/environment/untrained"] == 2
    assert output.metrics["rollout/response_len/mean"] == output.table.loss_mask.sum() / 2
    said = [record.getMessage() for record in caplog.records if "of an episode is too long" in record.getMessage()]
    assert len(said) == 1
    assert re.search(r"maximum context length is 4096 tokens.* Please reduce the length of the messages", said[0])
    assert "--rollout-max-context-len" in said[0]


def test_an_environment_that_never_works_ends_the_run_with_its_message(play: Play) -> None:
    with pytest.raises(ValueError, match=r"the reward of every sample failed.*no such thing"):
        play(of("Echo"), lambda *_: "raise")
    with pytest.raises(RewardError, match="no such thing"):
        play(of("Echo"), lambda sample, *_: "raise" if sample == 3 else "end", reward_error="fail")


def test_a_failure_beside_the_environment_names_the_flag_that_was_given(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "RETRY_SECONDS", 0.0)

    def says(*_: object) -> str:
        raise ConnectionError("no engine")

    with pytest.raises(ValueError, match=r"could not be generated by --environment .*acted\.py:Echo; the last error"):
        play(of("Echo"), says)


def test_an_episode_without_rewards_is_scored_by_the_runs_rule(play: Play, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("Row one says nothing.\n\nRow zero says #### 0.\n")
    looked = '<tool_call>\n{"name": "search", "arguments": {"query": "zero"}}\n</tool_call>'
    output = play(
        f"search:{tmp_path / 'corpus.txt'}", lambda _, turn, __: "#### 1" if turn else looked, rm_type="gsm8k"
    )
    assert output.table.reward.tolist() == [0.0, 0.0, 1.0, 1.0]
    assert output.metrics["rollout/environment/turns"] == 2
    assert all("<tool_response>\nRow zero says #### 0." in sample.response for sample in samples_of(output))


def test_an_episode_that_is_cut_off_before_it_is_scored_has_no_reward(play: Play) -> None:
    output = play(of("Weather"), lambda _sample, turn, _prompt: call(turn), environment_max_turns=2)
    assert output.table.reward.tolist() == [0.0] * 4
    assert {str(sample.status) for sample in samples_of(output)} == {"truncated"}


@pytest.mark.parametrize("partial_rollout", [True, False])
def test_an_interrupted_episode_goes_on_or_begins_again(play: Play, partial_rollout: bool) -> None:
    sizes = {"rollout_batch_size": 1, "over_sampling_batch_size": 2, "partial_rollout": partial_rollout}

    def second_turns_of_the_second_group(request: GenerateRequest) -> bool:
        return request.request_id.startswith(("train-2.0/1/", "train-3.0/1/"))

    first, second = play(
        of("Echo"), lambda _, turn, __: "end" if turn == 2 else "on", second_turns_of_the_second_group, **sizes
    )
    assert first.table.group_id.tolist() == [0, 0]
    assert first.metrics["rollout/unfinished_groups"] == 1
    assert second.table.group_id.tolist() == [1, 1]
    assert second.metrics["rollout/resumed_groups"] == partial_rollout
    for sample in samples_of(second):
        assert sample.reward == 4.5
        assert sample.metadata["episode"]["turns"] == 3
        versions = np.asarray(sample.weight_versions)[np.asarray(sample.loss_mask, bool)]
        # replies of three, three and four tokens; the second was interrupted after its first token
        assert versions.tolist() == ([0] * 4 + [1] * 6 if partial_rollout else [1] * 10)


def test_two_players_of_one_model_are_compared_with_their_own_role(play: Play) -> None:
    """The first player of each group's second game makes an illegal move at once; else the second one loses."""

    def says(sample: int, _turn: int, prompt: str) -> str:
        pile = int(prompt.rpartition("user\n")[2].partition("<")[0])
        return "no" if sample % 2 else str(min(pile, 3))

    output = play("nim", says, prompt_data=["environment:nim@[2:]"], label_key=None)
    table = output.table
    assert table.role is not None
    roles = [sample.metadata["role"] for sample in samples_of(output)]
    assert roles == ["first", "second", "first", "first", "second", "first"]
    assert table.role.tolist() == [0, 1, 0, 0, 1, 0]
    assert table.rollout_id.tolist() == [0, 0, 1, 2, 2, 3]
    # piles 5 and 6: 3, then 2 or 3, so that the second player takes the last one
    assert table.reward.tolist() == [-1.0, 1.0, -1.0, -1.0, 1.0, -1.0]
    # the second player has nobody to be compared with, and all first ones lost
    assert table.advantage.tolist() == [0.0] * 6
    assert output.metrics["rollout/environment/reward/first"] == -1.0
    assert output.metrics["rollout/environment/reward/second"] == 1.0
    for sample in samples_of(output)[:2]:
        text = chat_tokenizer().decode(sample.tokens)
        assert text.count("<|im_start|>user") == 1  # each has a conversation of its own
        assert math.isclose(sample.metadata["episode"]["turns"], 2)


def test_a_player_without_a_reward_has_0_where_the_other_has_one(play: Play) -> None:
    assert play(of("Winner"), lambda *_: "word").table.reward.tolist() == [0.0, 1.0] * 4


def test_a_player_who_is_told_nothing_is_a_mistake_of_the_environment(play: Play) -> None:
    with pytest.raises(ValueError, match="the role 'second' must reply, but has no message to reply to"):
        play(of("Silent"), lambda *_: "word")
