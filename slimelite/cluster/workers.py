"""Creates the objects that a launcher places in processes: trainers, engines, servers and the rollout worker.
``--launcher local`` creates all these objects in one process.

Importing this file does not import torch. A process imports torch when it creates its engine or trainer.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from slimelite.arguments import Args
from slimelite.base.registry import Function, function
from slimelite.cluster.batches import EngineDesk, remote_engine
from slimelite.cluster.hangs import Monitor
from slimelite.cluster.remote import LocalRemote, Progress, Remote
from slimelite.data.tokenizer import encode_text, load_tokenizer, stop_token_ids
from slimelite.engines.protocol import (
    AdapterFormat,
    AdapterKind,
    Codec,
    Engine,
    EngineSetup,
    Restartable,
    ServerProcess,
    SyncSetup,
    Transport,
)
from slimelite.engines.registry import ENGINES, ServerAddress, ServerParts
from slimelite.plan.cuda import check_here
from slimelite.rollout.manager import RolloutManager
from slimelite.samples.table import TokenStats

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from slimelite.training.trainer import Trainer

# the receiver of an engine's requests and weights
Target = Remote[Engine] | ServerAddress
LOCAL_HOST = "127.0.0.1"


class EngineFactory:
    """Creates the engines of a run, or the clients of servers. ``host``: an address of this machine that other machines
    can reach."""

    def __init__(self, args: Args) -> None:
        self._args = args

    def setup(self, index: int, host: str = LOCAL_HOST) -> EngineSetup:
        """The settings of engine number ``index``."""
        args, place = self._args, self._args.engine_place(index)
        return EngineSetup(
            model_path=str(args.hf_checkpoint),
            device=args.device,
            seed=args.rollout_seed + index,
            host=host,
            log=Path(args.run_dir).absolute() / "logs" / f"{args.rollout_backend}_{index}.log",
            max_running_requests=args.sglang_max_running_requests,
            max_context_len=args.sglang_context_length,
            kv_cache_tokens=args.kv_cache_tokens,
            repeatable=args.deterministic_mode,
            memory_share=args.sglang_mem_fraction_static,
            releases_memory=bool(args.offload_rollout),
            memory=args.engine_kind.memory,
            width=place.width,
            options={**args.sglang_overrides, **place.overrides},
            adapter=AdapterKind(args.lora_rank, args.lora_modules) if args.sends_adapter else None,
        )

    def engine(self, index: int, host: str = LOCAL_HOST) -> Engine:
        """Create engine number ``index`` in this process. ``host``: the address for the engine's HTTP front, if it
        starts a front."""
        build = self._args.engine_kind.build
        assert build is not None, "an engine that is a server has its own process"
        if self._args.job.gpus:
            check_here(computes=True)
        engine: Engine = self._function(build)(self.setup(index, host), self._codec())
        return engine

    def desk(self, index: int, host: str = LOCAL_HOST) -> EngineDesk:
        """Create engine number ``index`` for callers in other processes."""
        return EngineDesk(self.engine(index, host), syncs=self._args.job.syncs)

    def server(self, index: int, host: str = LOCAL_HOST) -> ServerProcess:
        """Create the object for the process of server number ``index``. The server will listen on ``host``. The process
        is not started yet."""
        if self._args.job.gpus:
            check_here(computes=False)
        process: ServerProcess = self._function(self._parts.process)(self.setup(index, host))
        return process

    def addresses(self, processes: Sequence[Remote[ServerProcess]]) -> list[ServerAddress]:
        """The addresses of the engine servers. For external servers, they come from
        ``--rollout-external-engine-addrs``. Otherwise, each of ``processes`` reports its address."""
        args = self._args
        if args.job.engines == "external":
            external = self._function(self._parts.external)
            addresses, way = args.rollout_external_engine_addrs, str(args.update_weight_transport)
            servers: list[ServerAddress] = external(addresses, str(args.hf_checkpoint), way)
            return servers
        places = [args.engine_place(number) for number in range(len(processes))]
        urls = [process.ask(ServerProcess.address) for process in processes]
        return [ServerAddress(url, place.width, place.first_gpu) for url, place in zip(urls, places, strict=True)]

    def clients(self, engines: Sequence[Target], processes: Sequence[Remote[ServerProcess]]) -> list[Engine]:
        """Convert ``engines`` to engines that callers in this process can use. ``processes``: the server processes that
        slimelite can restart. For external servers, ``processes`` is empty.
        """
        owners: list[RemoteOwner | None] = [RemoteOwner(process) for process in processes]
        return [
            self._connected(engine, owner) if isinstance(engine, ServerAddress) else remote_engine(engine)
            for engine, owner in zip_longest(engines, owners)
        ]

    def transport(
        self, device: torch.device, host: str = LOCAL_HOST, adapter: AdapterFormat | None = None
    ) -> Transport:
        """The transport that sends weights to the servers. The weights are on ``device``. With ``adapter``, the
        transport sends only the weights of the adapter."""
        args = self._args
        setup = SyncSetup(
            model_path=str(args.hf_checkpoint),
            transport=str(args.update_weight_transport),
            device=device,
            host=host,
            directory=args.update_weight_disk_dir,
            keep_folders=args.update_weight_disk_keep_files,
            timeout_s=60.0 * args.distributed_timeout_minutes,
            adapter=adapter,
            partial=not args.offload_rollout or all(self.setup(n).keeps_weights() for n in range(args.num_engines)),
        )
        transport: Transport = self._function(self._parts.sync)(setup)
        return transport

    def local(self, stack: ExitStack) -> tuple[list[Engine], list[ServerAddress]]:
        """The engines of ``--launcher local``, and the addresses of their servers if there are servers."""
        if not self._args.job.engines:
            return [], []
        servers: list[ServerAddress] = []
        if self._args.job.servers:
            processes: list[Remote[ServerProcess]] = []
            if self._args.job.engines == "own":
                process = self.server(0)
                stack.callback(process.close)
                process.start()
                processes.append(LocalRemote(process, "engine_0"))
            servers = self.addresses(processes)
            engines = self.clients(servers, processes)
        else:
            engines = [self.engine(0)]
        for engine in engines:
            stack.callback(asyncio.run, engine.close())
        return engines, servers

    def rollout_manager(self, engines: Sequence[Target], processes: Sequence[Remote[ServerProcess]]) -> RolloutManager:
        """The rollout side, with engines in other processes. ``processes``: see `clients`."""
        return RolloutManager(self._args, self.clients(engines, processes), load_tokenizer(self._args.tokenizer))

    def _connected(self, server: ServerAddress, owner: Restartable | None) -> Engine:
        """The engine for a server. ``owner`` can restart the server. An external server has no ``owner``."""
        engine: Engine = self._function(self._parts.connect)(self.setup(0), self._codec(), server, owner)
        return engine

    def _function(self, reference: Function) -> Callable[..., Any]:
        """Load a function that the record of the run's engine names."""
        return function(reference, ENGINES.option, self._args.rollout_backend)

    @property
    def _parts(self) -> ServerParts:
        parts = self._args.engine_kind.server
        assert parts is not None, f"the {self._args.rollout_backend} engine is not a server"
        return parts

    def _codec(self) -> Codec:
        path = self._args.tokenizer
        tokenizer = load_tokenizer(path)
        return Codec(
            decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
            encode=lambda text: encode_text(tokenizer, [text])[0],
            eos_token_ids=stop_token_ids(path, tokenizer),
            tokenizer=tokenizer,
        )


