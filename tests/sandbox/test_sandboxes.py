"""What uses the sandboxes: code answers, MCP servers, a run that is killed; and what a bad start says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slimelite.environments.protocol import Row
from slimelite.rewards.code import run_code
from slimelite.sandbox.boxes import placed
from slimelite.sandbox.registry import SandboxSettings, open_sandbox
from tests.environments.test_adapters import calls, episode
from tests.sandbox.sandboxes import ROOT, SANDBOXES_HERE, is_running

OWN = """
from slimelite.sandbox.registry import Launch
class Mine:
    def __init__(self, settings): self.settings = settings
    def check(self): return [f"{self.settings.memory_mb} MiB"]
    def launch(self, words, variables, endpoint): return Launch(["env", *words], dict(variables))
    @staticmethod
    def answers(folder, readable, disk_bytes): return ["env", f"SHOWN={folder}"]
class Without(Mine):
    answers = None
"""


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("print(sum(range(5)))", "10\n"),
        ("open('x', 'w').write('y'); print(open('x').read(), __import__('os').listdir())", "y ['x']\n"),
        ("print(__import__('numpy').eye(2).sum())", "2.0\n"),
        ("import os\nfor path in ('/etc/shadow', OUTSIDE):\n    print(os.path.exists(path))", "False\nFalse\n"),
        ("import os\ntry: os.fork()\nexcept PermissionError: print('no')", "no\n"),
        ("import socket\ntry: socket.socket()\nexcept PermissionError: print('no')", "no\n"),
        ("import os\nprint(len([n for n in os.listdir('/proc') if n.isdigit()]) < 4)", "True\n"),
    ],
)
@pytest.mark.bwrap
def test_code_answers_run_in_bubblewrap(code: str, printed: str, tmp_path: Path) -> None:
    code = f"OUTSIDE = {str(tmp_path)!r}\n{code}"
    assert run_code(code, None, "", seconds=20, memory_mb=1024, sandbox="bwrap").output == printed


@pytest.mark.bwrap
def test_links_of_the_system_lead_where_they_lead_outside() -> None:
    paths = [
        path for path in ("/bin", "/lib64", "/bin/sh", "/etc/os-release", "/etc/localtime") if os.path.exists(path)
    ]
    code = f"import os\nprint([os.path.realpath(path) for path in {paths}], os.path.exists('/etc/localtime'))"
    run = run_code(code, None, "", seconds=20, memory_mb=1024, sandbox="bwrap")
    shown = [os.path.realpath(path) for path in paths]
    assert run.output == f"{shown} {os.path.exists('/etc/localtime')}\n"


@pytest.mark.bwrap
def test_tests_of_code_answers_pass_and_fail_in_bubblewrap() -> None:
    for body, passes in (("return a + b", True), ("return a", False)):
        code = f"def add(a, b):\n    {body}\n"
        run = run_code(code, "assert add(1, 2) == 3", "", seconds=20, memory_mb=1024, sandbox="bwrap")
        assert run.finished is passes


@pytest.mark.parametrize("sandbox", SANDBOXES_HERE[:2])  # the image of the containers has no mcp
def test_an_mcp_server_runs_in_a_sandbox(sandbox: str) -> None:
    pytest.importorskip("mcp")
    server = ROOT / "tests" / "environments" / "tool_server.py"
    row = Row([{"role": "user", "content": "count"}])
    replies = [calls("add", '{"number": 2}'), calls("add", '{"number": 3}')]
    _, steps = episode(f"mcp:{sys.executable} {server}", row, replies, SandboxSettings(sandbox, "none"))
    assert [step.messages[0]["content"] for step in steps] == ["2", "5"]


@pytest.mark.parametrize("sandbox", SANDBOXES_HERE)
def test_what_a_program_started_ends_when_the_run_is_killed(sandbox: str) -> None:
    mark = f"4321.{os.getpid()}{len(sandbox)}"
    script = (
        "import subprocess\nfrom slimelite.sandbox.registry import open_sandbox\n"
        "from tests.sandbox.sandboxes import settings\n"
        f"words = ['sh', '-c', 'setsid sleep {mark} & setsid setsid sleep {mark} & echo started; wait']\n"
        f"launch = open_sandbox(settings({sandbox!r})).launch(words, {{}}, None)\n"
        "subprocess.run(launch.words, env=launch.environment)\n"
    )
    run = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=ROOT)
    assert run.stdout is not None
    assert run.stdout.readline() == b"started\n"
    assert is_running(mark)
    run.send_signal(signal.SIGKILL)
    run.wait()
    end = time.monotonic() + 120
    while is_running(mark):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_sandbox_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="--agent-sandbox bwarp: there is no such sandbox; did you mean bwrap"):
        open_sandbox(SandboxSettings("bwarp"))
    box = open_sandbox(SandboxSettings("process", read=("nosuch",)))
    assert box is not None
    with pytest.raises(ValueError, match="--agent-sandbox-read: there is no nosuch"):
        box.check()
    monkeypatch.setenv("PATH", str(tmp_path))
    box = open_sandbox(SandboxSettings("bwrap"))
    assert box is not None
    with pytest.raises(ValueError, match="apt-get install bubblewrap"):
        box.check()


def test_a_class_of_ones_own_is_a_sandbox(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    box = open_sandbox(SandboxSettings(f"{tmp_path / 'mine.py'}:Mine", memory_mb=7))
    assert box is not None
    assert box.check() == ["7 MiB"]
    assert box.launch(["true"], {"A": "b"}, None).words == ["env", "true"]
    # code of a model's runs in it if it says how, and else in process
    code = "import os\nprint(os.environ.get('SHOWN') == os.getcwd())"
    for name, shown in (("Mine", "True\n"), ("Without", "False\n")):
        run = run_code(code, None, "", seconds=20, memory_mb=1024, sandbox=f"{tmp_path / 'mine.py'}:{name}")
        assert run.output == shown


def test_a_command_reads_what_it_names_and_its_own_installation(tmp_path: Path) -> None:
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "pyvenv.cfg").write_text(f"home = {tmp_path}/base/bin\n")
    (tmp_path / "base" / "bin").mkdir(parents=True)
    python = tmp_path / "venv" / "bin" / "python"
    python.symlink_to("/bin/sh")
    (tmp_path / "agent.py").touch()
    words, readable = placed([str(python), str(tmp_path / "agent.py"), "-v", "/", "nosuch"])
    assert words == [str(python), str(tmp_path / "agent.py"), "-v", "/", "nosuch"]
    assert set(readable) == {str(tmp_path / name) for name in ("agent.py", "venv", "base", "venv/bin/python")}
    assert placed(["sh", "-c", "true"])[1] == []


def test_this_python_reads_the_packages_of_another_environment_that_it_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [str(tmp_path / name) for name in ("site-packages", "of_the_user")]
    monkeypatch.setattr(sys, "path", [*sys.path, *folders])
    assert [path for path in placed([sys.executable])[1] if path in folders] == folders[:1]
    assert folders[0] not in placed(["sh"])[1]
