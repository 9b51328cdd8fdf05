"""The grader: what scores a sample, and what becomes of rewards that fail."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from slimelite.arguments import RewardArgs
from slimelite.rewards.grader import Grader, RewardError, check_reward
from slimelite.rewards.rules import RULES, Rule
from slimelite.samples.sample import Sample

PLUGIN = """
import asyncio, sys, threading, time

async def length(args, sample, **kwargs):
    return len(sample.response)

def plain(args, sample):
    return 2.5

async def group(args, samples):
    return [float(len(samples))] * len(samples)

async def too_short(args, samples):
    return [1.0]

async def no_list(args, samples):
    return 1.0

def raises(args, sample):
    raise KeyError("missing key")

async def raises_each(args, sample):
    raise KeyError(sample.index)

def leaves(args, sample):
    sys.exit(3)

async def ends(args, sample):
    await asyncio.sleep(0)
    raise {"k": KeyboardInterrupt, "c": asyncio.CancelledError, "g": GeneratorExit, "s": SystemExit}[sample.response]

def ends_plainly(args, sample):
    asyncio.run(ends(args, sample))

async def nan(args, sample):
    return float("nan")

async def infinite(args, sample):
    return float("inf")

async def beyond_fp32(args, sample):
    return -1e300

async def nothing(args, sample):
    return None

async def a_dict(args, sample):
    return {"score": 0.75, "why": "it is good"}

async def timeout_of_its_own(args, sample):
    raise TimeoutError("the judge is asleep")

async def slow(args, sample):
    await asyncio.sleep(60)

async def blocks(args, sample):
    time.sleep(6)

async def blocks_until_told(args, sample):
    args.free.wait()

def hangs(args, sample):
    time.sleep(60)

async def sometimes(args, sample):
    if sample.index == 1:
        raise RuntimeError("flaky")
    return 1.0

async def sees_args(args, sample):
    return args.bonus

async def loop_id(args, sample):
    await asyncio.sleep(0.01)
    return float(id(asyncio.get_running_loop()) % 1000003)

class Judge:
    async def __call__(self, args, sample):
        return 4.0

judge = Judge()
"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("plugins") / "rewards_under_test.py"
    path.write_text(PLUGIN)
    return str(path)


@pytest.fixture
def graders() -> Iterator[list[Grader]]:
    made: list[Grader] = []
    yield made
    for grader in made:
        grader.close()


def samples(*responses: str, label: str | None = "42", **fields: Any) -> list[Sample]:
    return [Sample(index=i, group_index=0, response=r, label=label, **fields) for i, r in enumerate(responses)]


def rewards(graders: list[Grader], args: RewardArgs, given: list[Sample], **options: Any) -> list[Any]:
    grader = Grader(args, workers=1)
    graders.append(grader)
    asyncio.run(grader.grade(given, **options))
    return [s.reward for s in given]


def test_rules_score_samples(graders: list[Grader]) -> None:
    given = samples("\\boxed{42}", "\\boxed{7 + 35}", "\\boxed{41}", "")
    assert rewards(graders, RewardArgs(rm_type="math"), given) == [1.0, 0.0, 0.0, 0.0]
    algebra = samples("\\boxed{1+x}", "\\boxed{2+x}", label="x+1")
    assert rewards(graders, RewardArgs(rm_type="math"), algebra) == [1.0, 0.0]
    assert graders[-1].metrics() == {"rollout/reward_errors": 0.0}


def test_rules_that_judge_the_whole_text_do_not_get_the_token_that_ended_it(graders: list[Grader]) -> None:
    ends = ("<|endoftext|>", "<|im_end|>")
    for rule, right, inside in (
        ("f1", "Die Werkstatt.", 0.5),
        ("format", "<think>a</think><answer>b</answer>", 0.0),
        ("ifbench", '"Quoted."', 0.0),
    ):
        metadata = {"instruction_id_list": ["startend:quotation"], "kwargs": [{}]}
        texts = [f"{right}{end}" for end in ("", *ends, "<|im_end|><|im_end|>")]
        given = samples(*texts, label="Die Werkstatt.", metadata=metadata)
        grader = Grader(RewardArgs(rm_type=rule, reward_key="score"), workers=1, ends=ends)
        graders.append(grader)
        asyncio.run(grader.grade(given))
        assert [s.reward_value("score") for s in given] == [1.0, 1.0, 1.0, inside], rule
        assert [s.response for s in given] == texts


