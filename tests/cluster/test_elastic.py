"""``--elastic``: the ranks and engines with which a run fits the nodes that are left."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slimelite.arguments import Args
from slimelite.cluster.elastic import smaller

CPU = replace(Args(), device="cpu", launcher="ray", rollout_backend="embedded")
FIRST = "a"


def run_of(nodes: int, per_node: int, gpus: int, width: int = 1, colocate: bool = False) -> Args:
    return replace(
        CPU,
        actor_num_nodes=nodes,
        actor_num_gpus_per_node=per_node,
        rollout_num_gpus=gpus,
        rollout_num_gpus_per_engine=width,
        num_engines=gpus // width,
        dp_replicate_size=1,
        colocate=colocate,
    )


@pytest.mark.parametrize(
    ("args", "free", "words"),
    [
        # all are there
        (run_of(2, 2, 4), {"a": 4, "b": 4}, []),
        # a node of ranks and engines is gone
        (run_of(2, 2, 4), {"a": 4}, ["--actor-num-nodes", "1", "--rollout-num-gpus", "2"]),
        # the node of the engines is gone: all ranks stay, with the engines that have room
        (run_of(1, 2, 8), {"a": 8}, ["--rollout-num-gpus", "6"]),
        (run_of(1, 2, 8, width=4), {"a": 8}, ["--rollout-num-gpus", "4"]),
        # of three nodes of ranks two are left
        (run_of(3, 4, 3), {"a": 5, "b": 5}, ["--actor-num-nodes", "2", "--rollout-num-gpus", "2"]),
        # engines on the devices of the ranks shrink with them
        (run_of(2, 4, 8, colocate=True), {"a": 4}, ["--actor-num-nodes", "1", "--rollout-num-gpus", "4"]),
        (run_of(2, 4, 8, width=2, colocate=True), {"b": 4}, ["--actor-num-nodes", "1", "--rollout-num-gpus", "4"]),
        # replicas must divide the ranks: 4 nodes, not 5
        (
            replace(run_of(6, 1, 2), dp_replicate_size=2),
            dict.fromkeys("abcdef", 1),
            ["--actor-num-nodes", "4"],
        ),
        # an engine stays within a node
        (run_of(1, 4, 4, width=4), {"a": 4, "b": 3}, None),
        (run_of(1, 4, 4), {}, None),
    ],
)
def test_a_run_keeps_as_many_ranks_and_then_engines_as_fit(
    args: Args, free: dict[str, int], words: list[str] | None
) -> None:
    assert smaller(args, free, first=FIRST) == words
