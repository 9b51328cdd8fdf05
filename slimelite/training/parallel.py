"""Ranks: the process group, a DeviceMesh with named dimensions, and FSDP2 over it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from slimelite.arguments import ClusterArgs, PerfArgs
from slimelite.base.reading import Reading
from slimelite.models.sources import everything
from slimelite.training.quantized import SOURCE, STATE, FrozenLinear


@dataclass(frozen=True)
class World:
    """This rank and its place among all trainer ranks.

    ``rank`` of ``ranks``: processes. ``dp_rank`` of ``dp_size``: the shares of the data. Both pairs are equal so far,
    because every rank trains different rows. Ranks that computed the same rows would have the same ``dp_rank``.
    ``mesh``: its dimensions are ``replicate`` (copies of the model, HSDP) and ``shard``. Data is split over both.
    """

    rank: int
    ranks: int
    dp_rank: int
    dp_size: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def compute_dtype(self) -> torch.dtype:
        """dtype of the forward and backward passes: bf16 on a GPU; fp32 on a CPU, where bf16 is slower."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of a CPU tensor over all shares of the data (in place)."""
        if self.dp_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def wait_at_most(self, minutes: float) -> None:
        """Let a collective of any group fail after ``minutes``."""
        for group in list(distributed_c10d._world.pg_map):
            distributed_c10d._set_pg_timeout(timedelta(minutes=minutes), group)

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def meeting_store(
    args: ClusterArgs, address: str, rank: int, world_size: int, listener: socket.socket | None
) -> dist.Store:
    """The store at ``address`` (host:port) where the ranks meet. Rank 0 serves it, on ``listener`` if given."""
    host, _, port = address.rpartition(":")
    return dist.TCPStore(
        host,
        int(port),
        world_size,
        is_master=rank == 0,
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener is not None and rank == 0 else None,
    )


def join_world(args: PerfArgs, rank: int, world_size: int, store: dist.Store | None) -> World:
    """Meet the other ranks at ``store``.

    A single rank needs no store and opens no port. CPU tensors always use gloo.

    Raises:
        ValueError: there are several ranks and no store.
    """
    if world_size > 1 and store is None:
        raise ValueError(f"{world_size} training ranks need a store to meet at")
    # SGLang's servers set this variable, and a broadcast needs the same value on both sides. NCCL reads it at first use
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    device = torch.device("cpu")
    if args.job.gpus:
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,cuda:{args.distributed_backend or 'nccl'}"
    if not dist.is_initialized():
        dist.init_process_group(
            backend,
            rank=rank,
            world_size=world_size,
            store=dist.HashStore() if store is None else store,
            timeout=timedelta(minutes=args.distributed_timeout_minutes),
        )
    shape = (args.dp_replicate_size, world_size // args.dp_replicate_size)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    return World(rank, world_size, rank, world_size, device, mesh)


def shard_model(model: nn.Module, layers: Iterable[nn.Module], world: World, *, cpu_offload: bool) -> None:
    """Shard ``layers`` and then the rest of ``model`` over the mesh, and move it to the device.

    A parameter without data is read from the place in its ``SOURCE``; each rank reads its own rows. Rank 0 scatters the
    other parameters, which its model has. On other ranks they are on the meta device. A single rank that computes in
    fp32 uses no FSDP, because it has nothing to scatter or cast. FSDP would copy every weight and gradient again and
    again (5 % of a step and 0.5 GB at 135M parameters on a CPU).
    """
    if world.ranks == 1 and world.compute_dtype == torch.float32:
        for tensor in (*model.parameters(), *model.buffers()):  # mapped from a file, which others may write to
            tensor.data = tensor.data.clone()
        return
    # a single rank's shard is a copy, so its original need not be kept
    full = dict(model.named_parameters()) if world.ranks > 1 else {}
    kept = _kept_whole(model, world)
    on_gpu = world.device.type == "cuda"
    half = MixedPrecisionPolicy(param_dtype=world.compute_dtype, reduce_dtype=torch.float32)
    exact = world.compute_dtype == torch.float32
    for module in (*layers, model):
        fully_shard(
            module,
            mesh=world.mesh if world.mesh["replicate"].size() > 1 else world.mesh["shard"],
            mp_policy=MixedPrecisionPolicy() if exact else half,
            offload_policy=CPUOffloadPolicy() if on_gpu and cpu_offload else OffloadPolicy(),
            ignored_params=kept,
        )
    if world.ranks > 1:
        _scatter(model, full, world, torch.device("cpu") if cpu_offload else world.device)


def _kept_whole(model: nn.Module, world: World) -> set[nn.Parameter]:
    """Parameters that FSDP leaves alone: the frozen ones, if a single rank has weights in 4 bits; else none. They have
    the dtype that the rank computes in. There is nothing to gather then, and copies of the embedding and head would
    cost what 4 bits save.
    """
    if world.ranks > 1 or not any(parameter.dtype == torch.uint8 for parameter in model.parameters()):
        return set()
    frozen = {parameter for parameter in model.parameters() if not parameter.requires_grad}
    for parameter in frozen:
        parameter.data = parameter.data.to(world.device, copy=True)  # mapped from a file, which others may write to
    return frozen


def _scatter(model: nn.Module, full: dict[str, nn.Parameter], world: World, home: torch.device) -> None:
    """Give every shard of ``model`` its part of the ``full`` parameters. The shards are on ``home``."""
    # to_empty would discard the buffers, which hold real values even in a meta model (rotary frequencies)
    model._apply(lambda tensor: torch.empty_like(tensor, device=home) if tensor.is_meta else tensor)
    sources = {name: source for name, each in full.items() if (source := getattr(each, SOURCE, None)) is not None}
    with Reading(sum(local(p).nbytes for name, p in model.named_parameters() if name in sources)) as reading:
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            mine = parameter.to_local().detach()
            if (source := sources.get(name)) is None:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                whole = full[name].detach() if world.rank == 0 else empty
                part = distribute_tensor(whole.to(world.device), parameter.device_mesh, parameter.placements)
                mine.copy_(part.to_local())
                continue
            mesh, placements = parameter.device_mesh, parameter.placements
            (count, *_), (begin, *_) = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
            if parameter.dtype == torch.uint8:
                layer = model.get_submodule(name.rpartition(".")[0])
                assert isinstance(layer, FrozenLinear)
                mine.copy_(layer.quantized(everything(source).float())[begin : begin + count])
            else:
                mine.copy_(source.rows(begin, begin + count))
            reading.add(mine.nbytes)
    saved = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        # rank 0 alone may have read the model's file, and brought its weights to 4 bits
        if name in saved or name.rpartition(".")[2] in STATE:
            dist.broadcast(buffer, 0)


def reshard(model: nn.Module) -> None:
    """Drop gathered parameters after passes without gradient, so that the next pass gathers the current ones."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """The full tensor behind a sharded one (collective). A plain tensor is returned unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor. The memory may be shared. A plain tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def be_deterministic() -> None:
    """Let torch use only repeatable algorithms (``--deterministic-mode``)."""
    # cuBLAS reads it when its first handle is made
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
