"""Runs that are ended in the middle of each phase, with and without Ray."""

from __future__ import annotations

import http.client
import ipaddress
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path

import grpc
import psutil
import pytest

import train
from slimelite.training.trainer import Trainer

from .conftest import ROOT

pytestmark = pytest.mark.e2e


def status(run: Path) -> dict[str, object]:
    return json.loads((run / "status.json").read_text())


PHASES = {
    "start": ("slimelite.training.trainer.Trainer", "__init__"),
    "generate": ("slimelite.engines.embedded.engine.EmbeddedEngine", "generate"),
    "train": ("slimelite.training.trainer.Trainer", "train"),
    "sync": ("slimelite.cluster.remote.RemoteSink", "send"),
    "save": ("slimelite.training.trainer.Trainer", "save"),
    "write": ("torch.distributed.checkpoint.filesystem.FileSystemWriter", "write_data"),
}


@pytest.fixture
def args(task: Path) -> list[str]:
    """GRPO from random weights, 8 x 4 samples of up to 32 tokens."""
    return [
        *("--hf-checkpoint", str(task / "model"), "--prompt-data", str(task / "train.parquet")),
        *("--input-key", "messages", "--label-key", "label", "--apply-chat-template", "--rm-type", "gsm8k"),
        *("--rollout-batch-size", "8", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "32"),
        *("--use-dynamic-batch-size", "--max-tokens-per-gpu", "512", "--lr", "1e-3", "--colocate"),
    ]


