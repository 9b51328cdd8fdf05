"""Programs as agents (--agent-command): rewards, failures that are counted, and nothing left running."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import threading
import time
from asyncio.base_subprocess import BaseSubprocessTransport
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slimelite.arguments.evaluation import EvalDataset
from slimelite.arguments.rollout import PROGRAM
from slimelite.engines.protocol import GenerateRequest, GenerateResult
from slimelite.environments import program
from slimelite.preflight.agents import check_program
from slimelite.rollout.manager import RolloutManager
from slimelite.samples.sample import Sample
from tests.rollout.conftest import PLUGINS, MakeArgs, MakeManager
from tests.rollout.plugins import rewards
from tests.rollout.scripted import ScriptedEngine

Make = Callable[..., RolloutManager]


@pytest.fixture
def make(make_args: MakeArgs, make_manager: MakeManager, tmp_path: Path) -> Make:
    """A manager whose programs end in these ways, one after the other."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"messages": "1+1=?", "label": "2", "metadata": {"number": n}}) + "\n" for n in range(9))
    )

    def make(*ways: str, engine: ScriptedEngine | None = None, **given: Any) -> RolloutManager:
        command = f"{sys.executable} {PLUGINS / 'program.py'} {tmp_path} {','.join(ways)}"
        values: dict[str, Any] = {
            "prompt_data": [str(rows)],
            "apply_chat_template": False,
            "agent_command": command,
            "custom_generate_function_path": PROGRAM,
            "rollout_batch_size": len(ways),
            "n_samples_per_prompt": 1,
            "run_dir": str(tmp_path / "run"),
        }
        return make_manager(make_args(**values | given), [engine or ScriptedEngine()])

    return make


