"""`--launcher ray`: one actor for each trainer rank, one for each engine, and one for the rollout side."""

from __future__ import annotations

import json
import logging
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError, RayTaskError, UnserializableException
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from slimelite.arguments import Args, ClusterArgs
from slimelite.arguments.secret import public_part
from slimelite.base import trace
from slimelite.base.heap import loading, set_heap
from slimelite.base.lifecycle import ATTEMPT
from slimelite.base.processes import Machine, MemoryKills, Sight, show_stacks
from slimelite.base.reading import last_reading
from slimelite.base.registry import function
from slimelite.cluster.batches import EngineDesk
from slimelite.cluster.hangs import END, Calls, Monitor
from slimelite.cluster.placement import beside_ranks, nodes_of_bundles
from slimelite.cluster.ray_session import connected, explained, last_line
from slimelite.cluster.remote import Closing, ClusterError, Progress, Remote, not_there
from slimelite.cluster.workers import LOCAL_HOST, EngineFactory, Target, Workers
from slimelite.engines.protocol import Engine, ServerProcess
from slimelite.rollout.manager import RolloutManager
from slimelite.rollout.pool import MOST_DEATHS
from slimelite.tracking.noise import redirect_process_output

if TYPE_CHECKING:
    from slimelite.training.trainer import Trainer

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")
V = TypeVar("V")
logger = logging.getLogger(__name__)

# In a colocated job, trainer and engine share a bundle of one device. The fractions are the same as in slime.
TRAINER_SHARE, ENGINE_SHARE = 0.4, 0.2
WAIT_REPORT_S, WAIT_LIMIT_S, WAIT_POLL_S, GROUP_POLL_S = 10, 300, 0.1, 2
# time between two checks of the log of a rank that loads [s]
LOG_POLL_S = 1.0
# other nodes must see a new file in a shared folder within this time [s]
SEEN_S = 10
# name of Ray's node label that has the node's id
NODE_LABEL = "ray.io/node-id"
# freed blocks above this size [bytes] go back to the system immediately; glibc would keep gigabytes
BLOCK = 4 << 20


class Host:
    """An actor with an object of any class. The object may be created later than the actor.

    Args:
        folder: the driver's working directory. The actor changes to this folder, so relative paths are the same in both
            processes.
        log: the file for all output of the process.
        name: the worker's name in the trace.
        trace_file: the file of ``--trace``. None: no trace is written.
        env: environment variables. This class sets them, because Ray's ``runtime_env`` would start each worker twice.
        make: the function that creates the object from ``args``.
    """

    returns_blocks = True

    def __init__(
        self,
        folder: str,
        log: str,
        name: str,
        trace_file: Path | None,
        env: dict[str, str],
        make: Callable[..., Any] | None = None,
        *args: object,
    ) -> None:
        redirect_process_output(log)
        show_stacks()
        os.environ.update(env)  # torch reads these variables when `make` imports it
        sys.path += [part for part in env.get("PYTHONPATH", "").split(os.pathsep) if part and part not in sys.path]
        if self.returns_blocks:
            set_heap(mapped_above=BLOCK, trimmed_above=BLOCK)  # glibc read the variables when this process began
        self.name = name
        if trace_file is not None:
            trace.begin(trace_file)
        if os.path.isdir(folder):
            os.chdir(folder)
        else:
            print(f"{folder} does not exist on this node, so relative paths start from {os.getcwd()}")
        with loading():
            self.target = make and make(*args)
        self.listener: socket.socket | None = None

    def rendezvous(self, host: str) -> str:
        """host:port at which other ranks reach the object. The socket listens from now on, so no other process can take
        the port. `make` passes the socket to the object.
        """
        self.listener = socket.create_server((host, 0))
        return f"{host}:{self.listener.getsockname()[1]}"

    def make(self, make: str, secrets: dict[str, str], *args: object) -> None:
        """Create the object with the function ``make``, a text "package.module:function". So the driver need not import
        the module. ``secrets``: environment variables that Ray must not write to logs or command lines.
        """
        os.environ.update(secrets)
        with loading():
            self.target = function(make)(*args, **({"listener": self.listener} if self.listener else {}))

    def call(self, method: str, /, *args: object, **kwargs: object) -> object:
        """Call a method of the object."""
        with trace.call(self.name, method, args):
            return getattr(self.target, method)(*args, **kwargs)

    def cpu_seconds(self) -> float:
        """The CPU time of this process since its start [s]."""
        return time.process_time()

    def sees(self, file: str) -> bool:
        """Whether ``file`` exists. A network file system may show a new file late, so this method waits up to `SEEN_S`
        seconds."""
        end = time.monotonic() + SEEN_S
        while not os.path.exists(file):
            if time.monotonic() > end:
                return False
            time.sleep(0.1)
        return True


