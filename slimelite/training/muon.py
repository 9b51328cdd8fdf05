"""Muon: momentum whose matrices are made orthogonal by Newton-Schulz iterations (kellerjordan.github.io/posts/muon)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

# quintic iteration x -> ax + b(xxᵀ)x + c(xxᵀ)²x; it drives all singular values to about 1
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.Optimizer):
    """Muon for 2-D parameters, plain or sharded.

    Equal shapes are stacked and iterated together. The iterations run in the parameters' dtype, fp32 here: on a CPU
    that is several times faster than bf16. A sharded gradient is gathered for them, and each rank keeps its shard
    of the update.

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
            by_shape: dict[torch.Size, list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append((parameter, self._momentum(parameter, group["momentum"])))
            for shape, pairs in by_shape.items():
                directions = orthogonalize(torch.stack([_gathered(d) for _, d in pairs]), group["steps"])
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for (parameter, _), direction in zip(pairs, directions, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(_like(direction, parameter), alpha=-group["lr"] * scale)

    def _momentum(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        """The gradient, averaged with its past (sharded like it)."""
        assert parameter.grad is not None
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(state["momentum"], momentum)


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


def _gathered(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _like(full: Tensor, parameter: nn.Parameter) -> Tensor:
    """``full``, sharded as ``parameter`` is."""
    if not isinstance(parameter, DTensor):
        return full
    return distribute_tensor(full.contiguous(), parameter.device_mesh, parameter.placements, src_data_rank=None)
