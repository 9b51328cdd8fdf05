"""`--launcher ray`: one actor per trainer rank, one per engine, one for the rollout manager."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slimelite.arguments import Args
from slimelite.arguments.secret import public_part
from slimelite.cluster.actors import EngineActor, RolloutActor, ServerActor, TrainerActor
from slimelite.cluster.cluster import Cluster, ClusterError, Progress, Worker
from slimelite.cluster.engines import external_servers, server_parts
from slimelite.cluster.ray_errors import explained, last_line
from slimelite.cluster.ray_session import connected
from slimelite.engines.sglang.control import Server

logger = logging.getLogger(__name__)

# Trainer and engine of a colocated job share a bundle of one device: slime's fractions.
TRAINER_SHARE, ENGINE_SHARE = 0.4, 0.2
WAIT_REPORT_S, WAIT_LIMIT_S = 10, 300


class NamedWorker(Worker, Protocol):
    """A `Worker` that messages can name."""

    name: str


class RayWorker:
    """A `Worker` in an actor; errors come back as the worker raised them."""

    def __init__(self, handle: Any, name: str, log: Path) -> None:
        self.handle = handle
        self.name = name
        self.log = log

    def submit(self, method: str, *args: Any) -> Future[Any]:
        """Start the method on the actor."""
        inner = self.handle.call.remote(method, *args).future()
        outer: Future[Any] = Future()
        inner.add_done_callback(lambda done: self._hand_over(done, outer))
        return outer

    def _hand_over(self, done: Future[Any], outer: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            outer.set_result(done.result())
        else:
            outer.set_exception(self._explained(error))

    def _explained(self, error: BaseException) -> BaseException:
        """What the worker raised, with the worker's traceback as a note; `ClusterError` when it died."""
        if isinstance(error, RayTaskError):
            # Ray raises a class that is both its own and the worker's; the worker's own error is its cause
            cause = error.cause if isinstance(error.cause, Exception) else ClusterError(last_line(error))
            if not isinstance(cause, RayError):  # else of a worker that this one asked
                cause.add_note(f"in {self.name}, whose log is {self.log}:\n{error}")
                return cause
            error = cause
        return explained(error, self.name, self.log) if isinstance(error, RayError) else error


@contextmanager
def _one_message() -> Iterator[None]:
    """Errors of Ray that no worker is to blame for."""
    try:
        yield
    except RayError as error:
        raise explained(error, "the run's Ray") from error


@contextmanager
def ray_cluster(args: Args, progress: Progress) -> Iterator[Cluster]:
    """Connect to the Ray of ``RAY_ADDRESS`` (a `ray job` sets it), or start one here, and put the actors on it.

    ``progress`` is told what the start waits for.

    Raises:
        ClusterError: not enough devices in the Ray cluster, or they do not become free.
    """
    progress(0, 0, "waiting for Ray")
    world = 0 if args.debug_rollout_only else args.actor_num_nodes * args.actor_num_gpus_per_node
    sglang = server_parts(args) is not None and not args.debug_train_only
    external = bool(args.rollout_external_engine_addrs)
    engines = 0 if args.debug_train_only or external else args.num_engines
    places = [args.engine_place(n) for n in range(engines)]
    # colocated engines sit on the trainers' devices, others behind them
    first_engine = 0 if args.colocate else world
    bundles = max(world, first_engine + (args.rollout_num_gpus if engines else 0))
    logs = Path(args.run_dir).absolute() / "logs"
    workers: list[RayWorker] = []

    def start(actor: type, name: str, options: dict[str, Any], *rest: Any) -> RayWorker:
        log = logs / f"{name}.log"
        worker = RayWorker(ray.remote(actor).options(**options).remote(*rest, os.getcwd(), str(log)), name, log)
        workers.append(worker)
        return worker

    with _one_message(), connected(bundles) as kept, _reserved(args, bundles, progress, kept) as group:
        try:
            bundle = bundles_by_node(placement_group_table(group)["bundles_to_node_id"], _this_node())
            public = len({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}) > 1
            pool = []
            for n, place in enumerate(places):
                own = bundle[first_engine + place.first_gpu :][: place.width]
                options = _options(args, group, own[0], ENGINE_SHARE, _gpus_of(args, group, own))
                # a server that starts anew does not keep others from asking
                options |= {"max_concurrency": 4} if sglang else {}
                pool.append(start(ServerActor if sglang else EngineActor, f"engine_{n}", options, args, n, public))
            trainers = []
            for n in range(world):
                options = _options(args, group, bundle[n], TRAINER_SHARE, public_part(args.train_env_vars)[0])
                trainers.append(start(TrainerActor, f"trainer_{n}", options, n, world))
            handles: list[Any] = [worker.handle for worker in pool]
            targets = handles
            if sglang:
                addresses = [worker.submit("url").result() for worker in pool]
                started = [Server(url, p.width, p.first_gpu) for url, p in zip(addresses, places, strict=True)]
                targets = external_servers(args) if external else started
                handles = list(zip_longest(targets, handles))
            threaded = {"num_cpus": 0, "runtime_env": {"env_vars": _env(1)}, "max_concurrency": 4}
            rollout = start(RolloutActor, "rollout", threaded, args, handles)

            start_workers(args, rollout, trainers, pool, progress)
            yield Cluster(args, rollout, trainers, targets, others=pool, share=ray.put)
            for worker in (*trainers, rollout, *(pool if sglang else [])):
                worker.submit("close").result()
        finally:
            for worker in workers:
                ray.kill(worker.handle)


