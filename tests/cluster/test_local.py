"""`--launcher local`: everything in this process ends with it."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from pathlib import Path

import pytest

from slimelite.arguments import parse_args
from slimelite.cluster import launch
from slimelite.rollout import manager
from tests.engines.tiny_models import build_model


async def stubborn() -> None:
    """As a plugin may be: it does not end when it is cancelled."""
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)


def test_an_interrupt_does_not_wait_for_the_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "CANCEL_S", 1.0)
    build_model(tmp_path / "model")
    prompts = [{"prompt": " ".join(f"w{n + m:02}" for m in range(8)), "label": ""} for n in range(20, 60)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    args = parse_args(
        [
            *("--launcher", "local", "--device", "cpu", "--rollout-backend", "embedded", "--debug-rollout-only"),
            *("--hf-checkpoint", str(tmp_path / "model"), "--run-dir", str(tmp_path / "run"), "--num-rollout", "1"),
            *("--prompt-data", str(tmp_path / "prompts.jsonl"), "--input-key", "prompt", "--label-key", "label"),
            *("--rm-type", "zero", "--rollout-batch-size", "500", "--n-samples-per-prompt", "8"),
            *("--rollout-max-response-len", "1500"),
        ]
    )
    with suppress(KeyboardInterrupt), launch(args) as cluster:
        cluster.generate(0)
        cluster._rollout.target._thread.submit(stubborn())  # type: ignore[attr-defined]
        time.sleep(1.0)
        interrupted = time.monotonic()
        raise KeyboardInterrupt
    assert time.monotonic() - interrupted < 10
