"""The contract of --custom-rm-path."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slimelite.arguments import Args
from slimelite.rewards.grader import Grader
from slimelite.samples.sample import Sample, Status

from .conftest import Given

RESPONSES = {
    "empty": "",
    "long": "word " * 20_000,
    "not english": "答案是 \u202e42\x00 😀",
    "broken markup": "<think>\\boxed{{{ ```python\nimport os",
}
MakeSample = Callable[..., Sample]


@pytest.fixture(scope="module")
def args(given: Given) -> Args:
    return Args(
        custom_rm_path=given("--custom-rm-path"),
        reward_key=given("--reward-key"),
        group_rm=bool(given("--group-rm")),
        reward_error="fail",
    )


@pytest.fixture
def grader(args: Args) -> Iterator[Grader]:
    grader = Grader(args)
    yield grader
    grader.close()


@pytest.fixture(scope="module")
def sample(given: Given) -> MakeSample:
    """A sample with the response of this name, ``ordinary`` unless told."""
    responses = RESPONSES | {"ordinary": given("--rm-response")}

    def make(kind: str = "ordinary", index: int = 0) -> Sample:
        made = Sample(
            group_index=0,
            index=index,
            prompt="What is 6 * 7?",
            tokens=[5, 6, 7],
            label=given("--rm-label"),
            metadata=json.loads(given("--rm-metadata")),
            status=Status.COMPLETED,
        )
        made.append_response_tokens([8, 9], [-0.5, -0.25], text=responses[kind])
        return made

    return make


def value(grader: Grader, graded: Sample) -> float:
    return graded.reward_value(grader.args.reward_key)


@pytest.mark.parametrize("kind", ["ordinary", *sorted(RESPONSES)])
def test_every_response_gets_a_finite_number_in_time(grader: Grader, sample: MakeSample, kind: str) -> None:
    graded = sample(kind)
    asyncio.run(grader.grade([graded]))
    assert math.isfinite(value(grader, graded))


def test_truncated_and_aborted_samples_get_one_too(grader: Grader, sample: MakeSample) -> None:
    for status in (Status.TRUNCATED, Status.ABORTED):
        graded = sample()
        graded.status = status
        asyncio.run(grader.grade([graded]))
        assert math.isfinite(value(grader, graded))


def test_a_group_gets_a_reward_for_each_sample(grader: Grader, sample: MakeSample) -> None:
    group = [sample(kind, index) for index, kind in enumerate(["ordinary", *RESPONSES])]
    asyncio.run(grader.grade(group))
    assert all(math.isfinite(value(grader, s)) for s in group)


def test_the_sample_is_left_as_it_was(grader: Grader, sample: MakeSample) -> None:
    """Metadata may be added to (it ends up in the sample table); tokens and the text are the engine's."""
    graded = sample()
    before = copy.deepcopy(graded.to_dict())
    asyncio.run(grader.grade([graded]))
    changed = {name for name, old in before.items() if getattr(graded, name) != old}
    assert changed <= {"reward", "metadata"}
    assert {key: graded.metadata.get(key) for key in before["metadata"]} == before["metadata"]


def test_many_at_once(grader: Grader, sample: MakeSample) -> None:
    """Groups finish at the same time, in a rollout: calls overlap."""
    groups = [[sample("ordinary", 4 * g + i) for i in range(4)] for g in range(8)]

    async def grade_all() -> None:
        await asyncio.gather(*(grader.grade(group) for group in groups))

    asyncio.run(grade_all())
    assert all(math.isfinite(value(grader, s)) for group in groups for s in group)


def test_the_next_rollout_can_score_too(grader: Grader, sample: MakeSample) -> None:
    """What the function keeps between calls (a session, a cache) works in later calls, from other event loops."""
    for _ in range(3):
        graded = sample()
        asyncio.run(grader.grade([graded]))
        assert math.isfinite(value(grader, graded))


def test_rewards_come_back_whatever_thread_asks(grader: Grader, sample: MakeSample) -> None:
    """The rollout runs on a thread of its own: signal handlers and the like do not work there."""
    graded, errors = sample(), list[BaseException]()

    def rollout() -> None:
        try:
            asyncio.run(grader.grade([graded]))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=rollout)
    thread.start()
    thread.join()
    assert errors == []
    assert math.isfinite(value(grader, graded))


BROKEN: dict[str, Any] = {
    "no_parameters": "async def score(): return 1.0",
    "gives_nothing": "async def score(args, sample): sample.reward = 1.0",
    "gives_text": "async def score(args, sample): return 'good'",
    "fails_on_empty": "def score(args, sample): return 1 / len(sample.response)",
}


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_the_contract_finds_functions_that_break_it(sample: MakeSample, name: str, tmp_path: Path) -> None:
    file = tmp_path / f"{name}.py"
    file.write_text(BROKEN[name])
    grader = Grader(Args(custom_rm_path=f"{file}:score", reward_error="fail"))
    with pytest.raises(Exception, match=f"{name}.py:score of sample 0"):
        test_every_response_gets_a_finite_number_in_time(grader, sample, "empty")
    grader.close()