class RemoteOwner:
    """Restarts a server that may run in another process."""

    def __init__(self, process: Remote[ServerProcess]) -> None:
        self.process = process

    async def restart(self) -> None:
        """Restart the server, and wait until it answers again."""
        await asyncio.to_thread(self.process.ask, ServerProcess.restart)


class TrainOutput(NamedTuple):
    """The result of training on a rollout.

    ``metrics``: the metrics of the rollout, reduced over ranks. ``steps``: the ``train/*`` metrics of each optimizer
    step. ``columns``: new columns of the table (see `TokenColumns.trained`). For example, ``advantages`` is added if
    each response token has its own advantage. ``token_stats``: log-prob and entropy of each response token.
    ``token_stats`` is None with ``--token-stats none``.
    """

    metrics: dict[str, float]
    steps: list[dict[str, float]]
    columns: dict[str, np.ndarray]
    token_stats: TokenStats | None


def make_trainer(
    args: Args,
    rank: int = 0,
    world_size: int = 1,
    address: str | None = None,
    host: str = LOCAL_HOST,
    listener: socket.socket | None = None,
    store: dist.Store | None = None,
) -> Trainer:
    """Create the trainer of a rank. If the run has servers, the trainer can send its weights to them.

    Args:
        args: resolved arguments.
        rank, world_size: the rank of this trainer, and the number of training ranks.
        address: host:port of the rendezvous of the ranks. ``address`` is None if there is only one rank.
        host: an address of this machine that engines can reach.
        listener: a listening socket at ``address``, for rank 0.
        store: the rendezvous store of the ranks, instead of ``address``.

    Raises:
        ValueError: the GPUs of this machine cannot compute the run.
    """
    if args.job.gpus:
        check_here(computes=True)
    from slimelite.training.lora import adapter_format
    from slimelite.training.parallel import meeting_store
    from slimelite.training.trainer import Trainer

    if address is not None:
        store = meeting_store(args, address, rank, world_size, listener)
    trainer = Trainer(args, rank=rank, world_size=world_size, store=store)
    if args.job.servers:
        adapter = adapter_format(trainer.model.hf, args, args.hf_checkpoint) if args.sends_adapter else None
        trainer.servers = EngineFactory(args).transport(trainer.world.device, host, adapter)
    return trainer


class Workers(NamedTuple):
    """The workers that a launcher has started, for `Cluster`.

    ``trainers``: one for each rank, rank 0 first. ``engines``: the engines, or the addresses of their servers.
    ``others``: other workers with their own processes. The CPU time of ``others`` is a part of the run's CPU time.
    """

    rollout: Remote[RolloutManager]
    trainers: Sequence[Remote[Trainer]]
    engines: Sequence[Target]
    others: Sequence[Remote[object]] = ()


@contextmanager
def local_workers(args: Args, progress: Progress) -> Iterator[Workers]:
    """Create the workers of ``--launcher local``: one rank, one engine and the rollout worker, all in this process.

    The engine loads before the trainer, as in `ray_cluster.start_workers`.
    """
    import torch

    if not args.job.gpus:
        torch.set_num_threads(args.cpu_threads)
    with ExitStack() as stack:
        stack.enter_context(Monitor(args.hang_timeout))  # checks the processes of environments and graders
        progress(0, 0, "loading the engine")
        engines, servers = EngineFactory(args).local(stack)
        rollout = RolloutManager(args, engines, load_tokenizer(args.tokenizer))
        stack.callback(rollout.close)
        if args.job.trains and args.offload_rollout:
            rollout.release_memory()
        progress(0, 0, "loading the trainer")
        trainers = []
        if args.job.trains:
            trainer = make_trainer(args)
            stack.callback(trainer.close)
            trainers.append(LocalRemote(trainer, "trainer_0"))
        remotes = [LocalRemote(engine, "engine_0") for engine in engines]
        yield Workers(LocalRemote(rollout, "rollout"), trainers, servers or remotes)
