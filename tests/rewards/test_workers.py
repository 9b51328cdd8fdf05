"""Worker processes: order, hangs, crashes, orphans."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slimelite.rewards.rules import Answer, Failure, Settings
from slimelite.rewards.workers import CHUNK, WorkerPool
from tests.support.waiting import worked, works

RIGHT, WRONG = "\\boxed{1+x}", "\\boxed{2+x}"
# it goes to a rule that no processor time bounds: the pattern takes 2^50 steps on it
HANG = "a" * 50
FOR_EVER = Settings(format_regex="(a+)+b")


def tasks(*responses: str) -> list[tuple[str, Answer]]:
    return [
        ("format", Answer(r, "", settings=FOR_EVER)) if r == HANG else ("math", Answer(r, "x+1")) for r in responses
    ]


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(1, timeout=3.0)
    yield pool
    pool.close()


def kinds(results: list[object]) -> list[object]:
    return [r.kind if isinstance(r, Failure) else r for r in results]


def test_results_keep_the_order_of_the_tasks(pool: WorkerPool, capfd: pytest.CaptureFixture[str]) -> None:
    responses = [RIGHT if i % 3 == 0 else WRONG for i in range(3 * CHUNK + 1)]
    assert asyncio.run(pool.run(tasks(*responses))) == [float(r == RIGHT) for r in responses]
    assert capfd.readouterr() == ("", "")  # the library warns of what we ask it for


@pytest.mark.chaos
def test_a_hung_worker_is_replaced_and_its_neighbours_are_graded(pool: WorkerPool) -> None:
    asyncio.run(pool.run(tasks(RIGHT)))
    process = pool._workers[0]._process
    assert process is not None
    results = asyncio.run(pool.run(tasks(RIGHT, HANG, WRONG, RIGHT)))
    assert kinds(results) == [1.0, "timeout", 0.0, 1.0]
    assert process.returncode == -signal.SIGKILL
    assert pool._workers[0]._process is not process


@pytest.mark.chaos
def test_a_worker_that_dies_twice_costs_one_answer(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool._workers[0]._timeout = 60.0
    begin, begun = pool._workers[0]._start, []
    asyncio.run(pool.run(tasks(RIGHT)))
    process = pool._workers[0]._process
    assert process is not None

    def start() -> None:
        begin()
        begun.append(pool._workers[0]._process)

    monkeypatch.setattr(pool._workers[0], "_start", start)

    async def kill_while_grading() -> list[object]:
        idle = worked(process.pid)
        grading = asyncio.ensure_future(pool.run(tasks(RIGHT, HANG, RIGHT)))
        await works(process.pid, idle)
        os.kill(process.pid, signal.SIGKILL)
        while not begun:
            await asyncio.sleep(0.05)
        await works(begun[0].pid, worked(begun[0].pid))
        begun[0].kill()
        return [*await grading]

    assert kinds(asyncio.run(kill_while_grading())) == [1.0, "crash", 1.0]


@pytest.mark.chaos(
    "a grader stopped or killed", "replaced, and its answer is graded again; if it is stopped, after `--reward-timeout`"
)
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_worker_that_is_stopped_or_killed_once_costs_nothing(pool: WorkerPool, number: int) -> None:
    asyncio.run(pool.run(tasks(RIGHT)))
    process = pool._workers[0]._process
    assert process is not None

    async def hurt_while_grading() -> list[object]:
        process.send_signal(signal.SIGSTOP)  # so that it has the answer for sure when it is killed
        grading = asyncio.ensure_future(pool.run(tasks(RIGHT, WRONG)))
        await asyncio.sleep(0.2)
        process.send_signal(number)
        return [*await grading]

    assert kinds(asyncio.run(hurt_while_grading())) == [1.0, 0.0]
    assert process.returncode == -signal.SIGKILL


@pytest.mark.chaos
def test_a_worker_that_died_in_its_sleep_costs_nothing(pool: WorkerPool) -> None:
    asyncio.run(pool.run(tasks(RIGHT)))
    process = pool._workers[0]._process
    assert process is not None
    process.kill()
    process.wait()
    assert asyncio.run(pool.run(tasks(RIGHT, WRONG))) == [1.0, 0.0]


def test_the_event_loop_goes_on_while_workers_grade(pool: WorkerPool) -> None:
    async def turns() -> int:
        grading, turns = asyncio.ensure_future(pool.run(tasks(RIGHT, HANG))), 0
        while not grading.done():
            await asyncio.sleep(0.01)
            turns += 1
        assert kinds([*await grading]) == [1.0, "timeout"]
        return turns

    # three hundred fit into the timeout of 3 s, and what else runs on this machine takes some
    assert asyncio.run(turns()) > 5


def test_a_closed_pool_says_so() -> None:
    pool = WorkerPool(1, timeout=3.0)
    asyncio.run(pool.run(tasks(RIGHT)))
    process = pool._workers[0]._process
    assert process is not None
    pool.close()
    assert process.returncode is not None
    with pytest.raises(RuntimeError):
        asyncio.run(pool.run(tasks(RIGHT)))


def test_a_worker_needs_neither_torch_nor_the_main_program() -> None:
    heavy = {"torch", "ray", "transformers", "aiohttp"}
    script = f"import slimelite.rewards.workers, sys; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.chaos
def test_workers_end_with_their_parent() -> None:
    script = (
        "import asyncio, os\nfrom slimelite.rewards.workers import WorkerPool\n"
        "from slimelite.rewards.rules import Answer\n"
        "pool = WorkerPool(1, 5.0); asyncio.run(pool.run([('math', Answer('\\\\boxed{1+x}', 'x+1'))]))\n"
        "print(pool._workers[0]._process.pid, flush=True); os._exit(1)"
    )
    pid = int(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False).stdout)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.05)
    pytest.fail(f"worker {pid} outlived its parent")