def is_running(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ended(tmp_path: Path) -> bool:
    pids = (tmp_path / "pids").read_text().split()
    for _ in range(2400):
        if not any(is_running(int(pid)) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def test_programs_make_samples_and_failures_are_counted(make: Make, tmp_path: Path) -> None:
    ways = ["reward", "grade", "fail", "silent", "strange", "loud", "child", "deep", "huge"]
    output = make(*ways, agent_timeout=600.0).generate(0)
    samples: list[Sample] = [sample for group in output.table.to_samples() for sample in group]
    found = {ways[sample.metadata["number"]]: sample for sample in samples}
    # the program's own reward, the run's where it gives none, and 0 for a failure
    assert {way: sample.reward for way, sample in found.items()} == {
        "reward": 0.5,
        "loud": 0.5,
        "child": 0.5,
        "deep": 0.5,
        "huge": 0.0,
        "fail": 0.0,
        "silent": 0.0,
        "strange": 0.0,
        "grade": asyncio.run(rewards.parity(None, found["grade"])),
    }
    errors = {way: s.metadata["reward_error"] for way, s in found.items() if "reward_error" in s.metadata}
    assert "exit status 1: no idea" in errors.pop("fail")
    assert "never called the model" in errors.pop("silent")
    assert "not a finite number: 'much'" in errors.pop("strange")
    assert "not a finite number: 1000" in errors.pop("huge")
    assert errors == {}
    assert found["silent"].remove_sample
    assert ended(tmp_path)  # the child with its program
    for way in ("reward", "grade", "loud", "child"):
        assert str(found[way].status) == "completed"
        assert int(np.sum(found[way].loss_mask)) == 10  # two replies of five tokens
    metrics = {name.rpartition("/")[2]: v for name, v in output.metrics.items() if "/environment/" in name}
    assert (metrics["turns"], metrics["errors"], metrics["timeouts"]) == (pytest.approx(16 / 9), 4, 0)
    assert metrics["silent_programs"] == pytest.approx(1 / 9)
    facts = found["reward"].metadata["episode"]
    assert [(turn["tokens"], turn["parent"]) for turn in facts["timeline"]] == [(5, None), (5, 0)]
    assert '"reward": 0.5' in facts["log"]["stdout"]
    assert len(found["loud"].metadata["episode"]["log"]["stdout"]) <= program.LOGGED
    log = (tmp_path / "run" / "agents" / "programs.log").read_text()
    assert "2 replies, reward 0.5" in log
    assert "--- stderr\nno idea" in log
    assert len(log) < 20_000  # the end of what the loud one said


@pytest.mark.parametrize("limit", [3, 12])
def test_a_program_that_asks_for_long_replies_gets_the_length_of_the_run(make: Make, limit: int) -> None:
    """Claude Code always asks for 64,000 tokens or so."""
    engine = ScriptedEngine()
    make("long", engine=engine, rollout_max_response_len=limit).generate(0)
    asked = [request.params.max_new_tokens for call in engine.calls for request in call]
    assert asked == [limit, limit]


def test_programs_in_a_sandbox_reach_their_model_and_nothing_of_the_run(make: Make, tmp_path: Path) -> None:
    """The child cannot write its id outside; the program has what stdin and its address give."""
    given = {"agent_timeout": 600.0, "agent_sandbox": "process", "agent_sandbox_read": [os.path.relpath(PLUGINS)]}
    output = make("reward", "fail", "child", **given).generate(0)
    samples: list[Sample] = [sample for group in output.table.to_samples() for sample in group]
    found = {sample.metadata["number"]: sample for sample in samples}
    assert (found[0].reward, int(np.sum(found[0].loss_mask))) == (0.5, 10)
    assert "exit status 1: no idea" in found[1].metadata["reward_error"]
    assert "Permission denied" in found[2].metadata["reward_error"]


@pytest.mark.chaos(
    "an agent's program hangs",
    "after `--agent-timeout`, the run ends it and every process that it started; its sample is an error",
)
def test_a_program_that_hangs_is_ended_with_what_it_started(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "GRACE_SECONDS", 0.2)
    for seconds in (3.0, 30.0, 300.0):  # a busy machine may end it before it has started its child
        with pytest.raises(ValueError, match="took longer than"):  # the only sample of the rollout failed
            make("hang", agent_timeout=seconds).generate(0)
        if (tmp_path / "pids").exists():
            break
    assert ended(tmp_path)


def test_the_end_of_a_run_ends_its_programs(make: Make, tmp_path: Path) -> None:
    manager = make("hang")
    found: list[BaseException] = []

    def generate() -> None:
        try:
            manager.generate(0)
        except BaseException as error:
            found.append(error)

    rollout = threading.Thread(target=generate, daemon=True)
    rollout.start()
    while not (tmp_path / "pids").exists():
        time.sleep(0.05)
    manager.cancel()
    rollout.join()
    assert [type(error).__name__ for error in found] == ["CancelledError"]
    assert ended(tmp_path)


def test_a_run_that_fails_waits_for_the_ends_of_its_programs(make: Make) -> None:
    """A loop that closes before says so for each of them, and the garbage collector with a traceback."""
    manager = make("late", *["hang"] * 7, agent_timeout=600.0, rm_type=None, custom_rm_path=None)
    with pytest.raises(ValueError, match="has no reward: give --rm-type"):
        manager.generate(0)
    manager.cancel()  # the first thing that the end of a run does
    transports = [t for t in gc.get_objects() if isinstance(t, BaseSubprocessTransport) and t.get_pid()]
    assert [t for t in transports if not t.is_closing()] == []


class Ordered(ScriptedEngine):
    """Holds the second turn of sample 1 under version 0, and answers that of sample 0 when it does; holds all later
    samples, so that none of them is done before sample 1 goes on.
    """

    def __init__(self) -> None:
        super().__init__(holds=self._holds)

    def _holds(self, request: GenerateRequest) -> bool:
        if "train-1/1/" in request.request_id:
            return self.version == 0
        return "train-0/" not in request.request_id and "train-1/" not in request.request_id

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        while "train-0/1/" in requests[0].request_id and not any("train-1/1/" in r.request_id for r in self.requests):
            await asyncio.sleep(0.01)
        return await super().generate(requests)


def test_a_program_waits_for_the_next_rollout_and_goes_on_under_new_weights(make: Make) -> None:
    engine = Ordered()
    sizes = {"rollout_batch_size": 1, "over_sampling_batch_size": 2, "partial_rollout": True}
    manager = make("reward", engine=engine, **sizes)
    first = manager.generate(0)
    assert first.table.group_id.tolist() == [0]
    assert first.metrics["rollout/unfinished_groups"] == 1
    asyncio.run(engine.begin_weight_update(1))
    second = manager.generate(1)
    assert second.table.group_id.tolist() == [1]
    assert second.metrics["rollout/resumed_groups"] == 1
    (sample,) = second.table.to_samples()[0]
    versions = np.asarray(sample.weight_versions)[np.asarray(sample.loss_mask, bool)]
    assert versions.tolist() == [0] * 8 + [1, 1]  # five tokens, then three of five before the update
    assert sample.reward == 0.5


def test_evaluations_run_the_programs_too(make: Make, tmp_path: Path) -> None:
    dataset = EvalDataset(
        "held/out",
        str(tmp_path / "rows.jsonl@[:3]"),
        input_key="messages",
        label_key="label",
        n_samples_per_eval_prompt=2,
        custom_generate_function_path=PROGRAM,
        max_response_len=12,
    )
    metrics = make("reward", eval_datasets=[dataset]).evaluate(0).metrics
    assert metrics["eval/held/out"] == 0.5
    assert metrics["eval/held/out/environment/turns"] == 2


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("nosuchprogram --x", "no program 'nosuchprogram'"),
        ("python nosuch.py", "no file nosuch.py"),
        ("'", "into words"),
    ],
)
def test_a_program_that_is_not_there_is_named(command: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_program(command)
    check_program(f"{sys.executable} {os.fspath(PLUGINS / 'program.py')}")
    check_program("no-such-program agent.py", in_image=True)
