"""Weight pushes that fail: one more try under fault tolerance, and no rank that waits for another."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from slimelite.arguments import Args
from slimelite.cluster import Cluster, ClusterError
from slimelite.cluster.workers import EngineFactory
from slimelite.engines.protocol import SyncSetup, WeightBucket, WeightSink, WeightSyncError
from slimelite.engines.sglang.server import Server
from slimelite.engines.sglang.sync import build_sink
from slimelite.samples.sample import Sample
from slimelite.samples.table import SampleTable
from slimelite.training.weights import buckets
from tests.cluster.workers import Worker
from tests.engines.bracketing import Bracketing, bracketing_server
from tests.engines.tiny_models import build_model
from tests.ranks import start_ranks

CPU = torch.device("cpu")
NOBODY = Server("http://127.0.0.1:9")


class Trainer(Worker):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.weights = weights_of(folder)

    def push_weights(self, sink: WeightSink, version: int) -> dict[str, float]:
        push(sink, version, self.weights)
        return {}

    def memory_used(self) -> float:
        return 0.0


class Rollout(Worker):
    """Mends the server each time that engines are to settle, if it can."""

    def __init__(self, server: Bracketing, room: list[int]) -> None:
        super().__init__()
        self.server, self.room = server, room

    def settle_engines(self) -> None:
        self.server.full = self.room.pop(0)


def weights_of(folder: Path) -> dict[str, Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def push(sink: WeightSink, version: int, weights: dict[str, Tensor]) -> None:
    sink.begin(version)
    for bucket in buckets(iter(weights.items()), 10_000):
        sink.send(bucket)
    sink.end()


def has(server: Bracketing, weights: dict[str, Tensor], version: int) -> bool:
    whole = all(torch.equal(server.weights[name], tensor) for name, tensor in weights.items())
    return whole and (server.version, server.open, server.paused) == (str(version), False, False)


class Mortals(Worker):
    """Engines that all die when a rollout has been generated ahead, in a trainer that has gone on."""

    def __init__(self) -> None:
        super().__init__()
        self.dead, self.pushed, self.rollout = False, 0, Future[Any]()

    def start(self, method: str, /, *args: Any, **named: Any) -> Future[Any]:
        return self.rollout if method == "generate" else super().start(method, *args, **named)

    def settle_engines(self) -> None: ...

    def needs_weights(self) -> bool:
        return self.dead

    def progress(self) -> tuple[int, int, str]:
        return 0, 1, ""

    def train(self, *_: Any) -> dict[str, float]:
        return {}

    def outcome(self) -> tuple[list[Any], dict[str, Any], None]:
        return [], {}, None

    def memory_used(self) -> float:
        return 0.0

    def push_weights(self, *_: Any) -> dict[str, float]:
        self.pushed, self.dead = self.pushed + 1, False
        if self.pushed > 1:
            self.rollout.set_result("rollout")
        return {}


@pytest.mark.parametrize(("trained", "timeout"), [(False, None), (False, 60.0), (True, None)])
def test_engines_that_lost_all_weights_get_those_that_the_rollout_began_with_or_none(
    trained: bool, timeout: float | None
) -> None:
    args = Args(rollout_backend="sglang", use_fault_tolerance=True, offload_train=True)
    both = Mortals()
    cluster = Cluster(args, both, [both], ["engine"])
    cluster.sync(0).result()
    rollout = cluster.generate(1)
    if trained:
        cluster.train(
            0, SampleTable.from_samples([[Sample(0, 0, tokens=[1, 2], response_length=1, reward=0.0)]])
        ).result()
    both.dead = True
    if trained:
        for waits in (rollout, cluster.sync(1)):  # the sync comes after the rollout
            with pytest.raises(ClusterError, match="weights have changed"):
                waits.result()
    else:
        assert rollout.result(timeout) == "rollout"
    assert both.pushed == 2 - trained


@pytest.mark.parametrize(
    ("tolerant", "room", "works"),
    [(True, [2, 1000], True), (True, [2, 2], False), (False, [2, 1000], False)],
)
def test_a_push_is_tried_once_more_where_faults_are_tolerated(
    tolerant: bool, room: list[int], works: bool, tmp_path: Path
) -> None:
    build_model(tmp_path)
    args = Args(
        hf_checkpoint=str(tmp_path),
        device="cpu",
        rollout_backend="sglang",
        update_weight_transport="http",
        use_fault_tolerance=tolerant,
    )
    with bracketing_server() as server:
        server.model_path = str(tmp_path)
        sync = EngineFactory(args).transport(CPU).to([Server(server.url)])
        trainer, rollout = Trainer(tmp_path), Rollout(server, list(room))
        cluster = Cluster(args, rollout, [trainer], sync)
        if works:
            cluster.sync(7).result()
            assert has(server, trainer.weights, 7)
        else:
            with pytest.raises(ClusterError, match=r"weights 7 did not reach every engine: .*out of memory"):
                cluster.sync(7).result()
            assert (server.version, server.paused) == ("default", True)
        assert len(rollout.room) == (1 if not tolerant else 0)


def test_ranks_that_share_gpus_with_engines_fail_together_and_only_those_with_an_engine_offer_weights(
    tmp_path: Path,
) -> None:
    build_model(tmp_path)
    with bracketing_server() as server:
        server.model_path = str(tmp_path)
        start_ranks(two_ranks, (str(tmp_path), server.url), 2)
        assert has(server, weights_of(tmp_path), 3)


def two_ranks(rank: int, folder: str, url: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    sync = build_sink(SyncSetup(folder, "ipc", CPU, "127.0.0.1"))
    # the second rank alone does not reach the server
    with pytest.raises(WeightSyncError, match="weights 1 did not reach any engine"):
        sync.to([NOBODY if rank else Server(url)]).begin(1)
    # there is a server on one rank's GPU alone (a placeholder on the other): what that has is not even looked at
    for version, on in ((2, 0), (3, 1)):
        sync.to([Server(url, first_gpu=on)]).begin(version)
        for bucket in buckets(iter(weights_of(Path(folder)).items()), 10_000):
            sync.send(bucket if rank == on else WeightBucket(bucket.names, bucket.shapes, torch.zeros(1).expand(4)))
        sync.end()
    dist.destroy_process_group()
