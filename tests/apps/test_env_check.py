"""`slimelite env check`: planted faults are seen, sound environments raise no alarm, hangs and crashes are contained.

The whole table takes minutes: ``python -m pytest -q -m slow tests/apps/test_env_check.py``.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from slimelite.apps import env
from slimelite.apps.command import main
from slimelite.apps.env import classes_of
from slimelite.apps.env_checks import CHECKS, Observed, judge
from slimelite.environments import probe
from slimelite.environments.probe import Plan, Player
from tests.engines.tiny_models import VOCAB, build_model

FILE = Path(__file__).parent / "planted" / "faulty_environments.py"
# class -> the checks that find its fault
PLANTED = {
    node.name: (ast.get_docstring(node) or "").split(", ")
    for node in ast.parse(FILE.read_text()).body
    if isinstance(node, ast.ClassDef) and node.name != "Sound"
}
# tasks of reasoning-gym that cannot be used: docs/agents.md
UNUSABLE = {
    "composite",
    "graph_color",
    "rubiks_cube",
    "boxnet",
    "rush_hour",
    "propositional_logic",
    "list_functions",
} | {"polynomial_multiplication"}
# tasks whose reward has a fault of its own: any reply is right; nan is right
FAULTY = {"game_of_life_halting", "complex_arithmetic"}
FASTEST = [
    *("StepIsADict", "NumberAsContent", "FlatTools", "HidesTheQuestion", "ListOfTheClass", "ChangesTheRow"),
    *("TurnedAround", "LabelInReply", "ToolEvaluates", "AnswerInATool", "MisspeltRole", "OneAnswerForTwoCalls"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    sums = [(3 * i + 1, 5 * i + 2) for i in range(12)]
    file.write_text("\n".join(json.dumps({"input": f"{a}+{b}=?", "label": str(a + b)}) for a, b in sums))
    return file


def checked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[dict[str, Any]]]:
    status = main(["env", "check", *words, "--json"])
    return status, json.loads(capsys.readouterr().out)


def observed_here(environment: str, data: Path | None, tmp_path: Path, rows: int = 4) -> Observed:
    """What the probe shows, without a process of its own."""
    observed = Observed()

    def note(event: dict[str, Any]) -> None:
        if event["event"] == "episode":
            observed.episodes.append(event)
        elif event["event"] == "ready":
            observed.labels = event["labels"]
        elif event["event"] == "end":
            observed.end = event

    columns = {"path": str(data), "input": "input", "label": "label", "meta": "metadata"}
    plan = Plan(
        environment, None if data is None else columns, rows, 4, 5.0, 60.0, str(tmp_path / "canary"), whole=True
    )
    asyncio.run(Player(plan, note).play())
    return observed


@pytest.mark.parametrize("name", FASTEST)
def test_a_planted_fault_is_found(name: str, data: Path, tmp_path: Path) -> None:
    one = observed_here(f"{FILE}:{name}", data, tmp_path)
    findings = judge(one, Observed())
    assert {finding.check for finding in findings} & {*PLANTED[name]}, findings
    if PLANTED[name] == ["runs"]:
        (finding,) = findings
        assert f"({FILE}, line " in finding.says, "it names the user's own line"
        assert "--custom-generate" not in finding.says


def test_a_sound_environment_raises_no_alarm(data: Path, tmp_path: Path) -> None:
    assert judge(observed_here(f"{FILE}:Sound", data, tmp_path), Observed()) == []
    assert judge(observed_here("nim", None, tmp_path), Observed()) == []


@pytest.mark.parametrize("first", [True, False])
def test_a_call_without_an_answer_is_one_fault_whichever_process_made_it(
    data: Path, tmp_path: Path, first: bool
) -> None:
    """The process ends there, so its episodes are fewer, and its last one is another than that of the other process."""
    whole = observed_here(f"{FILE}:Sound", data, tmp_path)
    (cut := Observed(labels=whole.labels)).episodes.append(
        {**whole.episodes[0], "failure": ["timeout", "step took longer than 5 s"], "turns": [], "digest": "another"}
    )
    (finding,) = judge(*((cut, whole) if first else (whole, cut)))
    assert finding.check == "in time"
    assert finding.says == "after nonsense: step took longer than 5 s; its process played no more episodes"
    (finding,) = judge(cut, Observed(hung="nonsense")) if first else judge(Observed(hung="nonsense"), cut)
    assert finding.says.startswith("after nonsense: "), "one fault, although each process has met it in another way"


BLOCKING = """
import time
from slimelite.environments.protocol import Start, Step

class Blocking:
    async def reset(self, row):
        time.sleep(0.3)
        return Start([{"role": "user", "content": "?"}])

    def step(self, reply):
        return Step(reward=0.0, done=True)
"""


def test_a_busy_machine_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time in which the event loop is held counts, and time for which it waits for a processor does not."""
    (tmp_path / "blocking.py").write_text(BLOCKING)

    def longest() -> float:
        episodes = list[dict[str, Any]]()
        plan = Plan(f"{tmp_path}/blocking.py:Blocking", None, 1, 4, 60.0, 60.0, str(tmp_path / "canary"), whole=False)
        asyncio.run(Player(plan, lambda event: episodes.append(event) if event["event"] == "episode" else None).play())
        return max(lag for episode in episodes for lag in episode["lags"])

    assert longest() > 0.15
    monkeypatch.setattr(probe, "waited", time.monotonic)  # as if all of it was spent waiting
    assert longest() <= 0


