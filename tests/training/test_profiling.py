"""`Profiler`: which files it writes, and when."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slimelite.arguments import Args
from slimelite.training.profiling import Profiler

PROFILED = """
import json, sys
import torch
from slimelite.arguments import Args
from slimelite.training.profiling import Profiler

args = Args(run_dir=sys.argv[1], use_pytorch_profiler=True, profile_target=json.loads(sys.argv[2]))
profiler = Profiler(args, rank=1)
for rollout in (0, 9, 10, 11, 12):
    with profiler.rollout(rollout):
        with profiler.of_pass("ref_log_probs"):
            torch.ones(3, 3).mm(torch.ones(3, 3))
        with profiler.of_pass("actor_train"):
            torch.ones(3).cumsum(0)
"""


def names(file: Path) -> set[str]:
    """Of the operations in a profile."""
    return {str(event.get("name")) for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}


@pytest.mark.parametrize(
    ("targets", "files"),
    [
        (["train_overall"], {"train_overall-0000010-rank1", "train_overall-0000011-rank1"}),
        # a profiler cannot run within another
        (["train_log_probs", "train_overall"], {"train_overall-0000010-rank1", "train_overall-0000011-rank1"}),
        (["train_log_probs"], {"ref_log_probs-0000010-rank1", "ref_log_probs-0000011-rank1"}),
    ],
)
def test_the_steps_of_slime_are_profiled_unless_others_are_named(
    tmp_path: Path, targets: list[Any], files: set[str]
) -> None:
    # in a process of its own, as a trainer is: after thousands of tests torch's profiler once spun and did not start
    done = subprocess.run(
        [sys.executable, "-c", PROFILED, str(tmp_path), json.dumps(targets)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found = {file.name.removesuffix(".json.gz"): names(file) for file in (tmp_path / "profile").iterdir()}
    assert found.keys() == files
    for operations in found.values():
        assert "aten::mm" in operations
        assert ("aten::cumsum" in operations) == ("train_overall" in targets)


@pytest.mark.parametrize(("steps", "written_after"), [(2, 1), (None, None)])
def test_the_memory_is_remembered_until_then_and_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int | None, written_after: int | None
) -> None:
    """With stand-ins for what PyTorch has on GPUs alone."""
    recording: list[bool] = []
    observers: list[Any] = []
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda enabled="all", **_: recording.append(enabled)
    )
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_text("snapshot"))
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", observers.append, raising=False)
    file = tmp_path / "memory" / "memory-rank0.pickle"
    args = Args(run_dir=str(tmp_path), record_memory_history=True, memory_snapshot_dir=str(tmp_path / "memory"))
    profiler = Profiler(replace(args, memory_snapshot_num_steps=steps), rank=0)
    for rollout in range(3):
        with profiler.rollout(rollout):
            pass
        assert file.exists() == (written_after is not None and rollout >= written_after)
    assert recording == (["all"] if steps is None else ["all", None])
    profiler.close()
    profiler.close()
    assert file.exists()
    assert recording == ["all", None]
    file.unlink()
    (out_of_memory,) = observers
    out_of_memory(0, 1, 2, 3)
    assert file.exists()
