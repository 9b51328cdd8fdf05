"""The command line of a container, and what a bad start of one says; the tests marked podman run real ones."""

from __future__ import annotations

import marshal
import os
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from slimelite.contrib import harbor
from slimelite.environments.hosts import load
from slimelite.sandbox import containers
from slimelite.sandbox.container_supervisor import VARIABLE
from slimelite.sandbox.registry import Launch, SandboxSettings, cautions, open_sandbox
from slimelite.sandbox.supervisor import NO_START
from tests.environments.test_adapters import episode, said
from tests.environments.test_harbor import TOML, bash, plays, row_of, write_task
from tests.sandbox.sandboxes import IMAGE, settings


def words_of(launch: Launch) -> list[str]:
    words: list[str] = marshal.loads(bytes.fromhex(launch.environment[VARIABLE]))["words"]
    return words


def launched(engine: str, words: list[str], **settings: object) -> Launch:
    box = open_sandbox(SandboxSettings(engine, image=IMAGE, **settings))  # type: ignore[arg-type]
    assert box is not None
    return box.launch(words, {"OPENAI_API_KEY": "a-key"}, "http://127.0.0.1:8123/sessions/s")


@pytest.mark.parametrize("engine", ["podman", "docker"])
def test_a_container_has_the_limits_of_the_flags(engine: str) -> None:
    launch = launched(engine, ["agent", "--quick"], memory_mb=96, processes=40, disk_mb=32)
    words = words_of(launch)
    pairs = list(pairwise(words))
    assert words[:2] == [engine, "run"]
    assert words[-5:] == ["-c", 'read -r _ && exec "$@"', "sh", "agent", "--quick"]
    assert {("--memory", "96m"), ("--memory-swap", "96m"), ("--pids-limit", "40"), ("--network", "none")} <= {*pairs}
    assert {("--cap-drop", "ALL"), ("--user", "1000:1000"), ("--pull", "never"), ("--ulimit", "nofile=1024:1024")} <= {
        *pairs
    }
    (profile,) = (word[8:] for word in words if word.startswith("seccomp="))
    assert os.path.isfile(profile)
    assert "--read-only" in words
    assert all(",size=32m," in limit for name, limit in pairs if name == "--tmpfs")


def test_nobody_sees_a_key_in_the_list_of_processes() -> None:
    launch = launched("podman", ["agent"])
    assert not [word for word in (*launch.words, *words_of(launch)) if "a-key" in word]
    plan = marshal.loads(bytes.fromhex(launch.environment[VARIABLE]))
    assert plan["variables"]["OPENAI_API_KEY"] == "a-key"
    assert "OPENAI_API_KEY" not in launch.environment, "nor does the engine take it for a setting of its own"


def test_a_container_reads_what_the_command_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agent.py").touch()
    (tmp_path / "tasks").mkdir()
    monkeypatch.chdir(tmp_path)
    words = words_of(launched("podman", ["/bin/sh", "agent.py", "-v", "no/such"], read=("tasks",)))
    mounted = [words[place + 1] for place, word in enumerate(words) if word == "--mount"]
    assert mounted == [
        f"type=bind,source={path},target={path},readonly" for path in map(tmp_path.joinpath, ("agent.py", "tasks"))
    ]
    assert words[-4:] == ["/bin/sh", str(tmp_path / "agent.py"), "-v", "no/such"], "its current folder is another one"


@pytest.mark.parametrize(("network", "named"), [("none", "none"), ("loopback", "none"), ("full", "host")])
def test_only_loopback_is_connected_with_the_model(network: str, named: str) -> None:
    launch = launched("docker", ["agent"], network=network)
    plan = marshal.loads(bytes.fromhex(launch.environment[VARIABLE]))
    assert plan["words"][plan["words"].index("--network") + 1] == named
    assert plan["endpoint"] == (("127.0.0.1", 8123) if network == "loopback" else None)


def test_what_is_missing_is_said_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of the test's own stands for one whose daemon is away, and for one without the image."""
    pytest.importorskip("mcp")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    engine = tmp_path / "docker"

    def problem(script: str, image: str | None = IMAGE) -> str:
        engine.write_text(f"#!/bin/sh\n{script}\n")
        engine.chmod(0o755)
        box = open_sandbox(SandboxSettings("docker", image=image))
        assert box is not None
        with pytest.raises(ValueError, match="docker") as caught:
            box.check()
        return str(caught.value)

    assert "--agent-sandbox docker needs --agent-image" in problem("exit 0", None)
    without = SandboxSettings("docker")
    with pytest.raises(ValueError, match="docker needs --agent-image"):
        cautions(without, programs=True)
    assert cautions(without, programs=False) == [], "an environment may bring its images"
    with pytest.raises(ValueError, match="docker needs --agent-image"):
        load("mcp:true", without)
    assert "does not answer: no daemon here; install it, start its daemon" in problem("echo no daemon here >&2; exit 1")
    absent = '[ "$1" = info ] || { echo no such image >&2; exit 125; }'
    assert problem(absent) == f"--agent-image {IMAGE} is not on this machine: no such image; docker pull {IMAGE}"
    broken = '[ "$1" = run ] && { echo no cgroups >&2; exit 125; }; exit 0'
    assert "does not start a container of localhost/slimelite-test:1: no cgroups" in problem(broken)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    box = open_sandbox(SandboxSettings("podman", image=IMAGE))
    assert box is not None
    with pytest.raises(ValueError, match="apt-get install podman; or use process or bwrap"):
        box.check()


