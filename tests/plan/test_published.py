"""Seconds of published steps of GRPO are planned from their settings; which rows gave constants stands in the file."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from slimelite.plan import time
from slimelite.plan.devices import gpus
from slimelite.plan.memory import Load, Shapes
from slimelite.plan.time import Work

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "lab"))
from planner_published import ROOT, ROWS, planned, table


def off(name: str) -> float:
    """The factor between planned and published seconds, above 1."""
    ratio = sum(planned(ROWS[name]).values()) / ROWS[name]["seconds"]
    return max(ratio, 1 / ratio)


@pytest.mark.parametrize("name", ROWS)
def test_published_seconds_are_planned(name: str) -> None:
    assert off(name) < (1.5 if ROWS[name].get("fitted") else 2.0)
    assert sum(bool(row.get("fitted")) for row in ROWS.values()) == 2


def test_a_small_model_is_planned_far_too_fast_without_what_steps_and_hosts_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("LAYER", "HOST", "BETWEEN", "BUCKET"):
        monkeypatch.setattr(time, name, 0.0)
    assert off("verl-qwen-05b") > 4


@pytest.mark.parametrize(("compiled", "published"), [(False, 5762), (True, 6667)])
def test_tokens_a_second_that_torchtitan_published(compiled: bool, published: int) -> None:
    """Llama-3.1-8B, FSDP on eight H100 of 2.4 TB/s, 2 x 8,192 tokens, every second layer recomputed, December 2024."""
    shapes = Shapes.of(ROWS["nemo-llama-8b"]["model"])
    assert shapes is not None
    device, work = replace(gpus()["h100"], bandwidth=2.4e12), Work(16, 1, 1, 8191, 1, shares=False)
    loads = [Load(shapes, 16384, shards=8, compiled=compiled, checkpointing=again) for again in (False, True)]
    seconds = sum(time.train(load, work, 8, device).seconds(device) for load in loads) / 2
    assert 16384 / seconds == pytest.approx(published, rel=0.15)


@pytest.mark.parametrize(("title", "compiled"), [("plain", False), ("`--compile`", True)])
def test_a_step_takes_what_the_count_of_its_kernels_gives(title: str, compiled: bool) -> None:
    """docs/gpu_status.md has the milliseconds of scripts/lab/predict_mfu.py."""
    page = (ROOT / "docs" / "gpu_status.md").read_text().partition("## Speed: a prediction")[2]
    counted = next(line.split("|")[2] for line in page.splitlines() if line.startswith(f"| {title} |"))
    shapes = Shapes.of(ROWS["verl-qwen-05b"]["model"])
    assert shapes is not None
    found = time.train(Load(shapes, 9216, compiled=compiled), Work(9, 1, 128, 896, 1, shares=False), 1, gpus()["h100"])
    assert 1000 * found.seconds(gpus()["h100"]) == pytest.approx(float(counted), rel=0.15)


def test_the_page_has_the_table() -> None:
    assert "\n".join(table()) in (ROOT / "docs" / "planner.md").read_text()
