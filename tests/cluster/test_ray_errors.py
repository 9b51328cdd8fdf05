"""Ray that does not start, cannot be joined, or loses a worker: one message that names the remedy."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import ray
from ray.exceptions import (
    ActorUnavailableError,
    OutOfDiskError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)

from slimelite.arguments import Args
from slimelite.cluster.ray_cluster import RayRemote
from slimelite.cluster.ray_session import connected, explained
from slimelite.cluster.remote import ClusterError, MemoryShortage, RestartWaitError, with_memory


def why_not(monkeypatch: pytest.MonkeyPatch, **variables: str) -> str:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ClusterError) as caught, connected(1):
        pytest.fail("Ray started")
    assert not ray.is_initialized()
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_folder_that_ray_cannot_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing, long = tmp_path / "missing", tmp_path / ("x" * 100)
    long.mkdir()
    for folder, says in ((missing, "No such file or directory"), (long, "cannot exceed 107 bytes")):
        message = why_not(monkeypatch, RAY_TMPDIR=str(folder))
        assert message.startswith(f"Ray cannot write its files in {folder}: ")
        assert says in message
        assert "export RAY_TMPDIR=" in message


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("slimelite.cluster.ray_session.ROOM", 1 << 60)
    message = why_not(monkeypatch, RAY_TMPDIR=str(tmp_path))
    assert "MB of free space" in message
    assert "Free space there" in message


def test_a_ray_that_does_not_come_up_is_tried_twice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    message = why_not(monkeypatch, RAY_gcs_server_port_wait_time_s="0")
    assert message.startswith("Ray did not start in 2 attempts: Timed out")
    assert "session_latest/logs" in message
    assert "--launcher local" in message
    assert [record.message for record in caplog.records if "trying again" in record.message]


def test_a_ray_that_comes_up_slowly_is_tried_until_it_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Ray's agent sleeps longer than the 15 s that Ray gives it, at the first two attempts."""
    (tmp_path / "sitecustomize.py").write_text(
        f"""
import pathlib, sys, time
attempts = pathlib.Path({str(tmp_path / "attempts")!r})
if any(word.endswith("dashboard/agent.py") for word in sys.orig_argv):
    with attempts.open("a") as file:
        file.write("x")
    time.sleep(20 if len(attempts.read_text()) < 3 else 0)
"""
    )
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with connected(1):
        assert ray.is_initialized()
    tries = [record.message for record in caplog.records if "trying again" in record.message]
    assert len(tries) >= 2
    assert tries[1].endswith("(one of its processes did not begin within 15 s); trying again (attempt 3 of 8)")


def test_a_cluster_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and not listening
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        assert f"RAY_ADDRESS={address} ([Errno 111] Connection refused)" in why_not(monkeypatch, RAY_ADDRESS=address)
        with pytest.raises(RestartWaitError) as caught, connected(1, 0.1):
            pytest.fail("Ray started")
        assert str(caught.value).startswith(
            "a restart has waited 0.1 s for its machines (--restart-wait): cannot join "
        )
    message = why_not(monkeypatch, RAY_ADDRESS="http://127.0.0.1:8265")
    assert "such as 10.0.0.1:6379" in message


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OutOfMemoryError("Memory on the node was 15 GB / 16 GB\na table\nof processes"), "lower --max-tokens-per-gpu"),
        (RayActorError(error_msg="The actor died.\nWorker unexpectedly exits with code 2"), "was killed by SIGKILL"),
        (
            RayActorError(error_msg="The actor died.\nValueError: no such model"),
            "died: ValueError: no such model; its log",
        ),
        (OutOfDiskError("full"), "export RAY_TMPDIR="),
        (ActorUnavailableError("gone", None), "10.0.0.2 cannot be reached: its process or its machine died, or the "),
    ],
)
def test_a_lost_worker_is_one_line(error: RayError, says: str) -> None:
    one = explained(error, "trainer_1", Path("logs/trainer_1.log"), host="10.0.0.2")
    assert "\n" not in str(one)
    assert str(one).startswith("trainer_1 ") or str(one).startswith("trainer_1: ")
    assert says in str(one)
    assert str(one).endswith("; its log is logs/trainer_1.log")
    assert one.__notes__ == [str(error)], "Ray's own words are for log.txt"


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("kills", "says", "kind"),
    [
        (1, "was killed: in the last 30 s the kernel has killed a process on this machine because", MemoryShortage),
        (2, "was killed: in the last 30 s the kernel has killed 2 processes on this machine because", MemoryShortage),
        (0, "crashed, or somebody sent it SIGKILL. Full memory was not the reason: ", ClusterError),
    ],
)
def test_whether_the_kernel_killed_it_for_its_memory(kills: int, says: str, kind: type) -> None:
    error = RayActorError(error_msg="The actor died.\nWorker unexpectedly exits with code 2")
    one = explained(error, "trainer_1", Path("logs/trainer_1.log"), kills)
    assert says in str(one)
    assert type(one) is kind, "what the run needed is said only if memory may have been the reason"


class TwoThings(Exception):
    """An error that `pickle` cannot make again: it would be given its one message."""

    def __init__(self, thing: str, state: str) -> None:
        super().__init__(f"{thing} is {state}")


@pytest.mark.parametrize("error", [ValueError("the judge is asleep"), TwoThings("the judge", "asleep")], ids=str)
def test_an_error_of_the_users_is_theirs_whatever_its_class(error: Exception, tmp_path: Path) -> None:
    """As Ray takes it from one process to another."""
    trace = f'ray::host.call()\n  File "reward.py", line 3, in grade\n{type(error).__name__}: {error}'
    sent = RayError.from_bytes(RayTaskError("host.call", trace, error).to_bytes())
    found = RayRemote(None, "rollout", tmp_path / "rollout.log", "here")._explained(sent)
    assert str(found).endswith("the judge is asleep")
    assert type(found) in (ValueError, ClusterError)
    assert "Ray failed" not in str(found)
    assert "in rollout (log: " in found.__notes__[0]
    assert 'File "reward.py", line 3' in found.__notes__[0]


def test_a_machine_that_is_gone_is_named_as_a_cause() -> None:
    """What gloo says when the other rank's machine was switched off, as in tests/e2e/test_nodes.py."""
    error = RuntimeError("[/pair.cc:537] Read error [10.77.0.2]:724: Connection reset by peer. Check the logs")
    message = with_memory(error, Args())
    assert isinstance(message, ClusterError)
    assert "a training rank got no answer from another rank" in str(message)