def test_boxed_reads_what_is_in_the_box(graders: list[Grader]) -> None:
    given = samples("wrong words \\boxed{Paris}", "Paris", label="paris")
    assert rewards(graders, RewardArgs(rm_type="boxed_f1"), given) == [1.0, 0.0]


def test_slimes_order_of_precedence(graders: list[Grader], plugin: str) -> None:
    def one(**fields: Any) -> list[Sample]:
        return samples("#### 42", **fields)

    length, plain = f"{plugin}:length", f"{plugin}:plain"
    own: dict[str, Any] = {"custom_rm_path": plain, "metadata": {"rm_type": "f1"}}
    assert rewards(graders, RewardArgs(rm_type="gsm8k"), one()) == [1.0]
    assert rewards(graders, RewardArgs(rm_type="math"), one(metadata={"rm_type": "gsm8k"})) == [1.0]
    with_path = RewardArgs(rm_type="gsm8k", custom_rm_path=length)
    assert rewards(graders, with_path, one(metadata={"rm_type": "gsm8k"})) == [7.0]
    assert rewards(graders, with_path, one(**own)) == [2.5]
    # a dataset's own settings come before the run's
    assert rewards(graders, with_path, one(), rm_type="gsm8k") == [1.0]
    mixed = [*one(), *one(**own), *one(metadata={"rm_type": "math"})]
    assert rewards(graders, RewardArgs(rm_type="gsm8k"), mixed) == [1.0, 2.5, 0.0]


