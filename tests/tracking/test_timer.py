from __future__ import annotations

from collections.abc import Iterator

import pytest

from slimelite.tracking.console import Timer


def ticks(*times: float) -> Iterator[float]:
    return iter(times)


def test_phases_add_up_and_the_rest_of_the_step_is_waiting() -> None:
    clock = ticks(0.0, 1.0, 4.0, 4.0, 6.0, 7.0, 8.0, 10.0, 10.0)
    timer = Timer(lambda: next(clock))
    with timer("rollout"):  # 1 .. 4
        pass
    with timer("train"):  # 4 .. 6
        pass
    with timer("rollout"):  # 7 .. 8
        pass
    assert timer.finish_step() == {
        "perf/rollout_time": 4.0,
        "perf/train_time": 2.0,
        "perf/step_time": 10.0,
        "perf/train_wait_time": 8.0,
        "perf/wait_time_ratio": 0.8,
    }


def test_the_next_step_begins_where_the_last_one_ended() -> None:
    clock = ticks(0.0, 5.0, 5.0, 9.0, 9.0)
    timer = Timer(lambda: next(clock))
    timer.finish_step()
    assert timer.finish_step() == {"perf/step_time": 4.0}


def test_a_phase_that_raises_is_timed_too() -> None:
    clock = ticks(0.0, 1.0, 3.0)
    timer = Timer(lambda: next(clock))
    with pytest.raises(KeyError), timer("eval"):
        raise KeyError
    assert timer.seconds == {"eval": 2.0}
