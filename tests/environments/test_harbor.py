"""``harbor:<folder>`` with small tasks that the tests write; the episodes need bubblewrap or podman."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slimelite.contrib import harbor
from slimelite.environments.hosts import EnvironmentFailure
from slimelite.environments.protocol import Row
from slimelite.sandbox.registry import SandboxSettings
from tests.environments.test_adapters import episode, said

TOML = """
version = "1.0"
[metadata]
difficulty = "easy"
[verifier]
timeout_sec = 60.0
[verifier.env]
WANTED = "${NO_SUCH:-42}"
[environment]
memory = "512M"
[environment.env]
COLOUR = "blue"
"""
DOCKERFILE = "FROM ubuntu:24.04\nWORKDIR /app\nENV SIZE=3\nCOPY data /app/data\n# a comment\nCMD sleep infinity\n"
TEST = """#!/bin/sh
if [ "$(cat /app/answer.txt)" = "$WANTED" ]; then echo 1 > /logs/verifier/reward.txt; fi
[ -f /app/answer.txt ] || echo '{"reward": 0.0}' > /logs/verifier/reward.json
"""


# gives the shell of the box commands of its own: its answers are right ones from then on
CHEAT = r"""
P=$PPID; for p in 1 2 3 4 5 6 7 8 9; do for fd in 0 10; do
(printf 'head() { echo 1; }; cat() { echo 1; }; kill() { true; }\n' > /proc/$p/fd/$fd) 2>/dev/null; done; done
(trap '' TERM; while true; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; sleep 0.01; done) & echo
"""


def write_task(folder: Path, toml: str = TOML, dockerfile: str = DOCKERFILE, test: str = TEST) -> Path:
    for name, text in {
        "task.toml": toml,
        "instruction.md": "Write the number of data/number to answer.txt.\n",
        "environment/Dockerfile": dockerfile,
        "environment/data/number": "42\n",
        "tests/test.sh": test,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def bash(command: str) -> dict[str, Any]:
    function = {"name": "bash", "arguments": json.dumps({"command": command})}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


def row_of(folder: Path) -> Row:
    (row,) = harbor.rows(str(folder))
    return Row([{"role": "user", "content": row["input"]}], None, row["metadata"])


def test_a_task_is_read(tmp_path: Path) -> None:
    task = harbor.read_task(write_task(tmp_path / "one"))
    assert (task.name, task.memory_mb, task.workdir, task.test_seconds) == ("one", 512, "/app", 60.0)
    assert task.instruction == "Write the number of data/number to answer.txt."
    assert (task.variables, task.test_variables) == ({"SIZE": "3", "COLOUR": "blue"}, {"WANTED": "42"})
    assert [(here.name, there) for here, there in task.files] == [("number", "/app/data/number")]
    assert (task.plain, task.problem) == ("", "")


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ("[[steps]]\nname = 'a'", "it has several steps"),
        ("os = 'windows'", "it is for Windows"),
        ("gpus = 1", "it needs accelerators"),
        ("network_mode = 'allowlist'", "its network is limited to some hosts"),
        ("healthcheck = {command = 'true'}", "it waits for a health check"),
    ],
)
def test_what_is_not_supported_is_named(more: str, problem: str, tmp_path: Path) -> None:
    toml = f"{TOML}\n{more}" if more.startswith("[") else TOML.replace("[environment]", f"[environment]\n{more}")
    write_task(tmp_path / "one", toml)
    write_task(tmp_path / "two")
    remedy = rf"the task one cannot be run: {problem}; the other tasks can: harbor:{tmp_path}\?tasks=two$"
    with pytest.raises(ValueError, match=remedy):
        list(harbor.rows(str(tmp_path)))
    assert [row["metadata"] for row in harbor.rows(f"{tmp_path}?tasks=two")] == [{"task": "two"}]


def test_a_sandbox_that_cannot_run_a_task_is_named(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "one", dockerfile="FROM x\nRUN apt-get update && \\\n  apt-get install gcc\n")
    with pytest.raises(ValueError, match=r"its Dockerfile has RUN apt-get update && +apt-get install gcc$"):
        harbor.make(str(folder), SandboxSettings("bwrap"))
    for name in (None, "process"):
        with pytest.raises(ValueError, match="needs --agent-sandbox podman or docker, or bwrap for tasks"):
            harbor.make(str(folder), SandboxSettings(name))
    folder = write_task(tmp_path / "two", TOML.replace("512M", "8G"))
    with pytest.raises(ValueError, match="it needs --agent-memory-mb 8192"):
        harbor.make(str(folder), SandboxSettings("bwrap"))
    folder = write_task(tmp_path / "three", dockerfile="FROM x\nWORKDIR /usr/src\n")
    with pytest.raises(ValueError, match="it writes to the system folder /usr"):
        harbor.make(str(folder), SandboxSettings("bwrap"))
    for spec, problem in (
        (f"{tmp_path}/no", "no task.toml"),
        (f"{tmp_path}?tasks=no", "no task no"),
        ("x?y=1", "write"),
    ):
        with pytest.raises(ValueError, match=problem):
            list(harbor.rows(spec))


@pytest.mark.parametrize(
    ("line", "there"),
    [
        ("COPY data/number .", "/task/number"),
        ("COPY data/number /task", "/task/number"),
        ("COPY data/number ./", "/task/number"),
        ("COPY data/number n", "/task/n"),
        ("COPY data/number /x/.", "/x/number"),
        ("COPY data .", "/task/number"),
        ("COPY /data /x", "/x/number"),
    ],
)
def test_files_are_copied_to_where_docker_copies_them(line: str, there: str, tmp_path: Path) -> None:
    task = harbor.read_task(write_task(tmp_path / "one", dockerfile=f"FROM x\nWORKDIR /task\n{line}\n"))
    assert ([place for _, place in task.files], task.plain) == ([there], "")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("COPY *.txt .", r"\*.txt is not a file or folder of environment/"),
        ("COPY ../../secret .", r"\.\./\.\./secret is not a file or folder of environment/"),
        ("COPY link .", "link is not a file or folder of environment/"),
        ("COPY more .", "more/link is a link to a file outside of environment/"),
        ("ENV PLACE=$HOME/x", r"but the value of \$ is unknown"),
        ("ENV PATH=/app", "it sets PATH"),
        ("ENV LD_PRELOAD=/app/x.so", "it sets LD_PRELOAD"),
    ],
)
def test_what_a_box_without_the_image_cannot_have_is_refused(line: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    folder = write_task(tmp_path / "one", dockerfile=f"FROM x\n{line}\n")
    (folder / "environment/more").mkdir()
    for place in ("link", "more/link"):
        (folder / "environment" / place).symlink_to(tmp_path / "secret")
    sandboxes = [SandboxSettings("bwrap"), *([] if "sets" in problem else [SandboxSettings("podman", image="x")])]
    for sandbox in sandboxes:
        with pytest.raises(ValueError, match=f"the task one cannot be run: .*{problem}"):
            harbor.make(str(folder), sandbox)


def plays(folder: Path, settings: SandboxSettings) -> None:
    """The right commands get the reward, others do not, and nothing of an episode is seen in the next."""
    row, name = row_of(folder), f"harbor:{folder}"
    replies = [
        bash("pwd; echo $COLOUR $SIZE; cat data/number; ls answer.txt /tests/test.sh; exit 3"),
        bash("cp data/number /tmp/n; ln -s /tmp/n answer.txt; sleep 60 & echo started"),
        bash("head -c 300000 /dev/zero | tr '\\0' x"),
        said("It is done."),
    ]
    start, steps = episode(name, row, replies, settings)
    assert [tool["function"]["name"] for tool in start.tools] == ["bash"]
    texts = [step.messages[0]["content"] for step in steps[:-1]]
    assert texts[0].startswith("/app\nblue 3\n42\n")
    assert "answer.txt" in texts[0]
    assert texts[0].endswith("(exit status 3)"), "and there are no tests to read"
    assert texts[1] == "started"
    assert set(texts[2]) == {"x"}
    assert len(texts[2]) == 20_000
    assert [(step.reward, step.done) for step in steps] == [(0.0, False)] * 3 + [(1.0, True)]
    _, steps = episode(name, row, [said("I do not know.")], settings)
    assert [(step.reward, step.done) for step in steps] == [(0.0, True)]
    _, steps = episode(name, row, [bash("echo 41 > answer.txt"), said("It is 41.")], settings)
    assert (steps[-1].reward, steps[-1].metrics["tests_without_reward"]) == (0.0, 1.0)
    _, steps = episode(name, row, [bash(CHEAT), said("")], settings)
    assert steps[-1].reward == 0.0, "what the model left does not answer in the place of the tests"


@pytest.mark.bwrap
def test_a_task_is_played_in_bubblewrap(tmp_path: Path) -> None:
    plays(write_task(tmp_path / "one"), SandboxSettings("bwrap", memory_mb=1024))


@pytest.mark.bwrap
def test_a_command_that_hangs_is_ended(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "one")
    replies = [bash("sleep 600; echo late")]
    _, (step,) = episode(f"harbor:{folder}?command_seconds=1", row_of(folder), replies, SandboxSettings("bwrap"))
    assert step.messages[0]["content"].endswith("(exit status 137, it took too long)")
    assert "late" not in step.messages[0]["content"]


@pytest.mark.bwrap
def test_a_process_that_the_model_left_cannot_write_the_reward(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "one", test="sleep 1; [ -f /app/no ] || echo 0.25 > /logs/verifier/reward.txt\n")
    cheat = "(while true; do echo 1 > /logs/verifier/reward.txt; sleep 0.01; done) & echo"
    _, steps = episode(f"harbor:{folder}", row_of(folder), [bash(cheat), said("")], SandboxSettings("bwrap"))
    assert steps[-1].reward == 0.25


@pytest.mark.bwrap
def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "one", dockerfile="FROM x\nCOPY data/number /app/a\nCOPY data /app/a\n")
    with pytest.raises(EnvironmentFailure, match="the container cannot write /app/a/number"):
        episode(f"harbor:{folder}", row_of(folder), [said("")], SandboxSettings("bwrap"))


@pytest.mark.bwrap
def test_files_in_the_place_of_outputs_hang_nothing(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "one")
    replies = [bash("mkfifo /tmp/.output; cp data/number answer.txt"), bash("echo on"), said("")]
    _, steps = episode(f"harbor:{folder}", row_of(folder), replies, SandboxSettings("bwrap"))
    assert (steps[1].messages[0]["content"], steps[2].reward) == ("on", 1.0)
