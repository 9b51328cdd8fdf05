"""Processes that are stopped, stand still or are just slow: who is named, and who is left alone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from slimelite.base.processes import Machine
from slimelite.cluster.hangs import END, Calls, Monitor

LIMIT = 0.4
# what a worker does: (code that runs in the file of its name, the file)
ACTS = {
    "waits": "import time\ndef gather():\n    time.sleep(60)\ngather()",
    "sleeps": "import time\ndef lost():\n    time.sleep(60)\nlost()",
    # one call of C that holds Python's lock
    "computes": "def long():\n    sum(range(10**12))\nlong()",
    # a pipe that gives 4 kB now and then, as a slow file server does
    "trickles": "import os, threading, time\nends = os.pipe()\ndef feed():\n    while True:\n        time.sleep(0.1)\n"
    "        os.write(ends[1], bytes(4096))\nthreading.Thread(target=feed, daemon=True).start()\n"
    "while True:\n    os.read(ends[0], 4096)",
    # the kernel waits for a child that waits for a file: uninterruptible, as in a read of a disk that does not answer
    "uninterrupted": "import os\nos.mkfifo('never')\n"
    "os.posix_spawn('/bin/true', ['true'], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, 'never', os.O_RDONLY, 0)])",
    # a server's owner
    "serves": "import subprocess, time\nprint(subprocess.Popen(['sleep', '60']).pid, flush=True)\ntime.sleep(60)",
}


class Rank:
    """A worker in a process of its own, which has one call to answer."""

    def __init__(self, name: str, act: str, folder: Path) -> None:
        self.name, self.host, self.verdict = name, "here", None
        self.log = folder / f"{name}.log"
        where = folder / "slimelite" / ("distributed" if act == "waits" else "own")
        where.mkdir(parents=True, exist_ok=True)
        (where / f"{act}.py").write_text(ACTS[act])
        code = (
            "from slimelite.base.processes import show_stacks; import runpy; show_stacks(); print(flush=True); "
            f"runpy.run_path({str(where / f'{act}.py')!r})"
        )
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code], stderr=log, stdout=subprocess.PIPE, cwd=folder
            )
        self.calls = Calls()
        self.answer: Future[None] = Future()
        self.calls.begin("train", self.answer)

    def begun(self) -> Rank:
        assert self.process.stdout is not None
        self.process.stdout.readline()
        return self


@pytest.fixture
def ranks(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[Rank]]:
    """A worker for each word of the parameter, trainer_0 first."""
    made = [Rank(f"trainer_{n}", act, tmp_path) for n, act in enumerate(request.param.split())]
    try:
        yield [rank.begun() for rank in made]
    finally:
        for rank in made:
            with suppress(psutil.NoSuchProcess):
                for child in psutil.Process(rank.process.pid).children():
                    child.kill()
            rank.process.kill()
            rank.process.communicate()


def watch(ranks: list[Rank], seconds: float) -> None:
    """Have a monitor look at the ranks until one is ended, for at most so long."""
    with Monitor(LIMIT, ranks):
        deadline = time.monotonic() + seconds
        while all(rank.process.poll() is None for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.02)


@pytest.mark.chaos("two idle ranks, one outside a collective", "that rank is named and ended")
@pytest.mark.parametrize("ranks", ["waits sleeps"], indirect=True)
def test_of_idle_ranks_the_one_outside_a_collective_is_ended_and_named(ranks: list[Rank]) -> None:
    watch(ranks, 120)
    first, second = ranks
    assert first.verdict is None
    assert second.process.wait(120) == -signal.SIGKILL
    said = f"trainer_1 (process {second.process.pid} on {os.uname().nodename}) has done nothing for "
    assert str(second.verdict).startswith(said)
    assert "s in train, and the other ranks wait for it; its stack: " in str(second.verdict)
    assert "sleeps.py:3 in lost < " in str(second.verdict)


@pytest.mark.chaos("a call that holds Python's lock for four times the limit", "nothing, until it is stopped")
@pytest.mark.parametrize("ranks", ["waits computes"], indirect=True)
def test_a_step_that_is_long_is_no_hang_and_a_stopped_one_is(ranks: list[Rank]) -> None:
    watch(ranks, 4 * LIMIT)
    assert [rank.verdict for rank in ranks] == [None, None]
    ranks[1].process.send_signal(signal.SIGSTOP)
    watch(ranks, 120)
    assert " was stopped for " in str(ranks[1].verdict)
    assert "computes.py:2 in long" in str(ranks[1].verdict)  # Python's lock is held
    assert ranks[0].verdict is None


@pytest.mark.chaos("a rank reads slowly, without using a core", "nothing")
@pytest.mark.parametrize("ranks", ["waits trickles", "waits uninterrupted"], indirect=True)
def test_a_rank_that_reads_slowly_is_left_alone(ranks: list[Rank]) -> None:
    """It uses no processor and no page of it comes from a disk."""
    watch(ranks, 4 * LIMIT)
    assert [rank.verdict for rank in ranks] == [None, None]


@pytest.mark.chaos("two ranks that wait for each other", "both places are named, and one is ended")
@pytest.mark.parametrize("ranks", ["waits waits"], indirect=True)
def test_ranks_that_wait_for_each_other_and_ranks_without_work(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.calls.open.clear()
    watch(ranks, 3 * LIMIT)
    assert [rank.verdict for rank in ranks] == [None, None]
    for rank in ranks:
        rank.calls.begin("train", rank.answer)
    watch(ranks, 120)
    assert " and the other ranks wait for each other (trainer_1 (process " in str(ranks[0].verdict)
    assert str(ranks[0].verdict).count("waits.py:3 in gather") == 2


@pytest.mark.parametrize("ranks", ["waits sleeps"], indirect=True)
def test_ranks_that_are_done_while_their_stacks_are_read_are_left_alone(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    stack, reads = Machine.stack, list[int]()

    def answered(machine: Machine, pid: int, log: str) -> str:
        reads.append(pid)
        for rank in ranks:
            rank.calls.open.clear()
        return stack(machine, pid, log)

    monkeypatch.setattr(Machine, "stack", answered)
    deadline = time.monotonic() + 120
    with Monitor(LIMIT, ranks):
        while len(reads) < len(ranks) and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(LIMIT)
    assert {rank.process.pid for rank in ranks} == set(reads)
    assert [rank.verdict for rank in ranks] == [None, None]


@pytest.mark.chaos
@pytest.mark.parametrize("ranks", ["sleeps serves"], indirect=True)
def test_who_waits_for_a_stopped_server_has_time_when_that_is_ended(
    ranks: list[Rank], caplog: pytest.LogCaptureFixture
) -> None:
    """Its owner learns of the end a moment later, and only then the trainer that sends it weights."""
    trainer, engine = ranks
    trainer.calls.open.clear()
    trainer.calls.begin("push_weights", trainer.answer)
    engine.name = "engine_0"
    assert engine.process.stdout is not None
    server = psutil.Process(int(engine.process.stdout.readline()))
    server.send_signal(signal.SIGSTOP)
    with Monitor(LIMIT, ranks):
        trainer.process.wait(120)
    of_server, of_trainer = (record.created for record in caplog.records)
    assert of_trainer > of_server + END * LIMIT
    assert f"process {server.pid} on {os.uname().nodename} (sleep 60) was stopped for " in caplog.text
    assert f"it was started by engine_0 (log: {engine.log})" in caplog.text


@pytest.mark.chaos
@pytest.mark.parametrize("ranks", ["sleeps"], indirect=True)
def test_time_in_which_nobody_looked_does_not_count(ranks: list[Rank]) -> None:
    """This process was stopped too, or the whole machine."""
    machine, log = Machine(1.0), str(ranks[0].log)
    machine.look([log])
    time.sleep(1.1)
    assert machine.look([log]).still[log] < 0.1


@pytest.mark.chaos(
    "a process that a worker has started stopped; a worker stopped before it has opened its log", "ended"
)
def test_a_stopped_child_of_the_runs_is_ended() -> None:
    """Such as the process of an environment: whoever started it starts it again."""
    with ExitStack() as stack:
        child = subprocess.Popen(["sleep", "60"])
        own = subprocess.Popen([sys.executable, "-c", "input()", "slimelite.rewards"], stdin=subprocess.PIPE)
        # a worker that has not opened its log yet
        worker = subprocess.Popen(["ray::engine.__init__", "60"], executable=shutil.which("sleep"))
        for process in (child, own, worker):
            stack.callback(process.kill)
            process.send_signal(signal.SIGSTOP)
        with Monitor(LIMIT):
            for process in (own, worker):
                assert process.wait(120) == -signal.SIGKILL
        assert child.poll() is None


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["sleeps"], indirect=True)
def test_a_machine_behind_ray_sees_the_same(ranks: list[Rank]) -> None:
    import ray

    from slimelite.cluster.ray_cluster import RemoteMachine

    ray.init(num_cpus=1, include_dashboard=False)
    try:
        there, log, pid = RemoteMachine(ray.nodes()[0]["NodeID"], 30.0), str(ranks[0].log), ranks[0].process.pid
        assert there.look([log]).pids == {log: pid}
        assert "sleeps.py:3 in lost" in there.stack(pid, log)
        there.send(pid, signal.SIGKILL)
        assert ranks[0].process.wait(120) == -signal.SIGKILL
    finally:
        ray.shutdown()