def test_an_engine_that_hangs_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(containers, "PROBE_SECONDS", 0.5)
    (tmp_path / "docker").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "docker").chmod(0o755)
    box = open_sandbox(SandboxSettings("docker", image=IMAGE))
    assert box is not None
    with pytest.raises(ValueError, match=r"does not answer: no answer in 0\.5 seconds; try `docker info`; install"):
        box.check()
    (tmp_path / "docker").write_text('#!/bin/sh\n[ "$1" = image ] && exit 1\nexec sleep 600\n')
    monkeypatch.setattr(harbor, "BUILD_SECONDS", 0.5)
    folder = write_task(tmp_path / "one")
    with pytest.raises(
        ValueError, match=r"docker did not build the image of the task one in 0\.5 seconds; try `docker"
    ):
        harbor.make(str(folder), SandboxSettings("docker"))


def test_what_an_engine_leaves_does_not_change_the_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "docker").write_text('#!/bin/sh\n[ "$1" = run ] || exit 0\nmkdir more\ntouch oom more/file\nexit 3\n')
    (tmp_path / "docker").chmod(0o755)
    launch = launched("docker", ["agent"], network="full")
    done = subprocess.run(launch.words, env=launch.environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (3, "")
    assert [path.name for path in tmp_path.iterdir()] == ["docker"]
    (tmp_path / "docker").unlink()
    gone = subprocess.run(launch.words, env=launch.environment, capture_output=True, text=True, check=False)
    assert (gone.returncode, gone.stderr.startswith("the sandbox does not start: ")) == (NO_START, True)
    assert [*tmp_path.iterdir()] == [], "the file of variables, which may be secret, goes too"


def test_a_path_with_a_comma_is_refused(tmp_path: Path) -> None:
    """It would be an option of the mount."""
    (tmp_path / "a,b").mkdir()
    with pytest.raises(ValueError, match=r"cannot mount a path with a comma: .*/a,b; rename it"):
        launched("podman", ["agent"], read=(str(tmp_path / "a,b"),))


def test_proxies_of_dockers_settings_stay_outside() -> None:
    pairs = {*pairwise(words_of(launched("docker", ["agent"])))}
    assert {("--env", f"{name}=") for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "NO_PROXY")} <= pairs
    box = open_sandbox(SandboxSettings("docker", image=IMAGE))
    assert box is not None
    words = words_of(box.launch(["agent"], {"NO_PROXY": "127.0.0.1"}, None))
    assert "NO_PROXY=127.0.0.1" in words, "what a run gives its programs stays"


def test_the_container_of_a_client_that_failed_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is the file with the variables, which the client alone could read, and what podman's monitor leaves."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    script = (
        'echo "$@" >> "$TMPDIR/log"; [ "$1" = run ] || exit 0; cat "$5"; ls -l "$5" >> "$TMPDIR/log"; >oom; exit 125'
    )
    (tmp_path / "docker").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "docker").chmod(0o755)
    launch = launched("docker", ["agent"], network="none")
    run = subprocess.run(launch.words, env=launch.environment, capture_output=True, text=True, check=False)
    assert run.returncode == 125, run.stderr
    assert "OPENAI_API_KEY=a-key\n" in run.stdout
    begun, file, removed = (tmp_path / "log").read_text().splitlines()
    assert begun.startswith(f"run --name {launch.container} --env-file {tmp_path}")
    assert file.startswith("-rw-------")
    assert removed == f"rm --force {launch.container}"
    assert {path.name for path in tmp_path.iterdir()} == {"docker", "log"}
    assert not Path("oom").exists()


@pytest.mark.podman
def test_variables_of_a_task_reach_the_container_alone(tmp_path: Path) -> None:
    """They would break podman and this machine's Python if these got them."""
    more = (
        'COLOUR = "blue = #1"\nCONTAINERS_CONF = "/no"\nLD_PRELOAD = "/no.so"\nCONTAINER_HOST = "tcp://127.0.0.1:9"\n'
    )
    folder = write_task(tmp_path / "one", TOML.replace('COLOUR = "blue"\n', more))
    replies = [bash('echo "$COLOUR" $CONTAINERS_CONF $CONTAINER_HOST')]
    _, (step,) = episode(f"harbor:{folder}", row_of(folder), replies, settings("podman", memory_mb=1024))
    assert "blue = #1 /no tcp://127.0.0.1:9" in step.messages[0]["content"]


@pytest.mark.podman
def test_a_task_of_harbor_is_played_in_a_container(tmp_path: Path) -> None:
    plays(write_task(tmp_path / "one"), settings("podman", memory_mb=1024))


@pytest.mark.podman
def test_the_image_of_a_task_is_built(tmp_path: Path) -> None:
    dockerfile = f"FROM {IMAGE}\nWORKDIR /app\nRUN echo made > /made\nCOPY data/number .\n"
    folder = write_task(tmp_path / "one", dockerfile=dockerfile)
    replies = [bash("cat /made number; echo 42 > answer.txt; echo x > /etc/changed"), said("Done.")]
    _, steps = episode(f"harbor:{folder}", row_of(folder), replies, SandboxSettings("podman"))
    assert steps[0].messages[0]["content"] == "made\n42"
    assert steps[1].reward == 1.0
    _, steps = episode(f"harbor:{folder}", row_of(folder), [bash("ls /etc/changed")], SandboxSettings("podman"))
    assert "No such file" in steps[0].messages[0]["content"], "each episode has a container of its own"
    folder = write_task(tmp_path / "two", dockerfile="FROM localhost/no-such-image:1\nRUN true\n")
    with pytest.raises(ValueError, match=r"podman cannot build the image of the task two: .*; to use another image"):
        episode(f"harbor:{folder}", row_of(folder), [], SandboxSettings("podman"))
