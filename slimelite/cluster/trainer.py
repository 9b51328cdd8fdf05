"""The trainer of a rank, which can send its weights to the engines."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from slimelite.arguments import Args
from slimelite.cluster.workers import LOCAL_HOST, EngineFactory, RemoteSink
from slimelite.engines.protocol import Transport, WeightSink
from slimelite.samples.table import SampleTable
from slimelite.training.lora import adapter_format
from slimelite.training.parallel import meeting_store
from slimelite.training.profiling import Profiler
from slimelite.training.trainer import Trainer
from slimelite.training.weights import buckets


class TrainerWorker(Trainer):
    """A `Trainer` that can send its weights to the engines.

    Args:
        args: resolved arguments.
        rank, world_size: rank of this trainer, and number of training ranks.
        address: host:port where the ranks meet; None if there is only one rank.
        host: an address of this machine that engines can reach.
        listener: a socket at ``address``, for rank 0.
    """

    def __init__(
        self,
        args: Args,
        rank: int = 0,
        world_size: int = 1,
        address: str | None = None,
        host: str = LOCAL_HOST,
        listener: socket.socket | None = None,
    ) -> None:
        store = meeting_store(args, address, rank, world_size, listener) if address else None
        super().__init__(args, rank=rank, world_size=world_size, store=store)
        self._servers: Transport | None = None
        if args.job.servers:
            adapter = adapter_format(self.model.hf, args, args.hf_checkpoint) if args.sends_adapter else None
            self._servers = EngineFactory(args).transport(self.world.device, host, adapter)
        self._profiler = Profiler(args, rank)
        if args.use_pytorch_profiler:
            self.timed.around = self._profiler.of_pass

    def train(self, rollout_id: int, table: SampleTable) -> dict[str, float]:
        """See `Trainer.train`."""
        with self._profiler.rollout(rollout_id):
            return super().train(rollout_id, table)

    def push_to(self, engines: Sequence[Any], version: int) -> dict[str, float]:
        """Send the weights to ``engines``, remote engines or servers; see `Trainer.push_weights`."""
        sink: WeightSink = RemoteSink(engines) if self._servers is None else self._servers.to(engines)
        return self.push_weights(sink, version)

    def get_weights(self) -> dict[str, Tensor]:
        """On rank 0 all weights, on the CPU, by Hugging Face name, in the optimizer's dtype; on other ranks nothing."""
        weights: dict[str, Tensor] = {}
        size = self.args.update_weight_buffer_size
        for bucket in buckets(self.model.named_weights(), size, memory=self.memory, filed=self.model.as_filed):
            if self.world.rank == 0:
                weights |= {name: tensor.cpu().clone() for name, tensor in bucket.tensors()}
        return weights

    def close(self) -> None:
        """Leave the process groups."""
        self._profiler.close()
        if self._servers is not None:
            self._servers.close()
        super().close()