class AsyncHost(Host):
    """An actor with an object of async methods. The methods run on the actor's event loop.

    The object is always an engine. The engine's process keeps freed memory allocated, because each decoding step needs
    this memory again. `EngineDesk` returns the memory to the system after a rollout.
    """

    returns_blocks = False

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        if ray.get_runtime_context().was_current_actor_reconstructed:
            cast(EngineDesk, self.target).begin_again()

    async def call(self, method: str, /, *args: object, **kwargs: object) -> object:
        """Call a method of the object."""
        with trace.call(self.name, method, args):
            return await getattr(self.target, method)(*args, **kwargs)


class RayRemote(Remote[T]):
    """An object in a `Host`. Errors of the object are raised here unchanged. ``host``: the address of the object's
    machine.

    ``calls``: the calls that have no answer yet. ``verdict``: why the `Monitor` ended the object's process. ``kills``:
    the processes that the kernel of this machine has killed; None if the object is on another machine.
    """

    verdict: str | None

    def __init__(self, handle: Any, name: str, log: Path, host: str, kills: MemoryKills | None = None) -> None:
        self.handle, self.name, self.log, self.host, self.kills = handle, name, log, host, kills
        self.calls, self.verdict = Calls(), None

    def __reduce__(self) -> tuple[Any, ...]:
        # open calls belong to one process, so they are not pickled
        return RayRemote, (self.handle, self.name, self.log, self.host)

    def make(self, make: str, secrets: dict[str, str], *args: object) -> Future[None]:
        """Create the object in an actor that was started without an object (see `Host.make`)."""
        return self._noted("make", self.handle.make.remote(make, secrets, *args))

    def rendezvous(self) -> Future[str]:
        """See `Host.rendezvous`."""
        return self.future(self.handle.rendezvous.remote(self.host))

    def start(self, method: str, /, *args: object, **kwargs: object) -> Future[object]:
        """See `Remote.start`."""
        return self._noted(method, self.handle.call.remote(method, *args, **kwargs))

    def cpu_seconds(self) -> Future[float]:
        """See `Remote.cpu_seconds`."""
        return self.future(self.handle.cpu_seconds.remote())

    def sees(self, file: Path) -> Future[bool]:
        """See `Host.sees`."""
        return self.future(self.handle.sees.remote(str(file)))

    def share(self, value: V) -> V:
        """See `Remote.share`."""
        shared: object = ray.put(value)
        return cast(V, shared)

    def _noted(self, method: str, ref: Any) -> Future[Any]:
        answer = self.future(ref)
        self.calls.begin(method, answer)
        return answer

    def future(self, ref: Any) -> Future[Any]:
        """A future for the result that ``ref`` refers to."""
        outer: Future[Any] = Future()
        outer.set_running_or_notify_cancel()  # the call cannot be cancelled
        ref.future().add_done_callback(lambda done: self._hand_over(done, outer))
        return outer

    def _hand_over(self, done: Future[object], outer: Future[object]) -> None:
        error = done.exception()
        if error is None:
            outer.set_result(done.result())
        else:
            outer.set_exception(self._explained(error))

    def _explained(self, error: BaseException) -> BaseException:
        """The error that the object raised, with its traceback as a note. If the object's process died, the error is a
        `ClusterError`."""
        if isinstance(error, RayTaskError | UnserializableException):
            # the cause of Ray's error is the original error; it is missing if this process cannot create that error,
            # for example because its __init__ takes other arguments
            original = getattr(error, "cause", None)
            cause = original if isinstance(original, Exception) else ClusterError(last_line(error))
            if not isinstance(cause, RayError):  # otherwise the error comes from another object that this object called
                cause.add_note(f"in {self.name} (log: {self.log}):\n{error}")
                return cause
            error = cause
        if not isinstance(error, RayError):
            return error
        kills = self.kills.recent() if self.kills else None
        return explained(error, self.name, self.log, kills, self.verdict, self.host)


@contextmanager
def _one_message() -> Iterator[None]:
    """Convert Ray's errors that do not belong to a worker to a `ClusterError`."""
    try:
        yield
    except RayError as error:
        raise explained(error, "the run's Ray") from error


