from __future__ import annotations

import io
import logging
import re

import pytest
from terminal import terminal

from slimelite.tracking.console import Console, duration, small, times

METRICS = {
    "rollout/raw_reward": 0.5,
    "eval": 0.75,
    "rollout/response_len/mean": 120.4,
    "train/loss": -0.0123,
    "train/kl_loss": 3e-6,
    "train/entropy_loss": 1.25,
    "train/grad_norm": 0.8,
    "tokens_per_sec": 18_300.0,
    "eta": 3725.0,
}
PHASES = {"gen": 3.0, "train": 1.25, "sync": 0.2, "save": 0.001}


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.346, "0.35s"), (7.14, "7.1s"), (42.4, "42s"), (185, "3m05s"), (7620, "2h07m")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_small_numbers_do_not_vanish() -> None:
    assert [small(v) for v in (0.0, -0.01234, 3.2e-6, float("nan"), 12345.6)] == [
        "0.0000",
        "-0.0123",
        "3e-06",
        "nan",
        "1.235e+04",
    ]


def test_errors_have_a_column_from_the_first_one_on() -> None:
    out = io.StringIO()
    console = Console(out)
    for errors in ({}, {"errors": 12.0}, {}):
        console.row("3/40", METRICS | errors, 4.5, PHASES)
    first, second = (line for line in out.getvalue().splitlines() if "reward" in line)
    assert "errors" not in first
    assert second.split()[1] == "errors"
    rows = [line.split() for line in out.getvalue().splitlines() if "3/40" in line]
    assert [row[1] for row in rows] == ["0.500", "12", "0.500"]


def test_a_row_is_plain_aligned_text_in_a_file() -> None:
    out = io.StringIO()
    console = Console(out)
    console.row("3/40", METRICS, 4.5, PHASES, best=True)
    console.row("4/40", METRICS, 4.5, PHASES)
    _, header, first, second = out.getvalue().splitlines()
    assert "\x1b" not in out.getvalue()
    assert header.split() == [
        "rollout",
        "reward",
        "eval",
        "length",
        "loss",
        "kl",
        "entropy",
        "grad",
        "tok/s",
        "eta",
        "time",
    ]
    assert first.split()[:10] == [
        "3/40",
        "0.500",
        "0.750",
        "120",
        "-0.0123",
        "3e-06",
        "1.250",
        "0.8000",
        "18.3k",
        "1h02m",
    ]
    assert first.endswith("4.5s: gen 3.0s, train 1.2s, sync 0.20s")  # the save took less than a hundredth
    for title in ("reward", "length", "kl", "eta"):
        end = header.index(title) + len(title)
        assert first[end - 1] != " " == first[end], "values end below the end of their title"
    assert second[9:] == first[9:]


def test_columns_appear_with_their_first_value_and_stay() -> None:
    out = io.StringIO()
    console = Console(out, always=["eval"])
    console.row("1/3", {"train/loss": 2.0}, 1.0, {})
    console.row("2/3", {"train/loss": 1.0, "train/grad_norm": 3.0}, 1.0, {})
    console.row("3/3", {"train/loss": 1.0}, 1.0, {})
    headers = [line.split() for line in out.getvalue().splitlines() if "rollout" in line]
    assert headers == [["rollout", "eval", "loss", "time"], ["rollout", "eval", "loss", "grad", "time"]]


def test_the_header_comes_back_after_something_else_was_printed() -> None:
    out = io.StringIO()
    console = Console(out)
    for _ in range(45):
        console.row("1/9", METRICS, 1.0, {})
    assert out.getvalue().count("reward") == 3
    console.block("a table")
    console.row("1/9", METRICS, 1.0, {})
    assert out.getvalue().count("reward") == 4


@pytest.mark.parametrize("width", [60, 80, 100, 120, 160])
def test_a_terminal_of_any_width_gets_rows_that_fit(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    with terminal() as screen:
        console = Console(screen.stream)
        console.row("3/40", METRICS, 4.5, PHASES, best=True)
    lines = [line for line in plain(screen.shown).splitlines() if line]
    assert len(lines) == 2, "nothing was wrapped"
    assert all(len(line.rstrip()) <= width for line in lines)
    assert "gen 3.0s" in lines[1]
    assert "0.500" in lines[1]
    assert ("entropy" in lines[0]) == (width >= 120)


def test_colour_is_for_terminals() -> None:
    with terminal() as screen:
        Console(screen.stream).row("3/40", METRICS, 4.5, PHASES, best=True)
    assert "\x1b[1;32m0.750" in screen.shown


def test_times_keep_the_longest_phases() -> None:
    assert times(4.5, PHASES, 100) == "4.5s: gen 3.0s, train 1.2s, sync 0.20s"
    assert times(4.5, PHASES, 30) == "4.5s: gen 3.0s, train 1.2s"
    assert times(4.5, PHASES, 3) == "4.5s"


def test_warnings_of_our_packages_are_shown_with_brackets_intact() -> None:
    out = io.StringIO()
    console = Console(out)
    with console.warnings():
        logging.getLogger("slimelite.rewards").warning("reward of [bold]sample[/bold] 7 failed")
        logging.getLogger("slimelite.rewards").info("quiet")
        logging.getLogger("elsewhere").warning("not ours")
    logging.getLogger("slimelite.rewards").warning("not any more")
    assert out.getvalue() == "warning: reward of [bold]sample[/bold] 7 failed\n"


def test_facts_are_aligned() -> None:
    out = io.StringIO()
    Console(out).facts({"model": "a/b", "run folder": "runs/x"})
    assert out.getvalue() == "  model       a/b\n  run folder  runs/x\n"
