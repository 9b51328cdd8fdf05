from __future__ import annotations

import io
import re
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from fake_run import make_args, make_tracker
from terminal import terminal

from slimelite.tracking.console import Console, Phase


def test_elsewhere_a_line_now_and_then_says_how_far_it_is() -> None:
    out = io.StringIO()
    with Phase(Console(out), "generate", line_every=0.05) as phase:
        phase.update(16, 64, "groups")
        begin = time.monotonic()
        while out.getvalue().count("\n") < 4:
            time.sleep(0.01)
    lines = out.getvalue().splitlines()
    assert re.fullmatch(r"  generate: 16/64 groups, [\d.]+s, about [\d.]+s left", lines[0])
    assert len(lines) <= 1 + (time.monotonic() - begin) / 0.05


def test_a_phase_that_reports_nothing_still_shows_life() -> None:
    out = io.StringIO()
    with Phase(Console(out), "train", line_every=0.05):
        while "\n" not in out.getvalue():
            time.sleep(0.01)
    assert re.match(r"  train: [\d.]+s\n", out.getvalue())


def test_the_phases_of_a_rollout_have_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("slimelite.tracking.tracker.Phase", partial(Phase, line_every=0.05))
    said: list[str] = []

    def heard() -> bool:
        found = re.findall(r"^  (\D+(?:\d of 9, \w+)?): [\d.]+s$", capsys.readouterr().out, re.MULTILINE)
        said.extend(found)
        return bool(found)

    with make_tracker(make_args(tmp_path, start_rollout_id=7, num_rollout=9)) as tracker:
        for name in ("start", "generate", "train", "generate"):
            with tracker.phase(name):
                while not heard():
                    time.sleep(0.1)
            if name == "train":
                tracker.finish_rollout(7)
    assert list(dict.fromkeys(said)) == [
        "start",
        "rollout 8 of 9, generate",
        "rollout 8 of 9, train",
        "rollout 9 of 9, generate",
    ]


def test_a_short_phase_says_nothing() -> None:
    out = io.StringIO()
    with Phase(Console(out), "train") as phase:
        phase.update(1, 2)
    with terminal() as screen:
        console = Console(screen.stream)
        with Phase(console, "train"):
            pass
    assert (out.getvalue(), screen.shown) == ("", "")


def test_a_terminal_shows_a_bar_that_goes_away() -> None:
    before = threading.active_count()
    with terminal() as screen:
        console = Console(screen.stream)
        with Phase(console, "generate") as phase:
            phase.update(3, 4, "groups")
            screen.wait_for("3/4 groups")
            console.line("a line above the bar")
        console.line("the end")
    assert "generate" in screen.shown
    assert "━" in screen.shown
    assert "\x1b[2K" in screen.shown.split("a line above the bar")[1], "the bar was erased"
    assert screen.shown.rstrip().endswith("the end")
    assert threading.active_count() == before
