from __future__ import annotations

import io
import logging

import numpy as np
import pytest
from fake_run import make_table

from slimelite.tracking.console import Console, middle_out, one_line, samples_table, spread, tail


def test_rows_span_the_rewards() -> None:
    rewards = np.array([0.0, 3.0, 1.0, 2.0, 4.0])
    assert spread(rewards, 3) == [4, 3, 0]
    assert spread(rewards, 99) == [4, 1, 3, 2, 0]
    assert spread(rewards[:1], 4) == [0]


def test_what_a_model_says_cannot_drive_the_terminal() -> None:
    assert one_line(" a\n\nb\t\x1b[31mred\x07 ") == "a↵↵b\\t\\x1b[31mred\\x07"
    assert one_line("naïve 中文 \u200b") == "naïve 中文 \\u200b"


def test_long_texts_keep_the_parts_that_matter() -> None:
    assert tail("x" * 500 + "?").endswith("x?")
    assert len(tail("x" * 500)) == 161
    text = "begin" + "." * 900 + "end"
    assert middle_out(text).startswith("begin")
    assert middle_out(text).endswith("end")
    assert len(middle_out(text)) < 400


def test_the_table_shows_text_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    out = io.StringIO()
    with caplog.at_level(logging.INFO, "slimelite.console"):
        Console(out).block(samples_table("samples of rollout 1", make_table(quality=0.5)))
    text = out.getvalue()
    assert "samples of rollout 1" in text
    assert "I think [bold]2\\x1b[31m1" in text
    assert "0 + 0 = 0↵so \\boxed{0}" in text
    assert "\x1b" not in text
    assert "0 + 0 = 0↵so" in caplog.text


def test_components_of_a_reward_stand_below_it(caplog: pytest.LogCaptureFixture) -> None:
    out, table = io.StringIO(), make_table(prompts=1, samples=1)
    table.reward_components = ['{"total": 0.5, "correct": true, "\\u001b[31mred": 2, "comment": "fine"}']
    with caplog.at_level(logging.INFO, "slimelite.console"):
        Console(out).block(samples_table("samples", table))
    assert all(part in out.getvalue() for part in ("total 0.5", "correct 1", "\\x1b[31mred 2"))
    assert "fine" not in out.getvalue()
    assert "reward 1, total 0.5, correct 1" in caplog.text
