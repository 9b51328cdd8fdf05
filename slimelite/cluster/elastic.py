"""Plans a restart with fewer machines, for ``--elastic`` and ``--max-restarts``.

This is a separate program, because the parent process that restarts a run is not a Ray driver. The program's arguments
are the command line of the run. The program prints further arguments as JSON. The next start appends these arguments to
the command line, and derives all other values from them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slimelite.arguments import Args, ArgumentError, make_args
from slimelite.cluster.placement import beside_ranks, nodes_of_bundles
from slimelite.cluster.ray_session import connected
from slimelite.cluster.remote import ClusterError

# a node that is alive answers within this time [s]; this includes the start of a Ray process
ANSWER_S = 20.0
POLL_S = 1.0


def smaller(args: Args, free: Mapping[str, int], *, first: str) -> list[str] | None:
    """The arguments that make a run fit the remaining nodes. The list is empty if the run fits unchanged. Returns None
    if even the smallest run does not fit.

    The run keeps as many nodes with training ranks as possible. With these nodes, it keeps as many engines as possible.

    Args:
        free: node id -> the number of its devices.
        first: the node of rank 0, as in `nodes_of_bundles`.
    """
    for nodes, gpus in _sizes(args):
        count = gpus // args.rollout_num_gpus_per_engine if args.job.engines == "own" else 0
        less = replace(args, actor_num_nodes=nodes, rollout_num_gpus=gpus, num_engines=count)
        ranks = less.training_ranks if args.job.trains else 0
        if ranks % max(args.dp_replicate_size, 1):
            continue
        widths = beside_ranks(less, ranks, [less.engine_place(number) for number in range(count)])
        if nodes_of_bundles(free, first=first, nodes=nodes if ranks else 1, ranks=ranks, widths=widths) is None:
            continue
        words = ["--actor-num-nodes", str(nodes)] if nodes != args.actor_num_nodes else []
        return words + (["--rollout-num-gpus", str(gpus)] if gpus != args.rollout_num_gpus else [])
    return None


def _sizes(args: Args) -> Iterator[tuple[int, int]]:
    """Yield pairs (number of nodes with ranks, number of devices for engines), from the full request down to one node
    and one engine."""
    width = args.rollout_num_gpus_per_engine
    for nodes in range(args.actor_num_nodes, 0, -1):
        most = args.rollout_num_gpus
        if args.colocate and nodes < args.actor_num_nodes:  # the engines use the devices of the ranks
            most = min(most, nodes * args.actor_num_gpus_per_node) // width * width
        least = width if args.job.engines == "own" else most
        yield from ((nodes, gpus) for gpus in range(most, least - 1, -width))
        if not args.job.trains:
            return


def _answering(device: str, patience: float) -> dict[str, int]:
    """The number of devices of each node that runs a test task.

    Ray may count a node for half a minute after the node was lost. So this function waits until every counted node
    answers.
    """
    deadline = time.monotonic() + patience
    while True:
        alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        tasks = {node: _task(node) for node in alive}
        ray.wait(list(tasks.values()), num_returns=len(tasks), timeout=ANSWER_S)
        there = [node for node, task in tasks.items() if _has_run(task)]
        if len(there) == len(alive) or time.monotonic() > deadline:
            return {node: int(alive[node]["Resources"].get(device, 0)) for node in there}
        time.sleep(POLL_S)


def _task(node: str) -> ray.ObjectRef[bool]:
    place = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(_answer).options(num_cpus=0, max_retries=0, scheduling_strategy=place).remote()


def _answer() -> bool:
    return True


def _has_run(task: ray.ObjectRef[bool]) -> bool:
    """Whether the task has run. Returns False if the task failed because its node is gone."""
    try:
        ray.get(task, timeout=0)
    except RayError:  # this also happens if the task has not ended
        return False
    return True


def main(argv: Sequence[str]) -> int:
    """Print the arguments of `smaller`. If even the smallest run does not fit, the exit status is 1 and the reason is
    on stderr."""
    try:
        args = make_args(argv)
        with connected(1, args.restart_wait):
            here = str(ray.get_runtime_context().get_node_id())
            free = _answering("GPU" if args.job.gpus else "CPU", args.restart_wait)
    except (ClusterError, ArgumentError, RayError) as error:
        print(f"--elastic: {error}", file=sys.stderr)
        return 1
    words = smaller(args, free, first=here)
    if words is None:
        print(
            "--elastic: not even the smallest run fits the free devices; free devices of each node: "
            f"{list(free.values())}",
            file=sys.stderr,
        )
        return 1
    print(json.dumps(words))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