@pytest.mark.parametrize("phase", PHASES)
def test_sigterm_in_each_phase(
    phase: str, args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In one process; the signal comes from within the phase, in the second rollout where there is one."""
    owner, name = PHASES[phase]
    module, _, owner = owner.rpartition(".")
    target = getattr(__import__(module, fromlist=[owner]), owner)
    real, calls = getattr(target, name), []

    @wraps(real)
    def interrupted(*given: object, **named: object) -> object:
        calls.append(name)
        if phase == "start" or (tmp_path / "run" / "rollouts" / "0000000.parquet").is_file():
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*given, **named)

    monkeypatch.setattr(target, name, interrupted)
    before = signal.getsignal(signal.SIGTERM)
    flags = ["--num-rollout", "9", "--save", str(tmp_path / "saved"), "--save-interval", "2"]
    run = tmp_path / "run"
    assert train.main([*args, "--launcher", "local", *flags, "--run-dir", str(run)]) == 143
    assert signal.getsignal(signal.SIGTERM) is before
    found, out = status(run), capfd.readouterr()
    assert (found["status"], found["message"]) == ("interrupted", "SIGTERM")
    done = found["rollouts_done"] or 0
    assert done == {"start": 0, "train": 0, "sync": 0}.get(phase, 1)
    notice, ending = out.out.splitlines()[-2:]
    assert notice == "SIGTERM: the run is shutting down; a second SIGTERM ends it at once"
    came = f"after {done} of 9 rollouts" if done else "before the end of its first rollout"
    assert ending.startswith(f"interrupted {came}, ")
    assert "Traceback" not in out.out + out.err
    assert (run / "curves.png").is_file() == bool(done)
    assert not [left for left in run.rglob("*.partial") if left.is_file()]


class Sender:
    """Sends this process SIGTERM when it is deleted."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_sigterm_in_a_finalizer_ends_the_run_as_well(
    args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python drops what is raised in a ``__del__``, such as that of pyarrow's writers."""
    real = Trainer.train

    @wraps(real)
    def interrupted(*given: object, **named: object) -> object:
        Sender()
        return real(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "train", interrupted)
    run = tmp_path / "run"
    assert train.main([*args, "--num-rollout", "3", "--launcher", "local", "--run-dir", str(run)]) == 143
    assert (status(run)["status"], status(run)["message"]) == ("interrupted", "SIGTERM")
    assert status(run)["rollouts_done"] is None


def start(args: list[str], run: Path, *flags: str, **variables: str) -> subprocess.Popen[str]:
    """train.py on a Ray of its own, in the background, with an empty home."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    (run.parent / "home").mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "train.py", *args, "--num-rollout", "9", "--run-dir", str(run), *flags],
        cwd=ROOT,
        env={**clean, "HOME": str(run.parent / "home"), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_until(true: Callable[[], object], process: subprocess.Popen[str], seconds: float = 1200) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"exit status {process.poll()}:\n{process.communicate()[0][-3000:]}")
        time.sleep(0.1)


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The run, Ray's daemons, the workers and the watchdog."""
    driver = psutil.Process(process.pid)
    return [driver, *driver.children(recursive=True)]


def command(process: psutil.Process) -> str:
    """Its command line; empty if it has just ended, as `git` and others that a start runs do."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def alive(processes: list[psutil.Process]) -> list[str]:
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {process.name()}")
    return found


def answer_without_token(port: int, seconds: float) -> set[str]:
    """What a port of this machine answers within ``seconds`` to who has no token: gRPC codes of Ray's services, HTTP
    statuses."""
    said = set()
    channel = grpc.insecure_channel(f"127.0.0.1:{port}")
    for service in RAY_SERVICES:
        try:
            channel.unary_unary(f"/ray.rpc.{service}")(b"", timeout=seconds)
            said.add("OK")
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                return {"something else"}
            said.add(error.code().name)
    channel.close()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
    with suppress(http.client.BadStatusLine, OSError):
        connection.request("POST", "/api/job_agent/jobs/", body="{}")
        said.add(str(connection.getresponse().status))
    connection.close()
    return said - {"UNIMPLEMENTED", "UNAVAILABLE"}


RAY_SERVICES = (
    "CoreWorkerService/PushTask",
    "NodeManagerService/RequestWorkerLease",
    "ObjectManagerService/Push",
    "JobInfoGcsService/AddJob",
    "InternalKVGcsService/InternalKVPut",
    "ReporterService/GetTraceback",
)


def test_ray_is_closed_to_others_and_sigterm_for_all_in_training_leaves_nothing(
    args: list[str], tmp_path: Path
) -> None:
    """One start of Ray, which a file of the user has imported before; the run is held in the trainer, by a function of
    the user, which sees the secret."""
    (tmp_path / "early.py").write_text("import ray\n")
    (tmp_path / "hold.py").write_text(
        "import os, time\nfrom pathlib import Path\n"
        "def advantages(*args, **kwargs):\n"
        f"    Path({str(tmp_path / 'held')!r}).write_text(os.environ['HF_TOKEN'][::-1])\n"
        "    time.sleep(300)\n"
    )
    secret = "hf_" + "a1b2c3" * 3
    flags = ["--train-env-vars", json.dumps({"HF_TOKEN": secret, "NCCL_DEBUG": "WARN"})]
    flags += ["--custom-advantage-function-path", f"{tmp_path / 'hold.py'}:advantages"]
    flags += ["--import-file", str(tmp_path / "early.py")]
    run = tmp_path / "run"
    process = start(args, run, *flags)
    wait_until((tmp_path / "held").is_file, process)
    members = [member for member in family(process) if alive([member])]
    try:
        wait_until(lambda: (tmp_path / "held").read_text() == secret[::-1], process)
        commands = {member.pid: command(member) for member in members}
        (gcs,) = [member for member in members if "gcs_server" in commands[member.pid]]
        token = gcs.environ()["RAY_AUTH_TOKEN"]
        # daemons that a signal for the group ends before the run does would take the run with them, with status 1
        assert [pid for pid in commands if os.getpgid(pid) == process.pid] == [process.pid]

        answers: set[str] = set()
        for member in members:
            for connection in member.net_connections("inet"):
                if connection.status != psutil.CONN_LISTEN:
                    continue
                trainer = "ray::trainer" in commands[member.pid]  # torch's rendezvous and gloo are there too
                if ipaddress.ip_address(connection.laddr.ip.removeprefix("::ffff:")).is_loopback:
                    said = answer_without_token(connection.laddr.port, 5 if trainer else 120)
                    known = {"UNAUTHENTICATED", "401"} | ({"something else"} if trainer else set())
                    assert said <= known, (commands[member.pid], connection, said)
                    answers |= said
                else:
                    assert trainer, (commands[member.pid], connection)
        assert answers >= {"UNAUTHENTICATED", "401"}

        session = Path(re.search(r"--log_dir=(\S+)/logs", commands[gcs.pid])[1])  # type: ignore[index]
        written = [file for folder in (session, run) for file in folder.rglob("*") if file.is_file()]
        assert any(file.suffix == ".log" for file in written)
        for hidden in (token, secret):
            assert [file for file in written if hidden.encode() in file.read_bytes()] == []
            assert [words for pid, words in commands.items() if hidden in words and pid != process.pid] == []
        assert token not in commands[process.pid]
    finally:
        # as `timeout` and shells do it
        os.killpg(process.pid, signal.SIGTERM)
        out, _ = process.communicate(timeout=1200)
    assert process.returncode == 143, out
    assert out.splitlines()[-2] == "SIGTERM: the run is shutting down; a second SIGTERM ends it at once"
    assert out.splitlines()[-1].startswith("interrupted before the end of its first rollout, ")
    assert "Traceback" not in out
    assert alive(members) == []
    assert status(run)["status"] == "interrupted"
    # a token there would make `ray start` ask for it, and `ray job submit` would not give it
    assert not (tmp_path / "home" / ".ray").exists()


@pytest.mark.chaos
def test_sigkill_while_ray_starts_leaves_nothing(args: list[str], tmp_path: Path) -> None:
    """Of Ray's processes two outlive a driver that is killed."""
    run = tmp_path / "run"
    process = start(args, run)
    wait_until(lambda: sum("Agent" in command(member) for member in family(process)) >= 2, process)
    members = family(process)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 120
    while alive(members) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive(members) == []
    assert status(run)["status"] == "stopped without a word"
    assert "(SIGKILL)" in status(run)["message"]
    assert status(run)["message"].endswith("would fit (predicted)")  # the watchdog asks the planner then
