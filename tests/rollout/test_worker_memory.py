"""What the process of the rollout side keeps once its samples are a table."""

from __future__ import annotations

import psutil
import pytest

from slimelite.base import heap
from slimelite.rollout import manager
from tests.rollout.conftest import MakeArgs, MakeManager
from tests.rollout.scripted import ScriptedEngine


@pytest.mark.skipif(heap.GLIBC is None, reason="another C library")
def test_the_memory_of_samples_goes_back_to_the_system(
    make_args: MakeArgs, make_manager: MakeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The samples' lists alone are 16 MB."""
    tokens = 4000
    engine = ScriptedEngine(length=lambda _: tokens, max_context_len=2 * tokens)
    args = make_args(launcher="ray", rollout_batch_size=16, n_samples_per_prompt=8, rollout_max_response_len=tokens)

    def freed_and_held(kept: int) -> int:
        """The free heap memory [bytes] that a rollout leaves if up to ``kept`` bytes of it stay."""
        monkeypatch.setattr(manager, "SAMPLES_BYTES", kept)
        table = make_manager(args, [engine]).generate(0).table
        assert len(table.response_tokens) == 128 * tokens
        held = psutil.Process().memory_info().rss
        heap.return_freed_memory(above=0)
        return held - psutil.Process().memory_info().rss

    all_of_it = freed_and_held(2**62)
    assert freed_and_held(0) < all_of_it / 2