def start_workers(
    args: Args,
    rollout: NamedWorker,
    trainers: Sequence[NamedWorker],
    engines: Sequence[NamedWorker],
    progress: Progress,
) -> None:
    """Let every worker load, side by side.

    Only engines and trainers on the same GPUs load in turn, engines first: SGLang sizes its KV cache by what is free.
    Before the trainers load, engines that take turns with them (``--offload-rollout``) give their memory back.
    """
    servers = server_parts(args)
    loading = {worker.submit("start" if servers else "info"): worker.name for worker in engines}
    loading[rollout.submit("num_prompts")] = rollout.name
    if trainers and engines and args.colocate and args.device == "cuda":
        _wait_until_up(loading, progress)
        loading = {}
        if args.offload_rollout:
            rollout.submit("release_memory").result()
    address = trainers[0].submit("rendezvous").result() if len(trainers) > 1 else None
    loading |= {trainer.submit("start", args, address): trainer.name for trainer in trainers}
    _wait_until_up(loading, progress)


def _wait_until_up(starting: dict[Future[Any], str], progress: Progress) -> None:
    """``starting``: what ends when a worker is up -> the worker."""
    waiting = set(starting)
    while waiting:
        names = sorted(starting[future] for future in waiting)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        up = len(starting) - len(waiting)
        progress(up, len(starting), f"workers are up; waiting for {', '.join(names[:3])}{more} to load")
        finished, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        for future in finished:
            future.result()
    progress(len(starting), len(starting), "workers are up")


@contextmanager
def _reserved(args: Args, bundles: int, progress: Progress, kept: bool) -> Iterator[PlacementGroup]:
    device = "GPU" if args.device == "cuda" else "CPU"
    total = int(ray.cluster_resources().get(device, 0))
    if total < bundles:
        nodes = sum(1 for node in ray.nodes() if node["Alive"])
        raise ClusterError(
            f"the job needs {bundles} {device}s ({args.actor_num_nodes} x {args.actor_num_gpus_per_node} ranks and "
            f"{args.num_engines} engines on {args.rollout_num_gpus}, colocate={args.colocate}) but Ray has "
            f"{total} on {nodes} node(s): lower --actor-num-gpus-per-node or --rollout-num-gpus, add --colocate, or "
            "add nodes"
        )
    bundle = {"CPU": 1.0, "GPU": 1.0} if device == "GPU" else {"CPU": 1.0}
    group = placement_group([dict(bundle) for _ in range(bundles)], strategy="PACK")
    try:
        progress(0, 0, f"waiting for {bundles} {device}s from Ray")
        _wait_for(group, device, total, f"{bundles} x {bundle}")
        yield group
    finally:
        # schedulers send SIGTERM to all of a job: Ray's daemons may be gone, and this would wait for them for a minute
        if kept:
            remove_placement_group(group)


def _wait_for(group: PlacementGroup, device: str, total: int, wanted: str) -> None:
    begin = time.monotonic()
    while not group.wait(timeout_seconds=WAIT_REPORT_S):
        waited = time.monotonic() - begin
        free = ray.available_resources()
        state = f"{free.get(device, 0):g} of {total} {device}s and {free.get('CPU', 0):g} CPUs are free"
        if waited > WAIT_LIMIT_S:
            raise ClusterError(
                f"gave up after {waited:.0f} s waiting for {wanted}: {state}; another job holds the rest"
            )
        logger.warning("waiting for %s from Ray, %.0f s so far: %s", wanted, waited, state)


def _this_node() -> str:
    return str(ray.get_runtime_context().get_node_id())


def bundles_by_node(nodes: dict[int, str], first: str) -> list[int]:
    """Bundle indices with those of one node side by side, node ``first`` in front: neighbouring ranks share a node.

    ``nodes``: bundle index -> node id; Ray promises no order of its own.
    """
    return sorted(nodes, key=lambda bundle: (nodes[bundle] != first, nodes[bundle], bundle))


def _env(threads: int) -> dict[str, str]:
    # glibc would keep gigabytes of freed activations; blocks of this size go back at once (a tiny model has none)
    block = str(4 << 20)
    memory = {"MALLOC_MMAP_THRESHOLD_": block, "MALLOC_TRIM_THRESHOLD_": block}
    return {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", **memory}


def _gpus_of(args: Args, group: PlacementGroup, bundles: list[int]) -> dict[str, str]:
    """Environment of an engine that spans several bundles: the GPUs of all of them, where Ray shows those of one."""
    if args.device != "cuda" or len(bundles) == 1:
        return {}
    probe = ray.remote(lambda: (ray.get_runtime_context().get_node_id(), ray.get_gpu_ids()))
    found = [probe.options(**_options(args, group, bundle, ENGINE_SHARE)).remote() for bundle in bundles]
    nodes, gpus = zip(*ray.get(found), strict=True)
    if len(set(nodes)) > 1:
        raise ClusterError(
            f"an engine of {len(bundles)} GPUs (--rollout-num-gpus-per-engine) would span {len(set(nodes))} nodes; "
            "engines stay within a node: lower it, or free whole nodes"
        )
    visible = ",".join(str(gpu) for ids in gpus for gpu in ids)
    return {"CUDA_VISIBLE_DEVICES": visible, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


def _options(
    args: Args, group: PlacementGroup, bundle: int, share: float, env: dict[str, Any] | None = None
) -> dict[str, Any]:
    strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)
    return {
        "num_cpus": share,
        "num_gpus": share if args.device == "cuda" else 0,
        "scheduling_strategy": strategy,
        "runtime_env": {
            "env_vars": {**_env(args.cpu_threads), **{name: str(text) for name, text in (env or {}).items()}}
        },
    }
