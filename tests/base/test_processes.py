"""What the kernel says about processes: which of them it has killed for their memory."""

from __future__ import annotations

import pytest

from slimelite.base import processes
from slimelite.base.processes import MemoryKills


@pytest.mark.parametrize(
    ("looks", "asked", "expected"),
    [
        # (time [s], the kernel's count) when the monitor looks; when a worker has died; the kills that may be its
        ([(0, 5), (20, 5), (40, 6)], (41, 6), 1),
        ([(0, 5), (20, 6), (40, 6), (60, 6)], (61, 6), 0),
        ([(0, 5), (20, 5), (40, 5)], (41, 7), 2),
        ([(0, 5)], (3600, 5), 0),
        ([(0, 5)], (3600, 6), None),  # nobody looks with --hang-timeout 0: the kill may be an hour old
    ],
)
def test_kills_for_memory_are_recent_ones(
    monkeypatch: pytest.MonkeyPatch, looks: list[tuple[int, int]], asked: tuple[int, int], expected: int | None
) -> None:
    now = [0, 5]
    monkeypatch.setattr(processes, "_memory_kills", lambda: now[1])
    monkeypatch.setattr(processes.time, "monotonic", lambda: float(now[0]))
    kills = MemoryKills()
    for look in looks[1:]:
        now[:] = look
        kills.look()
    now[:] = asked
    assert kills.recent() == expected


def test_a_kernel_that_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_memory_kills", lambda: None)
    assert MemoryKills().recent() is None