@pytest.mark.parametrize("starved", [False, True])
def test_a_probe_that_waits_for_a_processor_does_not_hang(monkeypatch: pytest.MonkeyPatch, starved: bool) -> None:
    monkeypatch.setattr(env, "waited", lambda _: time.monotonic() if starved else 0.0)
    slow = "import json, time; time.sleep(1.5); print(json.dumps({'event': 'end'}))"
    words = [sys.executable, "-c", f'print(\'{{"event": "begin", "name": "one"}}\', flush=True); {slow}']
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        env._observe(process, 0.3, observed := Observed())
    assert observed.hung == (None if starved else "one")


def test_processes_contain_hangs_and_crashes(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"{FILE}:{name}" for name in ("EndlessPattern", "Crashes")]
    status, reports = checked(
        capsys, *words, "--prompt-data", str(data), "--call-timeout", "5", "--rows", "4", "--seconds", "600"
    )
    assert status == 1
    (hangs,), (crash,) = (report["faults"] for report in reports)
    assert (hangs["check"], crash["check"]) == ("in time", "runs")
    assert "during a very long reply" in hangs["says"]
    assert "SIGSEGV" in crash["says"]


def test_a_report_for_people_and_the_exit_status(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "check", f"{FILE}:OrderOfASet", "--prompt-data", str(data), "--rows", "2"]) == 1
    text = capsys.readouterr().out
    assert f"  FAULT  {'same seed':<15}row 0 after nonsense gives another episode in a second process" in text
    assert f"  ok     {'golden answer':<15}{CHECKS['golden answer'][0]}" in text
    assert text.endswith("  1 fault\n")
    assert main(["env", "check", "calculater"]) == 2
    assert "cannot be checked: --environment calculater: there is no such environment; did" in capsys.readouterr().out


def test_a_file_means_its_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [name.rpartition(":")[2] for name in classes_of(str(FILE))] == ["Sound", *PLANTED]
    (tmp_path / "a.py").write_text("class Row:\n    pass\n")
    assert main(["env", "check", str(tmp_path / "a.py")]) == 1
    assert "has no class with the methods reset and step" in capsys.readouterr().err
    assert main(["env", "check", "nim", "--rows", "0"]) == 1, "nothing played is not sound"
    assert "--rows, --max-turns" in capsys.readouterr().err
    (tmp_path / "a.py").write_text("class A:\n  def reset(self:\n")
    assert main(["env", "check", str(tmp_path / "a.py")]) == 1
    assert "a.py, line 2: " in capsys.readouterr().err


SHARE_OF_EVEN = """
from slimelite.environments.protocol import Start, Step

class Even:
    def reset(self, row):
        self.turn = 0
        return Start([{"role": "user", "content": f"{row.seed % 64}"}])

    def step(self, reply):
        words = reply["content"].split()
        self.turn += 1
        share = sum(int(word) % 2 == 0 for word in words if word.isdigit()) / max(len(words), 1)
        return Step([{"role": "user", "content": "9"}], share, done=self.turn == 2)
"""


def test_a_model_plays_groups_of_episodes(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build_model(tmp_path / "model")
    words = Tokenizer(WordLevel({str(token): token for token in range(VOCAB)}, unk_token="0"))
    words.pre_tokenizer = WhitespaceSplit()
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    fast = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1", chat_template=template)
    fast.save_pretrained(tmp_path / "model")
    (tmp_path / "even.py").write_text(SHARE_OF_EVEN)
    limits = ["--rows", "2", "--seconds", "0.1", "--max-turns", "3", "--groups", "3", "--samples", "4"]
    named = [str(tmp_path / "even.py"), "--prompt-data", str(data), "--hf-checkpoint", str(tmp_path / "model"), *limits]
    main(["env", "check", *named, "--", "--device", "cpu", "--rollout-max-response-len", "6"])
    text = capsys.readouterr().out
    shown = re.search(r"played 12 episodes of 3 groups: reward (\S+), spread in a group (\S+); (\d+)% of the", text)
    assert shown is not None, text
    assert 0 < float(shown[1]) <= 2
    assert float(shown[2]) > 0
    assert int(shown[3]) > 50
    assert "tokens, which fit --rollout-max-context-len 128\n" in text


@pytest.mark.slow
def test_of_all_planted_faults_nearly_all_are_found(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, reports = checked(capsys, str(FILE), "--prompt-data", str(data), "--call-timeout", "1", "--seconds", "20")
    missed = [
        name
        for name, report in zip(["Sound", *PLANTED], reports, strict=True)
        if name in PLANTED and not {fault["check"] for fault in report["faults"]} & {*PLANTED[name]}
    ]
    assert reports[0]["faults"] == []
    assert len(PLANTED) >= 40
    assert len(missed) <= 2, missed


@pytest.mark.slow
def test_healthy_environments_raise_few_alarms(tmp_path: Path) -> None:
    """In this process: to import reasoning-gym for each of its sets would take longer than the episodes."""
    pytest.importorskip("reasoning_gym")
    from reasoning_gym.factory import DATASETS

    names = [f"reasoning-gym:{name}?size=12" for name in sorted({*DATASETS} - UNUSABLE - FAULTY)]
    names += ["calculator", "nim", "nim:random", "nim:perfect"]
    alarms = {name: found for name in names if (found := judge(observed_here(name, None, tmp_path, 12), Observed()))}
    assert len(names) >= 100
    assert len(alarms) <= 2 * len(names) / 100, alarms