def test_a_sample_names_its_own_rule(graders: list[Grader]) -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"rm_type": "code", "test_list": ["assert f() == 1"]}, "```\ndef f(): return 1\n```"),
        ({"rm_type": "ifbench", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}, "no comma"),
        ({"rm_type": "ifbench_loose", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}, "So,\nnone"),
        ({"rm_type": "format"}, "<think>a</think><answer>b</answer>"),
        ({"rm_type": "multiple_choice", "choices": ["x", "y"], "correct_letter": "B"}, "\\boxed{B}"),
        ({"rm_type": "boxed_gpqa", "correct_letter": "B"}, "Answer: A, no: \\boxed{the answer is B}"),
    ]
    given = [Sample(index=i, group_index=0, response=r, metadata=m) for i, (m, r) in enumerate(rows)]
    assert rewards(graders, RewardArgs(rm_type="math"), given) == [1.0] * len(rows)
    for sample in given:
        sample.response = "wrong, all of it, \\boxed{C},"
    assert rewards(graders, RewardArgs(rm_type="math"), given) == [0.0] * len(rows)
    unknown = samples("x", metadata={"rm_type": "ifbench", "instruction_id_list": ["words:rhyme"], "kwargs": [{}]})
    assert rewards(graders, RewardArgs(), unknown) == [0.0]
    assert "no check for words:rhyme" in unknown[0].metadata["reward_error"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (RewardArgs(rm_type="matth"), "--rm-type matth: there is no such reward rule; did you mean math"),
        (RewardArgs(rm_type="zzz"), "known names are math, .*, or write your own function and .* --custom-rm-path"),
        (RewardArgs(rm_type="opencua_click"), "not supported"),
        (RewardArgs(rm_type="reward_model"), "needs --reward-model-path"),
        (RewardArgs(rm_type="dapo"), "add --reward-key with one of score"),
        (RewardArgs(rm_type="dapo", reward_key="scor"), "add --reward-key"),
        (RewardArgs(rm_type="remote_rm", rm_url="localhost:8000"), "the address must start with http:// or https://"),
        (RewardArgs(rm_type="remote_rm"), "--rm-type remote_rm needs --rm-url"),
        (RewardArgs(custom_rm_path="no_such_module.fn"), "no_such_module"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_reward(args: RewardArgs, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Grader(args)


def test_no_reward_at_all_is_an_error_not_a_zero(graders: list[Grader]) -> None:
    with pytest.raises(ValueError, match="give --rm-type, --custom-rm-path, or rm_type"):
        rewards(graders, RewardArgs(), samples("x"))
    with pytest.raises(ValueError, match="--rm-type maht: there is no such reward rule"):
        rewards(graders, RewardArgs(rm_type="math"), samples("x", metadata={"rm_type": "maht"}))


def test_custom_functions_of_every_kind(graders: list[Grader], plugin: str) -> None:
    for name, expected in (("length", [2.0, 3.0]), ("plain", [2.5, 2.5]), ("judge", [4.0, 4.0])):
        assert rewards(graders, RewardArgs(custom_rm_path=f"{plugin}:{name}"), samples("ab", "abc")) == expected
    assert (
        rewards(graders, RewardArgs(custom_rm_path=f"{plugin}:group", group_rm=True), samples("a", "b", "c"))
        == [3.0] * 3
    )
    assert rewards(graders, RewardArgs(custom_rm_path=f"{plugin}:group"), samples("a", "b"), group_rm=True) == [2.0] * 2


def test_custom_functions_see_the_plugin_arguments(graders: list[Grader], plugin: str) -> None:
    class PluginArgs:
        bonus = 0.125

    grader = Grader(RewardArgs(custom_rm_path=f"{plugin}:sees_args"))
    graders.append(grader)
    grader.plugin_args = PluginArgs()
    given = samples("a")
    asyncio.run(grader.grade(given))
    assert given[0].reward == 0.125


def test_async_functions_share_one_loop_over_calls(graders: list[Grader], plugin: str) -> None:
    grader = Grader(RewardArgs(custom_rm_path=f"{plugin}:loop_id"))
    graders.append(grader)
    given = samples("a", "b")
    asyncio.run(grader.grade(given[:1]))
    asyncio.run(grader.grade(given[1:]))
    assert given[0].reward == given[1].reward


def test_dict_rewards_are_kept_whole_and_need_a_key(graders: list[Grader], plugin: str) -> None:
    path = f"{plugin}:a_dict"
    given = samples("a")
    rewards(graders, RewardArgs(custom_rm_path=path, reward_key="score"), given)
    assert given[0].reward == {"score": 0.75, "why": "it is good"}
    for key in (None, "why", "points"):
        with pytest.raises(RewardError, match=r"reward-key|must be a number"):
            rewards(graders, RewardArgs(custom_rm_path=path, reward_key=key, reward_error="fail"), samples("a"))
    assert rewards(graders, RewardArgs(custom_rm_path=path), samples("a"), reward_key="score") == [given[0].reward]
    dapo = rewards(graders, RewardArgs(rm_type="dapo", reward_key="score"), samples("Answer: 42"))
    assert dapo == [{"score": 1.0, "acc": True, "pred": "42"}]


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("raises", "exception", "KeyError: 'missing key'"),
        ("leaves", "exception", "SystemExit"),
        ("nan", "nonfinite", "the reward is nan"),
        ("infinite", "nonfinite", "the reward is inf"),
        ("beyond_fp32", "nonfinite", "the reward is -1e+300"),
        ("nothing", "invalid", "a reward must be a number, not None"),
        ("a_dict", "invalid", "--reward-key must name one"),
        ("timeout_of_its_own", "exception", "the judge is asleep"),
        ("slow", "timeout", "no reward within 0.3 s"),
        ("hangs", "timeout", "no reward within 0.3 s"),
        ("blocks", "timeout", "the function blocks the event loop"),
    ],
)
def test_every_failure_is_counted_kept_and_noted(
    graders: list[Grader], plugin: str, caplog: pytest.LogCaptureFixture, name: str, kind: str, message: str
) -> None:
    args = RewardArgs(custom_rm_path=f"{plugin}:{name}", reward_timeout=0.3 if kind == "timeout" else 60.0)
    given = samples("it is 42")
    with caplog.at_level(logging.WARNING):
        assert rewards(graders, args, given) == [0.0]
    grader = graders[-1]
    (report,) = grader.error_reports
    assert report.failure.kind == kind
    for text in (str(report), caplog.text):
        assert message in text
        assert "it is 42" in text
    assert kind in given[0].metadata["reward_error"]
    if kind == "exception":
        assert "Traceback" in report.failure.traceback
    assert not given[0].remove_sample
    assert grader.metrics() == {"rollout/reward_errors": 1.0, f"rollout/reward_errors/{kind}": 1.0}
    assert grader.metrics() == {"rollout/reward_errors": 0.0}
    assert grader.error_reports == []


def test_a_function_that_blocks_does_not_stop_generation_or_later_rewards(graders: list[Grader], plugin: str) -> None:
    grader = Grader(RewardArgs(rm_type="random", reward_timeout=1.0))
    graders.append(grader)

    free = threading.Event()  # until the end, so whoever waits for the blocked loop waits for ever
    grader.plugin_args = SimpleNamespace(free=free)

    async def scenario() -> tuple[int, list[Sample]]:
        blocked = asyncio.ensure_future(grader.grade(samples("a", custom_rm_path=f"{plugin}:blocks_until_told")))
        turns = 0
        while not blocked.done():
            await asyncio.sleep(0.01)
            turns += 1
        grader.args = replace(grader.args, reward_timeout=120.0)
        after = samples("abc", custom_rm_path=f"{plugin}:length")
        await grader.grade(after)
        return turns, after

    turns, after = asyncio.run(scenario())
    free.set()
    assert after[0].reward == 3.0
    assert turns > 1


def test_drop_takes_the_sample_out_and_leaves_the_others(graders: list[Grader], plugin: str) -> None:
    given = samples("a", "b", "c")
    args = RewardArgs(custom_rm_path=f"{plugin}:sometimes", reward_error="drop")
    assert rewards(graders, args, given) == [1.0, 0.0, 1.0]
    assert [s.remove_sample for s in given] == [False, True, False]


def test_fail_names_sample_reward_and_cause(graders: list[Grader], plugin: str) -> None:
    args = RewardArgs(custom_rm_path=f"{plugin}:sometimes", reward_error="fail")
    with pytest.raises(RewardError, match=r"(?s)sometimes of sample 1 \(group 0\).*RuntimeError: flaky.*Traceback"):
        rewards(graders, args, samples("a", "b", "c"))


def test_a_failed_dict_rule_gives_a_dict(graders: list[Grader]) -> None:
    given = samples("Answer: 1", label="one half")
    rewards(graders, RewardArgs(rm_type="dapo", reward_key="score"), given)
    assert given[0].reward == {"score": 0.0, "acc": False, "pred": None}
    assert given[0].reward_value("score") == 0.0


def test_a_missing_label_is_a_reward_error(graders: list[Grader]) -> None:
    given = samples("#### 1", label=None)
    assert rewards(graders, RewardArgs(rm_type="gsm8k"), given) == [0.0]
    assert "set --label-key" in graders[-1].error_reports[0].failure.message


def test_a_hung_rule_is_a_timeout_of_its_sample_alone(graders: list[Grader]) -> None:
    args = RewardArgs(rm_type="format", format_regex="(a+)+b", reward_timeout=3.0)
    assert rewards(graders, args, samples("aab", "a" * 50, "b")) == [1.0, 0.0, 0.0]
    assert graders[-1].metrics()["rollout/reward_errors/timeout"] == 1.0


@pytest.mark.parametrize("name", ["ends", "ends_plainly"])
def test_an_exception_that_ends_programs_ends_one_reward(graders: list[Grader], plugin: str, name: str) -> None:
    args = RewardArgs(custom_rm_path=f"{plugin}:{name}", reward_timeout=20.0)
    assert rewards(graders, args, samples("k", "c", "g", "s")) == [0.0] * 4
    assert graders[-1].metrics()["rollout/reward_errors/exception"] == 4.0
    assert rewards(graders, RewardArgs(custom_rm_path=f"{plugin}:length"), samples("abc")) == [3.0]


@pytest.mark.parametrize("name", ["too_short", "no_list", "raises"])
def test_a_group_call_that_fails_fails_for_the_whole_group(graders: list[Grader], plugin: str, name: str) -> None:
    args = RewardArgs(custom_rm_path=f"{plugin}:{name}", group_rm=True)
    assert rewards(graders, args, samples("a", "b")) == [0.0, 0.0]
    assert graders[-1].metrics()["rollout/reward_errors"] == 2.0


@pytest.mark.parametrize(("name", "reports"), [("raises", 1), ("raises_each", 8)])
def test_only_the_first_of_different_failures_are_kept_but_all_are_counted(
    graders: list[Grader], plugin: str, name: str, reports: int
) -> None:
    rewards(graders, RewardArgs(custom_rm_path=f"{plugin}:{name}"), samples(*["x"] * 50))
    assert len(graders[-1].error_reports) == reports
    assert graders[-1].metrics()["rollout/reward_errors"] == 50.0


def test_rewards_that_samples_bring_are_checked_too(graders: list[Grader]) -> None:
    grader = Grader(RewardArgs(rm_type="random"))
    graders.append(grader)
    given = samples("a", "b")
    given[0].reward, given[1].reward = float("inf"), 3
    grader.check(given)
    assert [s.reward for s in given] == [0.0, 3.0]
    assert grader.metrics()["rollout/reward_errors/nonfinite"] == 1.0


class Server:
    """A reward server that answers 503 ``failures`` times first."""

    def __init__(self, failures: int = 0, status: int = 503) -> None:
        self.failures, self.status = failures, status
        self.asked: list[dict[str, Any]] = []

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/rm"

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length:")[1].split("\r\n")[0])
        self.asked.append(json.loads(await reader.readexactly(length)))
        failed = len(self.asked) <= self.failures
        body = json.dumps({"score": len(self.asked[-1]["response"]) / 10, "by": "server"}).encode()
        status = f"{self.status} No" if failed else "200 OK"
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()


def remote(server: Server, given: list[Sample], **options: Any) -> Grader:
    async def scenario() -> Grader:
        async with server as url:
            args = RewardArgs(rm_type="remote_rm", rm_url=url, reward_key="score")
            grader = Grader(args, **options)
            await grader.grade(given)
            return grader

    return asyncio.run(scenario())


def test_remote_rm_posts_prompt_response_and_label(graders: list[Grader]) -> None:
    server, given = Server(), samples("abc", "abcd", prompt="how many?")
    graders.append(remote(server, given))
    assert [s.reward for s in given] == [{"score": 0.3, "by": "server"}, {"score": 0.4, "by": "server"}]
    assert {"prompt": "how many?", "response": "abc", "label": "42"} in server.asked


def test_remote_rm_tries_again(graders: list[Grader]) -> None:
    server, given = Server(failures=1), samples("abc")
    graders.append(remote(server, given))
    assert len(server.asked) == 2
    assert given[0].reward_value("score") == 0.3


def test_remote_rm_gives_up_with_a_reward_error(graders: list[Grader]) -> None:
    for server, trial, asked in ((Server(failures=9), True, 2), (Server(failures=9, status=404), False, 1)):
        given = samples("abc")
        graders.append(remote(server, given, trial=trial))
        assert len(server.asked) == asked
        assert given[0].reward == {"score": 0.0}
        assert f"{server.status}" in graders[-1].error_reports[0].failure.message


def test_check_reward_grades_the_right_answer_to_a_real_row(plugin: str) -> None:
    row = Sample(index=0, group_index=0, prompt="6*7?", label="42")
    assert check_reward(RewardArgs(rm_type="math"), row) == (1.0, "the right answer")
    assert check_reward(RewardArgs(rm_type="boxed_f1"), row).reward == 1.0
    assert check_reward(RewardArgs(rm_type="dapo", reward_key="score"), row).reward == {
        "score": 1.0,
        "acc": True,
        "pred": "42",
    }
    assert check_reward(RewardArgs(custom_rm_path=f"{plugin}:length"), row) == (2.0, "the bare label")
    assert check_reward(RewardArgs(custom_rm_path=f"{plugin}:group", group_rm=True), row, group_size=3).reward == 3.0
    unlabelled = Sample(index=0, group_index=0, prompt="6*7?")
    assert check_reward(RewardArgs(custom_rm_path=f"{plugin}:length"), unlabelled) == (0.0, "an empty response")
    assert row.reward is None
    assert row.response == ""


@pytest.mark.parametrize(
    ("args", "label", "message"),
    [
        (RewardArgs(rm_type="gsm8k"), "no idea", "gsm8k needs a number as label"),
        (RewardArgs(rm_type="math"), "so\n#### 42", "use --rm-type gsm8k"),
        (RewardArgs(rm_type="math"), None, "set --label-key"),
        (RewardArgs(rm_type="dapo", reward_key="score"), "x+1", "dapo needs integer labels"),
        (RewardArgs(rm_type="f1"), "the", "scores the right answer of the first row with 0.0, not 1: check"),
        (RewardArgs(), "42", "give --rm-type"),
    ],
)
def test_check_reward_finds_labels_that_cannot_work(args: RewardArgs, label: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_reward(args, Sample(index=0, group_index=0, label=label))


@pytest.mark.parametrize(("name", "says"), [("raises", "missing key"), ("leaves", "SystemExit|sys.exit")])
def test_check_reward_reports_a_custom_function_that_raises_in_one_message(
    plugin: str, name: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    args = RewardArgs(custom_rm_path=f"{plugin}:{name}", reward_error="drop")
    with pytest.raises(ValueError, match=rf"fails on the first row, so the run does not start .*: .*({says})") as told:
        check_reward(args, Sample(index=0, group_index=0, label="42"))
    assert str(told.value).count(f"in {name})") == 1, "where it failed"
    assert caplog.records == [], "no traceback beside it"


def test_check_reward_tries_a_whole_group(plugin: str) -> None:
    """One reward for a group of four would pass as the reward of a group of one."""
    args, row = RewardArgs(custom_rm_path=f"{plugin}:too_short", group_rm=True), Sample(index=0, group_index=0)
    with pytest.raises(
        ValueError, match="a reward function for 4 samples must return a list of 4 rewards, not 1 rewards"
    ):
        check_reward(args, row, group_size=4)


@pytest.mark.parametrize("name", ["raises", "raises_each"])
def test_a_traceback_begins_in_the_plugin(graders: list[Grader], plugin: str, name: str) -> None:
    rewards(graders, RewardArgs(custom_rm_path=f"{plugin}:{name}"), samples("a"))
    lines = graders[-1].error_reports[0].failure.traceback.splitlines()
    assert [line.split('"')[1] for line in lines if line.startswith("  File")] == [plugin]


def test_small_answers_are_decided_as_text(graders: list[Grader]) -> None:
    grader = Grader(RewardArgs(rm_type="math"), workers=1)
    graders.append(grader)
    given = [Sample(index=i, group_index=0, response="think " * 50 + f"\\boxed{{{i}}}", label="7") for i in range(256)]

    asyncio.run(grader.grade(given))
    assert sum(s.reward_value(None) for s in given) == 1
    assert grader._pool._workers[0]._process is None  # no worker was needed


def test_a_reward_error_is_a_message_for_the_user_across_processes() -> None:
    error = pickle.loads(pickle.dumps(RewardError("reward x of sample 1: broken")))
    assert type(error) is RewardError
    assert isinstance(error, ValueError)
    assert str(error) == "reward x of sample 1: broken"


@pytest.mark.parametrize(
    ("rm_type", "characters", "threads"), [("gsm8k", 100, 0), ("gsm8k", 30_000, 1), ("theirs", 100, 1)]
)
def test_a_rule_of_ours_gets_a_thread_only_for_much_text_and_a_users_always(
    rm_type: str, characters: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RULES, "theirs", Rule("theirs", lambda answer: float(answer.label in answer.response)))
    begun: list[Any] = []

    async def to_thread(work: Any) -> Any:
        begun.append(work)
        return work()

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    sample = Sample(response="#### 7".rjust(characters), label="7")
    grader = Grader(RewardArgs(rm_type=rm_type))
    asyncio.run(grader.grade([sample]))
    grader.close()
    assert (sample.reward, len(begun)) == (1.0, threads)
