"""Warm-up and decay."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest

from slimelite.arguments import OptimizerArgs
from slimelite.training.lr_schedule import LrSchedule

RUN = 100


def rates(**given: Any) -> list[float]:
    schedule = LrSchedule.from_args(OptimizerArgs(lr=1.0, **given))
    return [schedule.at(step, RUN) for step in range(RUN + 10)]


def test_constant_after_warm_up() -> None:
    lr = rates(lr_warmup_iters=4, lr_warmup_init=0.2)
    assert lr[:6] == pytest.approx([0.4, 0.6, 0.8, 1.0, 1.0, 1.0])
    assert set(lr[4:]) == {1.0}
    assert rates()[0] == 1.0


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_decay_from_peak_to_minimum_over_the_run(style: str) -> None:
    lr = rates(lr_decay_style=style, min_lr=0.1, lr_warmup_fraction=0.1)
    assert lr[9] == lr[10] == 1.0
    assert lr[RUN:] == [0.1] * 10
    assert all(a > b for a, b in pairwise(lr[10 : RUN + 1]))
    assert lr[55] == pytest.approx(0.55), "both styles are half way in the middle"


def test_decay_iters_win_over_the_run() -> None:
    lr = rates(lr_decay_style="linear", lr_decay_iters=10)
    assert lr[5] == pytest.approx(0.5)
    assert lr[10] == 0.0


def test_inverse_square_root() -> None:
    lr = rates(lr_decay_style="inverse-square-root", lr_warmup_iters=4, min_lr=0.25)
    assert lr[3] == 1.0
    assert lr[15] == pytest.approx(math.sqrt(4 / 16))
    assert lr[-1] == 0.25


@pytest.mark.parametrize(
    ("style", "half"), [("linear", 0.5), ("cosine", 0.5), ("exponential", 2**0.5 - 1), ("minus_sqrt", 1 - 0.5**0.5)]
)
def test_wsd_is_stable_then_decays(style: str, half: float) -> None:
    lr = rates(lr_decay_style="WSD", lr_wsd_decay_style=style, lr_wsd_decay_iters=20, lr_warmup_iters=5)
    assert set(lr[4:81]) == {1.0}
    assert lr[90] == pytest.approx(half)
    assert lr[RUN] == 0.0


def test_wsd_needs_the_length_of_its_last_phase() -> None:
    with pytest.raises(ValueError, match="--lr-wsd-decay-iters"):
        rates(lr_decay_style="WSD")
