"""Programs that use a resource without end get no more than their sandbox has, and leave nothing behind."""

from __future__ import annotations

import asyncio
import functools
import time
from pathlib import Path

import pytest

from slimelite.environments.program import Ended, Programs
from slimelite.sandbox.boxes import control_groups
from slimelite.sandbox.registry import SandboxSettings, open_sandbox
from tests.sandbox.bombs import BOMBS, MARK
from tests.sandbox.sandboxes import CONTAINERS, SANDBOXES_HERE, is_running, python, settings

# a container needs seconds to begin
SECONDS, SECONDS_OF_A_CONTAINER = 1.5, 15.0
# enough on a busy machine for a look at the files, which `process` takes now and then
SECONDS_OF_DISK = 30.0
MEMORY, PROCESSES, DISK = 96, 40, 32
# what a program may reach: with what it uses itself, and with what it gets before anybody looks at its disk
COUNTED = bool(control_groups(SandboxSettings()))  # by the kernel; elsewhere somebody looks now and then
MOST = {
    "memory": (1.3 if COUNTED else 30.0) * MEMORY,
    "shared": DISK,
    "processes": PROCESSES,
    "levels": 1e9,
    "disk": 6 * DISK,
    "descriptors": 1024,
    "seconds": 0,
}


@functools.cache
def ends(sandbox: str, folder: Path) -> dict[str, Ended]:
    """How each bomb ended; four are tried at a time."""
    seconds = SECONDS_OF_A_CONTAINER if sandbox in CONTAINERS else SECONDS
    box = open_sandbox(settings(sandbox, memory_mb=MEMORY, processes=PROCESSES, disk_mb=DISK))

    async def run() -> list[Ended]:
        jobs = []
        for name in BOMBS:
            command = f"{python(sandbox)} {Path(__file__).with_name('bombs.py')} {name.replace(' ', '_')}"
            most = max(seconds, SECONDS_OF_DISK) if BOMBS[name][0] == "disk" else seconds
            jobs.append(Programs(command, 1, most, folder, box))
        room = asyncio.Semaphore(4)

        async def one(job: Programs) -> Ended:
            async with room:
                return await job.run({}, {}, "http://127.0.0.1:9", lambda: 0.0)

        return await asyncio.gather(*map(one, jobs))

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        return dict(zip(BOMBS, asyncio.run(run()), strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bombs")


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.parametrize("sandbox", SANDBOXES_HERE)
def test_a_bomb_is_contained(sandbox: str, name: str, folder: Path) -> None:
    ended = ends(sandbox, folder)[name]
    kind = BOMBS[name][0]
    reached = [int(line) for line in ended.output.split() if line.isdigit()]
    if sandbox == "process" and kind == "disk":
        # how much a program writes between two looks depends on the machine
        over = f"its files held more than {DISK} MiB" in ended.errors
        assert over or max(reached, default=0) <= DISK
    else:
        assert max(reached, default=0) <= MOST[kind]
    assert ended.status != 0
    # it is compared with a program that only sleeps, because a busy machine ends both later
    longer = SECONDS_OF_DISK if kind == "disk" else 0.0
    assert ended.seconds < 10 * ends(sandbox, folder)["sleep"].seconds + longer
    assert "does not start" not in ended.errors


@pytest.mark.parametrize("sandbox", SANDBOXES_HERE)
def test_nothing_is_left_of_bombs(sandbox: str, folder: Path) -> None:
    ends(sandbox, folder)
    end = time.monotonic() + 120
    while is_running("/bombs.py") or is_running(MARK):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert [path.name for path in folder.iterdir() if path.name.startswith("slimelite-")] == []
