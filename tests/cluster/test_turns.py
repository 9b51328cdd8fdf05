"""Trainers and engines on the same GPUs: who has the memory when, by the calls that the workers get."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import train
from slimelite.arguments import Args
from slimelite.cluster.cluster import Cluster
from slimelite.cluster.ray_cluster import start_workers
from slimelite.samples.sample import Sample
from slimelite.samples.table import SampleTable
from slimelite.training.parallel import join_world
from tests.cluster.workers import Noting

TABLE = SampleTable.from_samples([[Sample(0, 0, tokens=[1, 2], response_length=1, reward=0.0)]])
# answers of a worker that somebody reads
ANSWERS: dict[str, Any] = {
    "generate": SimpleNamespace(table=TABLE, metrics={}),
    "memory_used": 1.0,
    "train": {},
    "outcome": ([], {}, None),
    "push_weights": {},
    "cpu_seconds": 0.0,
    "rendezvous": "tcp://somewhere:1",
}


class Silent:
    """A tracker that tracks nothing."""

    @contextmanager
    def phase(self, _name: str) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(update=None)

    def __getattr__(self, _name: str) -> Any:
        return lambda *_: None


# trainer and engine take turns on one GPU
ONE_GPU = Args(
    device="cuda",
    rollout_backend="embedded",
    colocate=True,
    offload_rollout=True,
    offload_train=True,
    start_rollout_id=0,
)


def test_the_trainer_gives_its_memory_back_before_the_engine_takes_any() -> None:
    calls: list[str] = []
    args = replace(ONE_GPU, num_rollout=2)
    with Cluster(
        args, Noting("engines", calls, ANSWERS), [Noting("trainer", calls, ANSWERS)], ["an engine"]
    ) as cluster:
        train.train(cluster, Silent())  # type: ignore[arg-type]
    asked = ("memory_used", "cpu_seconds", "outcome")
    moves = [c for c in calls if c.split()[1] not in asked]
    update = [
        "trainer offload",
        "engines resume_memory weights",
        "trainer push_weights",
        "engines resume_memory kv_cache cuda_graph",
    ]
    rollout = ["engines generate", "engines release_memory", "trainer onload", "trainer train", *update]
    assert [c.replace(" settle_engines", "") for c in moves] == [*update, *rollout, *rollout]


def test_the_best_model_is_saved_from_where_the_trainer_computes(tmp_path: Path) -> None:
    """An evaluation leaves the GPUs to the engines; the trainer comes back, and the engines get weights again."""
    calls: list[str] = []
    args = replace(
        ONE_GPU,
        num_rollout=1,
        eval_interval=1,
        skip_eval_before_train=True,
        early_stop_metric="eval/sums",
        save_best=True,
        save_hf=str(tmp_path / "model"),
    )
    answers = {**ANSWERS, "evaluate": SimpleNamespace(metrics={"eval/sums": 0.5}, tables={})}
    with Cluster(
        args, Noting("engines", calls, answers), [Noting("trainer", calls, answers)], ["an engine"]
    ) as cluster:
        train.train(cluster, Silent())  # type: ignore[arg-type]
    update = ["trainer offload", "engines resume_memory", "trainer push_weights", "engines resume_memory"]
    moves = [" ".join(c.split()[:2]) for c in calls[calls.index("engines evaluate") :]]
    kept = [c for c in moves if c.split()[1] not in ("memory_used", "cpu_seconds", "settle_engines")]
    assert kept == ["engines evaluate", "engines release_memory", "trainer onload", "trainer save_hf", *update]


@pytest.mark.parametrize(("shared", "released"), [(True, True), (True, False), (False, False)])
def test_they_never_load_at_once_on_the_same_gpus(shared: bool, released: bool) -> None:
    """SGLang sizes its KV cache by what is free when it starts, and refuses GPUs that are not equally free."""
    calls: list[str] = []
    engine = Noting("engine", calls, waits="start")
    workers = Noting("rollout", calls), [Noting("trainer", calls)], [engine]
    args = Args(device="cuda", colocate=shared, offload_rollout=released, rollout_backend="sglang")
    seen: list[list[str]] = []

    def progress(_up: int, _total: int, text: str) -> None:
        if "engine" in text and engine.open:  # it loads: what has begun beside it?
            seen.append(list(calls))
            engine.open.pop().set_result(None)

    start_workers(args, *workers, progress)  # type: ignore[arg-type]
    assert len(seen) == 1
    assert ("trainer make_trainer" in seen[0]) != shared
    order = [c for c in calls if c in ("engine start", "rollout release_memory", "trainer make_trainer")]
    if shared:
        assert order == ["engine start", *(["rollout release_memory"] if released else []), "trainer make_trainer"]
    assert "trainer make_trainer" in calls


def test_trainers_meet_with_the_nccl_settings_of_sglangs_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang sets it in its own process, and a broadcast needs the same on both sides. A value of the user's stays."""
    name = "NCCL_CUMEM_ENABLE"
    monkeypatch.setenv(name, "1")
    join_world(Args(device="cpu"), 0, 1, None).close()
    assert os.environ[name] == "1"
    monkeypatch.delenv(name)
    join_world(Args(device="cpu"), 0, 1, None).close()
    assert os.environ[name] == "0"
