"""Ray actors around the plain classes: each method calls one of theirs."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from typing import Any

import ray

from slimelite.arguments import Args
from slimelite.arguments.secret import public_part
from slimelite.cluster.engines import build_engine, build_server, connect, server_parts, server_sync
from slimelite.engines.protocol import Engine, EngineInfo, GenerateRequest, GenerateResult, WeightBucket
from slimelite.tracking.noise import redirect_process_output


def _settle(folder: str, log: str) -> None:
    """Work where the driver works, so that relative paths mean the same; print into ``log``."""
    redirect_process_output(log)
    if os.path.isdir(folder):
        os.chdir(folder)
    else:
        print(f"{folder} is not on this node: relative paths are those of {os.getcwd()}")


def _host(public: bool) -> str:
    """Where to listen: for this machine alone, or for the other nodes too."""
    return str(ray.util.get_node_ip_address()) if public else "127.0.0.1"


class TrainerActor:
    """A `Trainer` rank."""

    def __init__(self, rank: int, world_size: int, folder: str, log: str) -> None:
        _settle(folder, log)
        self.rank = rank
        self.world_size = world_size
        self.listener: socket.socket | None = None
        self.trainer: Any = None
        self.sink: Any = None

    def rendezvous(self) -> str:
        """Where the ranks meet: host:port of this process, listened on from now on, so that nobody else gets it."""
        self.listener = socket.create_server((ray.util.get_node_ip_address(), 0))
        host, port = self.listener.getsockname()
        return f"{host}:{port}"

    def start(self, args: Args, address: str | None) -> None:
        """Build the trainer; all ranks at once, for they meet at rank 0's `rendezvous` (None: there is one rank)."""
        # Ray writes the environment that it makes to its logs, and to command lines
        os.environ.update(public_part(args.train_env_vars)[1])
        from slimelite.training.parallel import meeting_store
        from slimelite.training.trainer import Trainer

        store = meeting_store(args, address, self.rank, self.world_size, self.listener) if address else None
        self.trainer = Trainer(args, rank=self.rank, world_size=self.world_size, init_method=store)
        if server_parts(args):
            self.sink = server_sync(args, self.trainer.world.device, ray.util.get_node_ip_address())

    def push_weights(self, engines: list[Any], version: int) -> dict[str, float]:
        """Weights into the engine actors, or into SGLang servers."""
        sink = RaySink(engines) if self.sink is None else self.sink.to(engines)
        return self.trainer.push_weights(sink, version)

    def close(self) -> None:
        """Leave the process groups."""
        if self.sink is not None:
            self.sink.close()
        self.trainer.close()

    def call(self, method: str, *args: Any) -> Any:
        """A method of this actor, or of its trainer."""
        if method == "cpu_seconds":
            return time.process_time()
        target = self if method in ("rendezvous", "start", "push_weights", "close") else self.trainer
        return getattr(target, method)(*args)


class EngineActor:
    """An embedded engine; methods of the protocol run on the actor's event loop."""

    def __init__(self, args: Args, index: int, public: bool, folder: str, log: str) -> None:
        _settle(folder, log)
        self.engine = build_engine(args, index, _host(public))

    async def load_weights(self, names: list[str], shapes: list[tuple[int, ...]], dtype: str, raw: Any) -> None:
        """One bucket; ``raw`` is its bytes, uint8."""
        import torch

        # a copy: what the object store shares is read-only
        flat = torch.tensor(raw).view(getattr(torch, dtype))
        await self.engine.load_weights(WeightBucket(names, shapes, flat))

    async def call(self, method: str, *args: Any) -> Any:
        """Any other method of the protocol."""
        if method == "cpu_seconds":
            return time.process_time()
        return await getattr(self.engine, method)(*args)


