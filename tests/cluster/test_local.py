"""`--launcher local`: everything in this process ends with it."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from slimelite.arguments import Args, parse_args
from slimelite.cluster import launch
from slimelite.models.files import weight_shapes
from slimelite.rollout import manager
from tests.engines.tiny_models import build_model


async def stubborn() -> None:
    """As a plugin may be: it does not end when it is cancelled."""
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)


ROOT = Path(__file__).parent.parent.parent


def tiny_run(folder: Path, *flags: str) -> Args:
    """A tiny model that answers prompts in this process."""
    return parse_args(tiny_flags(folder, "--launcher", "local", *flags))


def tiny_flags(folder: Path, *flags: str) -> list[str]:
    """Flags of a run of a tiny model, which this makes, with prompts."""
    build_model(folder / "model")
    prompts = [{"prompt": " ".join(f"w{n + m:02}" for m in range(8)), "label": ""} for n in range(20, 60)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    return [
        *("--device", "cpu", "--rollout-backend", "embedded", "--num-rollout", "1"),
        *("--hf-checkpoint", str(folder / "model"), "--run-dir", str(folder / "run")),
        *("--prompt-data", str(folder / "prompts.jsonl"), "--input-key", "prompt", "--label-key", "label"),
        *("--rm-type", "zero", "--n-samples-per-prompt", "8"),
        *flags,
    ]


def test_an_interrupt_does_not_wait_for_the_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To wait for it would take longer than a test may take."""
    monkeypatch.setattr(manager, "CANCEL_S", 1.0)
    args = tiny_run(
        tmp_path, "--debug-rollout-only", "--rollout-batch-size", "4000", "--rollout-max-response-len", "1500"
    )
    with suppress(KeyboardInterrupt), launch(args) as cluster:
        cluster.generate(0)
        cluster._rollout.target._thread.submit(stubborn())  # type: ignore[attr-defined]
        time.sleep(1.0)
        raise KeyboardInterrupt


def test_weights_come_out_of_the_handle_and_a_checkpoint_goes_back_in(tmp_path: Path) -> None:
    flags = ("--rollout-batch-size", "2", "--rollout-max-response-len", "8", "--lr", "1e-2", "--colocate")
    with launch(tiny_run(tmp_path, *flags, "--save", str(tmp_path / "saved"), "--save-interval", "1")) as cluster:
        cluster.sync(0)
        table = cluster.generate(0).result().table
        cluster.save(0)
        before = cluster.get_weights().result()
        shapes = weight_shapes(tmp_path / "model")
        assert {name: tuple(tensor.shape) for name, tensor in before.items()} == shapes
        table.advantage[:] = np.linspace(-1, 1, len(table))  # the loop's own
        gradient, step = cluster.forward_backward(table), cluster.optim_step()
        assert gradient.result()["train/pg_loss"] == pytest.approx(0, abs=1e-5)
        assert step.result()["train/grad_norm"] > 0
        after = cluster.get_weights().result()
        assert max(float((after[name] - before[name]).abs().max()) for name in before) > 1e-3
        assert cluster.load(tmp_path / "saved").result() == 1
        again = cluster.get_weights().result()
        assert all(torch.equal(again[name], before[name]) for name in before)
