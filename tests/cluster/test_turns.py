"""Trainers and engines on the same GPUs: who has the memory when, by the calls that the workers get."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

import train
from slimelite.arguments import Args
from slimelite.cluster.cluster import Cluster
from slimelite.cluster.ray_cluster import start_workers

# answers of a worker that somebody reads
ANSWERS: dict[str, Any] = {
    "generate": SimpleNamespace(table=SimpleNamespace(without_text=lambda: None), metrics={}),
    "memory_used": 1.0,
    "train": {},
    "push_weights": {},
    "cpu_seconds": 0.0,
    "rendezvous": "tcp://somewhere:1",
}


class Worker:
    """Notes what it is asked in a list that all share; what ``waits`` names is answered when a test says so."""

    def __init__(self, name: str, calls: list[str], waits: str = "") -> None:
        self.name, self.calls, self.waits = name, calls, waits
        self.open: list[Future[Any]] = []

    def submit(self, method: str, *args: Any) -> Future[Any]:
        tags = args[0] if method == "resume_memory" else ()
        self.calls.append(" ".join([self.name, method, *tags]))
        future: Future[Any] = Future()
        if method == self.waits:
            self.open.append(future)
        else:
            future.set_result(ANSWERS.get(method))
        return future


class Silent:
    """A tracker that tracks nothing."""

    @contextmanager
    def phase(self, _name: str) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(update=None)

    def __getattr__(self, _name: str) -> Any:
        return lambda *_: None


def test_the_trainer_gives_its_memory_back_before_the_engine_takes_any() -> None:
    calls: list[str] = []
    args = Args(
        device="cuda",
        rollout_backend="embedded",
        colocate=True,
        offload_rollout=True,
        offload_train=True,
        num_rollout=2,
        start_rollout_id=0,
    )
    cluster = Cluster(args, Worker("engines", calls), [Worker("trainer", calls)], ["an engine"])
    train.train(args, cluster, Silent())  # type: ignore[arg-type]
    moves = [c for c in calls if c.split()[1] not in ("memory_used", "cpu_seconds", "step_metrics", "own_advantages")]
    update = [
        "trainer offload",
        "engines resume_memory weights",
        "trainer push_weights",
        "engines resume_memory kv_cache cuda_graph",
    ]
    rollout = ["engines generate", "engines release_memory", "trainer onload", "trainer train", *update]
    assert [c.replace(" settle_engines", "") for c in moves] == [*update, *rollout, *rollout]


@pytest.mark.parametrize(("shared", "released"), [(True, True), (True, False), (False, False)])
def test_they_never_load_at_once_on_the_same_gpus(shared: bool, released: bool) -> None:
    """SGLang sizes its KV cache by what is free when it starts, and refuses GPUs that are not equally free."""
    calls: list[str] = []
    engine = Worker("engine", calls, waits="start")
    workers = Worker("rollout", calls), [Worker("trainer", calls)], [engine]
    args = Args(device="cuda", colocate=shared, offload_rollout=released, rollout_backend="sglang")
    seen: list[list[str]] = []

    def progress(_up: int, _total: int, text: str) -> None:
        if "engine" in text and engine.open:  # it loads: what has begun beside it?
            seen.append(list(calls))
            engine.open.pop().set_result(None)

    start_workers(args, *workers, progress)
    assert len(seen) == 1
    assert ("trainer start" in seen[0]) != shared
    order = [c for c in calls if c in ("engine start", "rollout release_memory", "trainer start")]
    if shared:
        assert order == ["engine start", *(["rollout release_memory"] if released else []), "trainer start"]
    assert "trainer start" in calls


def test_trainers_meet_with_the_nccl_settings_of_sglangs_servers() -> None:
    """SGLang sets it in its own process, and a broadcast needs the same on both sides. A value of the user's stays."""
    program = (
        "import os; from slimelite.arguments import Args; from slimelite.training.parallel import join_world;"
        "join_world(Args(device='cpu'), 0, 1, None).close(); print(os.environ['NCCL_CUMEM_ENABLE'])"
    )
    clean = {k: v for k, v in os.environ.items() if k != "NCCL_CUMEM_ENABLE"}
    for given, seen in (({}, "0"), ({"NCCL_CUMEM_ENABLE": "1"}, "1")):
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env={**clean, **given}, capture_output=True, text=True, check=False)
        assert done.stdout.strip() == seen, done.stderr