class Actors:
    """The actors of a run on its placement group.

    Colocated engines share the trainers' devices. Engines that are not colocated get the devices that follow the
    trainers' devices. ``started``: all actors are added to this list. ``kills``: see ``memory_kills`` of `Monitor`.
    """

    def __init__(
        self, args: Args, group: PlacementGroup, world: int, started: list[RayRemote[object]], kills: MemoryKills
    ) -> None:
        self.args, self.group, self.world, self.kills = args, group, world, kills
        self.factory = EngineFactory(args)
        self.started = started
        self._nodes = placement_group_table(group)["bundles_to_node_id"]
        self._here = str(ray.get_runtime_context().get_node_id())
        self._hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}

    def trainers(self) -> list[RayRemote[Trainer]]:
        """Start one actor for each rank. `start_workers` creates the trainers in these actors."""
        # some variables of the user, such as LD_LIBRARY_PATH, must be set at the start of a process
        shown = public_part(self.args.train_env_vars)[0]
        options, threads = {"runtime_env": {"env_vars": shown}} if shown else {}, self.args.cpu_threads
        return [
            self._start(Host, f"trainer_{n}", self._nodes[n], options | self._place(n, TRAINER_SHARE), _env(threads))
            for n in range(self.world)
        ]

    def engines(self, count: int) -> list[RayRemote[Any]]:
        """Start actors for ``count`` engines, or for the processes of ``count`` servers."""
        args, actors = self.args, []
        first = 0 if args.colocate else self.world
        for n in range(count):
            place = args.engine_place(n)
            own = list(range(first + place.first_gpu, first + place.first_gpu + place.width))
            node, options = self._nodes[own[0]], self._place(own[0], ENGINE_SHARE)
            env = _env(args.cpu_threads) | self._gpus_of(own)
            # on a single node, engines listen on the loopback address only
            host = str(self._hosts[node]) if len(set(self._hosts.values())) > 1 else LOCAL_HOST
            if args.job.servers:
                # the actor must answer other calls while its server restarts
                options |= {"max_concurrency": 4}
                actors.append(self._start(Host, f"engine_{n}", node, options, env, self.factory.server, n, host))
            else:
                # Ray restarts the actor, and then the pool uses the engine again
                options |= {"max_restarts": MOST_DEATHS}
                actors.append(self._start(AsyncHost, f"engine_{n}", node, options, env, self.factory.desk, n, host))
        return actors

    def rollout(
        self, engines: Sequence[Target], processes: Sequence[Remote[ServerProcess]]
    ) -> RayRemote[RolloutManager]:
        """Start the actor of the rollout side on the driver's node (see `EngineFactory.rollout_manager`)."""
        here = NodeAffinitySchedulingStrategy(self._here, soft=False)
        options = {"num_cpus": 0, "max_concurrency": 4, "scheduling_strategy": here}
        make = (self.factory.rollout_manager, engines, processes)
        return self._start(Host, "rollout", self._here, options, _env(1), *make)

    def check_shared(self, trainers: Sequence[RayRemote[Trainer]]) -> None:
        """Check that every node sees the folders that its ranks write to. Every rank writes to ``--save``. Only rank 0
        writes to ``--save-hf``.

        Raises:
            ClusterError: a rank on another node does not see the driver's files in ``--save`` or ``--save-hf``.
        """
        others = [trainer for n, trainer in enumerate(trainers) if self._nodes[n] != self._here]
        places = {"--save": self.args.save, "--save-hf": self.args.save_hf and str(Path(self.args.save_hf).parent)}
        for flag, place in places.items():
            writers = others if flag == "--save" else [trainer for trainer in others if trainer is trainers[0]]
            if place is None or "{" in place or not writers:
                continue
            folder = Path(place).absolute()
            folder.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile(dir=folder, prefix=".shared-") as file:
                seen = [(trainer, trainer.sees(Path(file.name))) for trainer in writers]
                if blind := [f"{trainer.name} on {trainer.host}" for trainer, sees in seen if not sees.result()]:
                    raise ClusterError(
                        f"{flag} {folder}: {', '.join(blind)} cannot see the files that {platform.node()} writes "
                        "there. Each machine would save its part on its own disk, and a run could not resume from "
                        "these parts. Name a folder on a disk that all machines share"
                    )

    def machines(self) -> dict[str, RemoteMachine]:
        """Start an actor on every node of the run except this one. Each actor checks the processes of its node. Returns
        a dict: address of a node -> its machine."""
        own = self._hosts[str(ray.get_runtime_context().get_node_id())]
        used = {self._hosts[node]: node for node in self._nodes.values()}
        limit = END * self.args.hang_timeout
        return {host: RemoteMachine(node, limit) for host, node in used.items() if host != own and limit}

    def _start(
        self, kind: type[Host], name: str, node: str, options: dict[str, Any], env: dict[str, str], *make: Any
    ) -> RayRemote[Any]:
        folder = Path(self.args.run_dir).absolute()
        log, trace_file = folder / "logs" / f"{name}.log", None
        if self.args.trace:
            # several machines cannot append to the same file
            trace_file = folder / (trace.FILE if node == self._here else f"trace-{self._hosts[node]}.json")
        # `ps` shows the name of the class: ray::trainer
        actor = ray.remote(type(name.rstrip("_0123456789"), (kind,), {})).options(**options)
        handle = actor.remote(os.getcwd(), str(log), name, trace_file, env, *make)
        kills = self.kills if node == self._here else None
        self.started.append(RayRemote(handle, name, log, str(self._hosts[node]), kills))
        return self.started[-1]

    def _place(self, bundle: int, share: float) -> dict[str, object]:
        """The options of an actor that uses the fraction ``share`` of the device of ``bundle``."""
        strategy = PlacementGroupSchedulingStrategy(placement_group=self.group, placement_group_bundle_index=bundle)
        gpus = share if self.args.job.gpus else 0
        return {"num_cpus": share, "num_gpus": gpus, "scheduling_strategy": strategy}

    def _gpus_of(self, bundles: list[int]) -> dict[str, str]:
        """The environment variables of an engine that spans several bundles. The variables make the GPUs of all bundles
        visible, not only the GPU of the first bundle."""
        if not self.args.job.gpus or len(bundles) == 1:
            return {}
        probe = ray.remote(lambda: (ray.get_runtime_context().get_node_id(), ray.get_gpu_ids()))
        places = [probe.options(**self._place(bundle, ENGINE_SHARE)).remote() for bundle in bundles]
        nodes, gpus = zip(*ray.get(places), strict=True)
        if len(set(nodes)) > 1:
            raise ClusterError(
                f"an engine of {len(bundles)} GPUs (--rollout-num-gpus-per-engine) would span {len(set(nodes))} "
                "nodes, but an engine must fit on one node: lower this flag, or free whole nodes"
            )
        visible = ",".join(str(gpu) for ids in gpus for gpu in ids)
        return {"CUDA_VISIBLE_DEVICES": visible, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


class RemoteMachine:
    """A `Machine` for another ``node`` of Ray. The `Machine` runs inside an actor on this node."""

    def __init__(self, node: str, limit: float) -> None:
        place = NodeAffinitySchedulingStrategy(node, soft=False)
        self._limit = limit
        self.actor = ray.remote(Machine).options(num_cpus=0, scheduling_strategy=place).remote(limit)

    def look(self, logs: Sequence[str]) -> Sight:
        """See `Machine.look`."""
        return self._ask(Machine.look, logs)

    def stack(self, pid: int, log: str) -> str:
        """See `Machine.stack`."""
        return self._ask(Machine.stack, pid, log)

    def send(self, pid: int, number: int) -> None:
        """See `Machine.send`."""
        self._ask(Machine.send, pid, number)

    def _ask(self, method: Callable[Concatenate[Machine, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        answer: R = ray.get(getattr(self.actor, method.__name__).remote(*args, **kwargs), timeout=self._limit)
        return answer


@contextmanager
def ray_workers(args: Args, progress: Progress) -> Iterator[Workers]:
    """Start the workers of ``--launcher ray``: an actor for each trainer rank, for each engine and for the rollout
    side. The actors run on the Ray cluster of ``RAY_ADDRESS``, which a `ray job` sets. If ``RAY_ADDRESS`` is not set, a
    new Ray is started for this run only.

    ``progress`` is called with a text such as "waiting for Ray".

    Raises:
        ClusterError: the Ray cluster has too few devices, or they do not become free in time.
    """
    progress(0, 0, "waiting for Ray")
    world = args.training_ranks if args.job.trains else 0
    count = args.num_engines if args.job.engines == "own" else 0
    widths = beside_ranks(args, world, [args.engine_place(number) for number in range(count)])
    bundles = world + sum(widths)
    started, machines = list[RayRemote[object]](), dict[str, RemoteMachine]()
    with (
        _one_message(),
        # until Ray has ended, because ending Ray needs its daemons
        Monitor(args.hang_timeout, started, machines) as monitor,
        connected(bundles, _patience(args)) as kept,
        _reserved(args, world, widths, progress, kept) as group,
    ):
        actors = Actors(args, group, world, started, monitor.memory_kills)
        machines.update(actors.machines())
        try:
            engines, trainers = actors.engines(count), actors.trainers()
            processes: list[RayRemote[ServerProcess]] = engines if args.job.servers else []
            targets: Sequence[Target] = engines
            if args.job.servers and args.job.engines:
                targets = actors.factory.addresses(processes)
            rollout = actors.rollout(targets, processes)
            actors.check_shared(trainers)
            start_workers(args, rollout, trainers, engines, progress)
            yield Workers(rollout, trainers, targets, engines)
            closing: list[Remote[Closing]] = [*trainers, rollout, *processes]
            for each in closing:
                each.submit(Closing.close).result()
        finally:
            others = [each.actor for each in machines.values()]
            machines.clear()
            for ended in (*(actor.handle for actor in started), *others):
                ray.kill(ended)


def start_workers(
    args: Args,
    rollout: Remote[RolloutManager],
    trainers: Sequence[RayRemote[Trainer]],
    engines: Sequence[Remote[Any]],
    progress: Progress,
) -> None:
    """Load all workers in parallel.

    Engines and trainers that share GPUs do not load at the same time. Such engines load first, because SGLang chooses
    the size of its KV cache by the free memory. With ``--offload-rollout``, engines on shared GPUs release their memory
    before the trainers load.
    """
    first = ServerProcess.start if args.job.servers else Engine.info
    loading: dict[Future[Any], str] = {engine.submit(first): engine.name for engine in engines}
    loading[rollout.submit(RolloutManager.num_prompts)] = rollout.name
    secrets = public_part(args.train_env_vars)[1]
    if trainers:  # report an error of a model once, before all engines and trainers fail with it
        progress(0, len(loading) + len(trainers), "workers are up; checking the models")
        trainers[0].make("slimelite.training.loading:check_models", secrets, args).result()
    if trainers and engines and args.colocate and args.job.gpus:
        _wait_until_up(loading, progress)
        loading = {}
        if args.offload_rollout:
            rollout.submit(RolloutManager.release_memory).result()
    address = trainers[0].rendezvous().result() if len(trainers) > 1 else None
    for rank, trainer in enumerate(trainers):
        place = (rank, len(trainers), address, trainer.host)
        made = trainer.make("slimelite.cluster.workers:make_trainer", secrets, args, *place)
        loading[made] = trainer.name
    _wait_until_up(loading, progress, trainers[0].log if trainers else None)


def _wait_until_up(starting: dict[Future[object], str], progress: Progress, log: Path | None = None) -> None:
    """Wait for all workers. ``starting``: future -> name of the worker. The future is done when the worker is ready.
    ``log``: rank 0's log. The log shows how much of the model rank 0 has read."""
    waiting, noted = set(starting), ""
    while waiting:
        names = sorted(starting[future] for future in waiting)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        up = len(starting) - len(waiting)
        reading = last_reading(log) if log else None
        note = f"workers are up; waiting for {', '.join(names[:3])}{more} to load{f' ({reading})' if reading else ''}"
        if note != noted:
            progress(up, len(starting), noted := note)
        finished, waiting = wait(waiting, timeout=LOG_POLL_S, return_when=FIRST_COMPLETED)
        for future in finished:
            future.result()
    progress(len(starting), len(starting), "workers are up")


@contextmanager
def _reserved(
    args: ClusterArgs, ranks: int, widths: Sequence[int], progress: Progress, kept: bool
) -> Iterator[PlacementGroup]:
    """Reserve a placement group. The group has a bundle for each of ``ranks``, in order. Then it has a bundle for each
    device of the engines of ``widths``."""
    device, bundles = "GPU" if args.job.gpus else "CPU", ranks + sum(widths)
    here = str(ray.get_runtime_context().get_node_id())
    plan = partial(nodes_of_bundles, first=here, nodes=args.actor_num_nodes if ranks else 1, ranks=ranks, widths=widths)
    deadline = time.monotonic() + _patience(args)
    while plan(alive := _devices(device)) is None and time.monotonic() < deadline:
        progress(0, 0, f"waiting for {bundles} {device}s: Ray has {sum(alive.values())}")
        time.sleep(WAIT_POLL_S)
    if plan(alive) is None:
        has = ", ".join(map(str, sorted(alive.values(), reverse=True)))
        problem = (
            f"the job needs {bundles} {device}s ({args.actor_num_nodes} nodes x {args.actor_num_gpus_per_node} ranks, "
            f"and {args.num_engines} engines on {args.rollout_num_gpus}, colocate={args.colocate}; an engine stays "
            f"within a node) but Ray has {has} on {len(alive)} node(s): "
            "lower --actor-num-nodes, --actor-num-gpus-per-node or --rollout-num-gpus, add --colocate, or add nodes"
        )
        raise not_there(problem, _patience(args))
    progress(0, 0, f"waiting for {bundles} {device}s from Ray")
    bundle = {"CPU": 1.0, "GPU": 1.0} if device == "GPU" else {"CPU": 1.0}
    group = _granted(plan, device, [dict(bundle) for _ in range(bundles)], _patience(args))
    try:
        yield group
    finally:
        # only from a shared cluster: a scheduler's SIGTERM may have ended the daemons of this run's own Ray
        if kept:
            remove_placement_group(group)


def _granted(
    plan: Callable[[dict[str, int]], list[str] | None], device: str, bundles: list[dict[str, float]], patience: float
) -> PlacementGroup:
    """Reserve a placement group of ``bundles`` on the nodes that ``plan`` chooses. If Ray loses one of these nodes, new
    nodes are chosen."""
    wanted = f"{len(bundles)} x {bundles[0]}"
    while True:
        places = _wait_for(plan, device, wanted, patience)
        several, end = len(_devices(device)) > 1, time.monotonic() + WAIT_LIMIT_S
        selector = [{NODE_LABEL: node} for node in places] if several else None
        group = placement_group(bundles, strategy="PACK", bundle_label_selector=selector)
        while not group.wait(timeout_seconds=GROUP_POLL_S):
            if time.monotonic() > end:
                remove_placement_group(group)
                raise ClusterError(f"Ray did not reserve {wanted} in {WAIT_LIMIT_S} s; another job probably took them")
            if not set(places) <= _devices(device).keys():
                remove_placement_group(group)
                break
        else:
            return group


def _patience(args: ClusterArgs) -> float:
    """The time for which the start waits for Ray and its machines [s]. Only a restart of ``--max-restarts`` waits,
    because only then machines may be missing."""
    return args.restart_wait if int(os.environ.get(ATTEMPT, "0")) else 0.0


def _devices(device: str) -> dict[str, int]:
    """The number of devices of each living node. ``device``: the kind of device, GPU or CPU."""
    return {node["NodeID"]: int(node["Resources"].get(device, 0)) for node in ray.nodes() if node["Alive"]}


def _wait_for(
    plan: Callable[[dict[str, int]], list[str] | None], device: str, wanted: str, patience: float
) -> list[str]:
    """Wait until there are free devices for all bundles, and return the node of each bundle. Nodes may appear and
    disappear meanwhile."""
    begin = noted = time.monotonic()
    while True:
        alive = _devices(device)
        free = {node: free.get(device, 0) for node, free in available_resources_per_node().items() if node in alive}
        if (places := plan({node: int(count) for node, count in free.items()})) is not None:
            return places
        waited = time.monotonic() - begin
        state = f"{sum(free.values()):g} of {sum(alive.values())} {device}s are free"
        if waited > (patience or WAIT_LIMIT_S):
            why = "another job uses the others" if plan(alive) else "the others are on machines that are gone"
            raise not_there(f"gave up after {waited:.0f} s waiting for {wanted}: {state}; {why}", patience)
        if time.monotonic() - noted > WAIT_REPORT_S:
            logger.warning("waiting for %s from Ray, %.0f s so far: %s", wanted, waited, state)
            noted = time.monotonic()
        time.sleep(WAIT_POLL_S)


def _env(threads: int) -> dict[str, str]:
    """Environment variables of a worker. The wrapper for slime's scripts passes on the variables of --runtime-env-json.
    Secret variables are left out, because Ray writes them to logs."""
    shown = public_part(json.loads(os.environ.get("SLIMELITE_WORKER_ENV", "{}")))[0]
    memory = {"MALLOC_MMAP_THRESHOLD_": str(BLOCK), "MALLOC_TRIM_THRESHOLD_": str(BLOCK)}  # for child processes
    return {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", **memory, **shown}
