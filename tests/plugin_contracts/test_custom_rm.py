"""The contract of --custom-rm-path. Point it at your own function::

    CUSTOM_RM_PATH=my_rewards.py:score pytest tests/plugin_contracts/test_custom_rm.py

Settings, all from the environment: ``CUSTOM_RM_REWARD_KEY`` is your --reward-key, ``CUSTOM_RM_GROUP=1`` your
--group-rm, ``CUSTOM_RM_LABEL`` a label of your data, ``CUSTOM_RM_METADATA`` a row's metadata as JSON,
``CUSTOM_RM_RESPONSE`` a response that deserves a high reward. Without CUSTOM_RM_PATH an example is tested.
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slimelite.arguments import Args
from slimelite.rewards import Grader
from slimelite.sample import Sample, Status

EXAMPLE = '''
async def score(args, sample, **kwargs):
    """1 if the label is in the response; a whole group at once under --group-rm."""
    if isinstance(sample, list):
        return [await score(args, one) for one in sample]
    return float(str(sample.label) in sample.response)
'''
RESPONSES = {
    "ordinary": os.environ.get("CUSTOM_RM_RESPONSE", "I think that the answer is 42."),
    "empty": "",
    "long": "word " * 20_000,
    "not english": "答案是 \u202e42\x00 😀",
    "broken markup": "<think>\\boxed{{{ ```python\nimport os",
}


@pytest.fixture(scope="module")
def args(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Args:
    path = request.config.getoption("--custom-rm-path", default=None) or os.environ.get("CUSTOM_RM_PATH")
    if path is None:
        file = tmp_path_factory.mktemp("plugin") / "example_reward.py"
        file.write_text(EXAMPLE)
        path = f"{file}:score"
    return Args(
        custom_rm_path=path,
        reward_key=os.environ.get("CUSTOM_RM_REWARD_KEY"),
        group_rm=os.environ.get("CUSTOM_RM_GROUP") == "1",
        reward_error="fail",
    )


@pytest.fixture
def grader(args: Args) -> Iterator[Grader]:
    grader = Grader(args)
    yield grader
    grader.close()


def sample(response: str, index: int = 0) -> Sample:
    made = Sample(
        group_index=0,
        index=index,
        prompt="What is 6 * 7?",
        tokens=[5, 6, 7],
        label=os.environ.get("CUSTOM_RM_LABEL", "42"),
        metadata=json.loads(os.environ.get("CUSTOM_RM_METADATA", "{}")),
        status=Status.COMPLETED,
    )
    made.append_response_tokens([8, 9], [-0.5, -0.25], text=response)
    return made


def value(grader: Grader, graded: Sample) -> float:
    return graded.reward_value(grader.args.reward_key)


@pytest.mark.parametrize("kind", sorted(RESPONSES))
def test_every_response_gets_a_finite_number_in_time(grader: Grader, kind: str) -> None:
    graded = sample(RESPONSES[kind])
    asyncio.run(grader.grade([graded]))
    assert math.isfinite(value(grader, graded))


def test_truncated_and_aborted_samples_get_one_too(grader: Grader) -> None:
    for status in (Status.TRUNCATED, Status.ABORTED):
        graded = sample(RESPONSES["ordinary"])
        graded.status = status
        asyncio.run(grader.grade([graded]))
        assert math.isfinite(value(grader, graded))


def test_a_group_gets_a_reward_for_each_sample(grader: Grader) -> None:
    group = [sample(response, index) for index, response in enumerate(RESPONSES.values())]
    asyncio.run(grader.grade(group))
    assert all(math.isfinite(value(grader, s)) for s in group)


def test_the_sample_is_left_as_it_was(grader: Grader) -> None:
    """Metadata may be added to (it ends up in the sample table); tokens and the text are the engine's."""
    graded = sample(RESPONSES["ordinary"])
    before = copy.deepcopy(graded.to_dict())
    asyncio.run(grader.grade([graded]))
    changed = {name for name, old in before.items() if getattr(graded, name) != old}
    assert changed <= {"reward", "metadata"}
    assert {key: graded.metadata.get(key) for key in before["metadata"]} == before["metadata"]


def test_many_at_once(grader: Grader) -> None:
    """Groups finish at the same time, in a rollout: calls overlap."""
    groups = [[sample(RESPONSES["ordinary"], 4 * g + i) for i in range(4)] for g in range(8)]

    async def grade_all() -> None:
        await asyncio.gather(*(grader.grade(group) for group in groups))

    asyncio.run(grade_all())
    assert all(math.isfinite(value(grader, s)) for group in groups for s in group)


def test_the_next_rollout_can_score_too(grader: Grader) -> None:
    """What the function keeps between calls (a session, a cache) works in later calls, from other event loops."""
    for _ in range(3):
        graded = sample(RESPONSES["ordinary"])
        asyncio.run(grader.grade([graded]))
        assert math.isfinite(value(grader, graded))


def test_rewards_come_back_whatever_thread_asks(grader: Grader) -> None:
    """The rollout runs on a thread of its own: signal handlers and the like do not work there."""
    graded, errors = sample(RESPONSES["ordinary"]), list[BaseException]()

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
def test_the_contract_finds_functions_that_break_it(name: str, tmp_path: Path) -> None:
    file = tmp_path / f"{name}.py"
    file.write_text(BROKEN[name])
    grader = Grader(Args(custom_rm_path=f"{file}:score", reward_error="fail"))
    with pytest.raises(Exception, match=f"{name}.py:score of sample 0"):
        test_every_response_gets_a_finite_number_in_time(grader, "empty")
    grader.close()
