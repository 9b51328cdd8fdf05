"""The trainer ranks: their process group, a DeviceMesh with named dimensions, and FSDP2 over the mesh."""

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
    """The index of this rank, and facts about all trainer ranks.

    ``rank``: the index of this process, 0 … ``ranks`` − 1. ``dp_rank``: the index of this rank's share of the data, 0 …
    ``dp_size`` − 1. At present ``dp_rank`` equals ``rank``, and ``dp_size`` equals ``ranks``, because every rank trains
    on different rows. ``mesh``: its dimensions are ``replicate`` (copies of the model, HSDP) and ``shard``. Data is
    split over both dimensions.
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
        """Replace a CPU tensor by its sum over all ranks, and return it."""
        if self.dp_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def wait_at_most(self, minutes: float) -> None:
        """Set the timeout of the collectives in all process groups to ``minutes``."""
        for group in list(distributed_c10d._world.pg_map):
            distributed_c10d._set_pg_timeout(timedelta(minutes=minutes), group)

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def meeting_store(
    args: ClusterArgs, address: str, rank: int, world_size: int, listener: socket.socket | None
) -> dist.Store:
    """The TCPStore at ``address`` (host:port), which the ranks use to form a process group. Rank 0 runs the server of
    this store. ``listener``: an open socket for the server, or None."""
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
    """Create the process group of all ranks with ``store``.

    A single rank does not need a store and does not open a port. Collectives on CPU tensors always use gloo.

    Raises:
        ValueError: there are several ranks and no store.
    """
    if world_size > 1 and store is None:
        raise ValueError(f"{world_size} training ranks need a store; create one with meeting_store")
    # SGLang's servers set this variable. A broadcast needs the same value in both processes. NCCL reads it at first use
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
    """Shard ``layers`` and then the rest of ``model`` over the mesh, and move the model to the device.

    If a parameter has the attribute ``SOURCE``, each rank reads from the model's files only the rows of its own shard.
    All other parameters are on the meta device, except on rank 0, which has their data and scatters it. A single rank
    that computes in fp32 does not use FSDP, because it needs no scattering and no casts. FSDP would copy every weight
    and gradient in each step (5 % of a step's time and 0.5 GB at 135M parameters on a CPU).
    """
    if world.ranks == 1 and world.compute_dtype == torch.float32:
        # the tensors may be memory-mapped from a file that another process may write to
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()
        return
    # the shard of a single rank is a copy of the whole model, so the original is not needed
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
    """The parameters that FSDP ignores: all frozen parameters, if a single rank has weights in 4 bits; else none.

    These parameters already have the dtype that the rank computes in, and a single rank has nothing to gather. FSDP
    would copy the embedding and the head, and the copies would need as much memory as 4 bits save.
    """
    if world.ranks > 1 or not any(parameter.dtype == torch.uint8 for parameter in model.parameters()):
        return set()
    frozen = {parameter for parameter in model.parameters() if not parameter.requires_grad}
    for parameter in frozen:
        # a copy, because the tensor may be memory-mapped from a file that another process may write to
        parameter.data = parameter.data.to(world.device, copy=True)
    return frozen


def _scatter(model: nn.Module, full: dict[str, nn.Parameter], world: World, home: torch.device) -> None:
    """Fill every shard of ``model`` with its part of the ``full`` parameters. The shards are on the device ``home``."""
    # to_empty would discard the buffers, which have real values even in a meta model (such as rotary frequencies)
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
        # perhaps only rank 0 has read the model's files and quantized the weights, so it sends these buffers
        if name in saved or name.rpartition(".")[2] in STATE:
            dist.broadcast(buffer, 0)


def reshard(model: nn.Module) -> None:
    """Free the gathered parameters after passes without gradient. So the next pass gathers the current parameters."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor of a sharded tensor (collective). A plain tensor is returned unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, without a copy. A plain tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def be_deterministic() -> None:
    """Let torch use only deterministic algorithms (``--deterministic-mode``)."""
    # cuBLAS reads this variable when it creates its first handle
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
