"""Muon: momentum whose matrices are made orthogonal by Newton-Schulz iterations (kellerjordan.github.io/posts/muon)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

# quintic iteration x -> ax + b(xxᵀ)x + c(xxᵀ)²x; it drives all singular values to about 1
COEFFICIENTS = (3.4445, -4.7750, 2.0315)

# of the matrices that a rank iterates together, or of one larger matrix; the iterations hold about five times as much
STACK_BYTES = 2**28


class Muon(torch.optim.Optimizer):
    """Muon for 2-D parameters, plain or sharded by rows.

    Equal shapes are stacked and iterated together. The iterations run in the parameters' dtype, fp32 here: on a CPU
    that is several times faster than bf16. Ranks that share a model's shards share the matrices: each gets the whole of
    some, iterates them, and sends every rank its rows of the result.

    Args:
        params: matrices.
        lr: learning rate; the elements of an update have RMS of about lr / sqrt(columns).
        momentum: of the (Nesterov) average of gradients.
        weight_decay: decoupled.
        steps: Newton-Schulz iterations.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], *, lr: float, momentum: float, weight_decay: float, steps: int = 5
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "steps": steps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every matrix that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                ranks = _Ranks(parameters[0])
                together = ranks.size * max(1, STACK_BYTES // (shape.numel() * parameters[0].element_size()))
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for first in range(0, len(parameters), together):
                    part = parameters[first : first + together]
                    directions = [_local(self._momentum(parameter, group["momentum"])) for parameter in part]
                    for parameter, update in zip(part, ranks.orthogonalize(directions, group["steps"]), strict=True):
                        local = _local(parameter)
                        local.mul_(1 - group["lr"] * group["weight_decay"])
                        local.add_(update, alpha=-group["lr"] * scale)

    def _momentum(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        """The gradient, averaged with its past (sharded like it)."""
        assert parameter.grad is not None
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(state["momentum"], momentum)


class _Ranks:
    """The ranks that hold the rows of matrices like ``parameter``."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.size, self.rank, self.group = 1, 0, None
        if isinstance(parameter, DTensor):
            dimension = parameter.placements.index(Shard(0))
            self.size = parameter.device_mesh.size(dimension)
            self.rank = parameter.device_mesh.get_local_rank(dimension)
            self.group = parameter.device_mesh.get_group(dimension)
        every = -(-len(parameter) // self.size)
        # of each rank, as torch.chunk deals them
        self.rows = [min(every, max(0, len(parameter) - rank * every)) for rank in range(self.size)]

    def orthogonalize(self, shards: Sequence[Tensor], steps: int) -> Sequence[Tensor]:
        """This rank's rows of each orthogonalized matrix, from this rank's rows of each (collective)."""
        if self.size == 1:
            return orthogonalize(torch.stack(list(shards)), steps).unbind()
        columns = shards[0].shape[1]
        theirs = [range(rank, len(shards), self.size) for rank in range(self.size)]
        mine = len(theirs[self.rank])
        out = [len(matrices) * shards[0].numel() for matrices in theirs]
        back = [mine * rows * columns for rows in self.rows]
        by_owner = torch.cat([shards[i].flatten() for matrices in theirs for i in matrices])
        parts = self._exchange(by_owner, out, back).split(back)
        whole = torch.cat([x.view(mine, n, columns) for x, n in zip(parts, self.rows, strict=True)], dim=1)
        found = orthogonalize(whole, steps) if mine else whole
        by_holder = torch.cat([x.flatten() for x in found.split(self.rows, dim=1)])
        received = iter(self._exchange(by_holder, back, out).view(len(shards), *shards[0].shape))
        results = {i: next(received) for matrices in theirs for i in matrices}
        return [results[i] for i in range(len(shards))]

    def _exchange(self, tensor: Tensor, sizes: list[int], received: list[int]) -> Tensor:
        result = tensor.new_empty(sum(received))
        dist.all_to_all_single(result, tensor, received, sizes, group=self.group)
        return result


def orthogonalize(matrices: Tensor, steps: int) -> Tensor:
    """About U·Vᵀ for each matrix U·S·Vᵀ of [n, rows, columns]; singular values end between 0.7 and 1.2."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