class ServerActor:
    """Owns the process of an SGLang server; requests and weights do not pass through here."""

    def __init__(self, args: Args, index: int, public: bool, folder: str, log: str) -> None:
        _settle(folder, log)
        self.server = build_server(args, index, _host(public))

    def call(self, method: str, *args: Any) -> Any:
        """A method of the server, or its ``url``."""
        if method == "cpu_seconds":
            return time.process_time()
        return self.server.url if method == "url" else getattr(self.server, method)(*args)


class RayOwner:
    """Restarts a server through its actor."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    async def restart(self) -> None:
        """See `ServerOwner.restart`."""
        await self.handle.call.remote("restart")


class RolloutActor:
    """The rollout manager, with engines reached through their actors, or SGLang servers at their addresses."""

    def __init__(self, args: Args, engines: list[Any], folder: str, log: str) -> None:
        _settle(folder, log)
        from slimelite.cluster.workers import RolloutWorker

        reached: list[Engine] = []
        if server_parts(args):
            reached += [connect(args, server, RayOwner(handle) if handle else None) for server, handle in engines]
        else:
            reached += [RayEngine(handle) for handle in engines]
        self.worker = RolloutWorker(args, reached)

    def call(self, method: str, *args: Any) -> Any:
        """A method of the worker."""
        if method == "cpu_seconds":
            return time.process_time()
        return getattr(self.worker, method)(*args)


class RayEngine:
    """The engine protocol, spoken to an `EngineActor`."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    async def _call(self, method: str, *args: Any) -> Any:
        return await self.handle.call.remote(method, *args)

    async def info(self) -> EngineInfo:
        """See `Engine.info`."""
        return await self._call("info")

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """See `Engine.generate`."""
        return await self._call("generate", requests)

    async def score(self, input_ids: Sequence[int], start: int, temperature: float = 1.0) -> list[float]:
        """See `Engine.score`."""
        return await self._call("score", input_ids, start, temperature)

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """See `Engine.abort`."""
        await self._call("abort", request_ids)

    async def begin_weight_update(self, version: int) -> None:
        """See `Engine.begin_weight_update`."""
        await self._call("begin_weight_update", version)

    async def load_weights(self, bucket: WeightBucket) -> None:
        """See `Engine.load_weights`."""
        await self.handle.load_weights.remote(*_wire(bucket))

    async def end_weight_update(self) -> None:
        """See `Engine.end_weight_update`."""
        await self._call("end_weight_update")

    async def release_memory(self, tags: Sequence[str]) -> None:
        """See `Engine.release_memory`."""
        await self._call("release_memory", tags)

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """See `Engine.resume_memory`."""
        await self._call("resume_memory", tags)

    async def start_http(self) -> str:
        """See `Engine.start_http`."""
        return await self._call("start_http")

    async def close(self) -> None:
        """See `Engine.close`."""
        await self._call("close")


class RaySink:
    """Weight sync into engine actors: each bucket goes once into the object store, all engines read it there."""

    every_rank = False

    def __init__(self, engines: Sequence[Any]) -> None:
        self.engines = [RayEngine(handle) for handle in engines]

    def begin(self, version: int) -> None:
        """Stop every engine's decoding."""
        self._all("begin_weight_update", version)

    def send(self, bucket: WeightBucket) -> None:
        """One bucket into every engine."""
        *layout, data = _wire(bucket)
        raw = ray.put(data)
        ray.get([e.handle.load_weights.remote(*layout, raw) for e in self.engines])

    def end(self) -> None:
        """Every engine decodes again."""
        self._all("end_weight_update")

    def _all(self, method: str, *args: Any) -> None:
        ray.get([e.handle.call.remote(method, *args) for e in self.engines])


def _wire(bucket: WeightBucket) -> tuple[list[str], list[tuple[int, ...]], str, Any]:
    # numpy bytes travel out of band, a torch tensor would be copied through pickle
    import torch

    dtype = str(bucket.flat.dtype).removeprefix("torch.")
    return bucket.names, bucket.shapes, dtype, bucket.flat.cpu().view(torch.uint8).numpy()
