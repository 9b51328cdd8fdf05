"""The learning-rate schedule, and the optimizers AdamW and Muon."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import AdamW, Optimizer

from slimelite.arguments import OptimizerArgs
from slimelite.training.model import LanguageModel
from slimelite.training.parallel import local, whole

# field of a schedule -> flag
FLAGS = {
    "style": "--lr-decay-style",
    "peak": "--lr",
    "warmup_init": "--lr-warmup-init",
    "min_lr": "--min-lr",
    "warmup_iters": "--lr-warmup-iters",
    "warmup_fraction": "--lr-warmup-fraction",
    "decay_iters": "--lr-decay-iters",
    "wsd_style": "--lr-wsd-decay-style",
    "wsd_iters": "--lr-wsd-decay-iters",
}
CRITIC_FLAGS = FLAGS | {"peak": "--critic-lr", "warmup_iters": "--critic-lr-warmup-iters"}


@dataclass(frozen=True, slots=True)
class LrSchedule:
    """The learning rate of each optimizer step: first a warm-up, then one of Megatron's decay styles.

    The fields are the values of the ``--lr-*`` flags; durations are in optimizer steps. If ``decay_iters`` is None, the
    decay ends at the last step of the run.
    """

    style: str
    peak: float
    warmup_init: float
    min_lr: float
    warmup_iters: int
    warmup_fraction: float | None
    decay_iters: int | None
    wsd_style: str
    wsd_iters: int | None

    @classmethod
    def from_args(cls, args: OptimizerArgs) -> LrSchedule:
        """The schedule that the flags describe."""
        return cls(
            style=args.lr_decay_style,
            peak=args.lr,
            warmup_init=args.lr_warmup_init,
            min_lr=args.min_lr,
            warmup_iters=args.lr_warmup_iters,
            warmup_fraction=args.lr_warmup_fraction,
            decay_iters=args.lr_decay_iters,
            wsd_style=args.lr_wsd_decay_style,
            wsd_iters=args.lr_wsd_decay_iters,
        )

    def differences(self, other: LrSchedule, flags: Mapping[str, str] = FLAGS) -> list[str]:
        """The flags that differ between this schedule and ``other``, with both values, such as "--lr 0.001 (not
        0.005)"."""
        return [
            f"{flag} {getattr(self, name)} (not {getattr(other, name)})"
            for name, flag in flags.items()
            if getattr(self, name) != getattr(other, name)
        ]

    def at(self, step: int, run_steps: int) -> float:
        """The learning rate of optimizer step ``step`` (the first is 0) in a run of ``run_steps`` steps.

        The last step of the warm-up has the peak learning rate. If warmup_init is 0, the first step has the learning
        rate peak / warmup_iters. (In Megatron, the first step has the learning rate 0.)
        """
        total = run_steps if self.decay_iters is None else self.decay_iters
        warmup = self.warmup_iters
        if self.warmup_fraction is not None:
            warmup = round(self.warmup_fraction * total)
        if step < warmup:
            return self.warmup_init + (self.peak - self.warmup_init) * (step + 1) / warmup
        if self.style == "constant":
            return self.peak
        if self.style == "inverse-square-root":
            return max(self.min_lr, self.peak * math.sqrt(max(warmup, 1) / max(step + 1, 1)))
        if step >= total:
            return self.min_lr
        return self.min_lr + (self.peak - self.min_lr) * self._remaining(step, warmup, total)

    def _remaining(self, step: int, warmup: int, total: int) -> float:
        """The factor of (peak - min_lr): 1 after the warm-up, falling to 0 at step ``total``."""
        style, begin, length = self.style, warmup, total - warmup
        if style == "WSD":
            style, length = self.wsd_style, min(self.wsd_iters or 0, total)
            begin = total - length
            if step < begin:
                return 1.0
        done = (step - begin) / length
        match style:
            case "linear":
                return 1 - done
            case "cosine":
                return 0.5 * (math.cos(math.pi * done) + 1)
            case "exponential":
                return 2 * 0.5**done - 1
            case "minus_sqrt":
                return 1 - math.sqrt(done)
            case _:
                raise ValueError(f"unknown --lr-decay-style {style!r}")


class Optimizers:
    """The optimizers of a model. By default AdamW trains all weights. With ``--optimizer muon``, Muon trains the
    matrices between embedding and head, and AdamW the other weights.

    Norms and biases do not have weight decay.
    """

    def __init__(self, args: OptimizerArgs, model: LanguageModel) -> None:
        self.args = args
        trained = list(model.trained().values())
        outer = {id(model.hf.get_input_embeddings().weight), id(model.head.weight)}
        inner = [p for p in trained if p.ndim == 2 and id(p) not in outer] if args.optimizer == "muon" else []
        apart = set(inner)
        rest = [p for p in trained if p not in apart]
        groups = [
            {"params": [p for p in rest if p.ndim >= 2], "weight_decay": args.weight_decay},
            {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.all: list[Optimizer] = [
            AdamW(
                [group for group in groups if group["params"]],
                lr=args.lr,
                betas=(args.adam_beta1, args.adam_beta2),
                eps=args.adam_eps,
                fused=True,
            )
        ]
        if inner:
            self.all += [Muon(inner, lr=args.muon_lr, momentum=args.muon_momentum, weight_decay=args.weight_decay)]

    def step(self, lr: float, peak: float, loss: Tensor) -> tuple[float, bool]:
        """Clip the gradients, update with learning rate ``lr``, and clear the gradients.

        ``loss``: 0-d, the step's loss over all ranks. Like the gradient, the loss must be finite: a NaN loss may have a
        finite gradient. ``peak``: the peak learning rate of the schedule. After a resume, the peak may differ from
        ``--lr``. The learning rate of Muon is ``--muon-lr`` times ``lr / peak``.

        Returns:
            the norm of the gradient before clipping, and whether the norm and the loss are finite. If the norm or the
            loss is not finite, the weights and moments are unchanged.

        Raises:
            FloatingPointError: the loss or the gradient is not finite, and ``--nonfinite-grad`` is ``fail``.
        """
        norm = self._clip()
        finite = bool(norm.isfinite()) and bool(loss.isfinite())
        if not finite and self.args.nonfinite_grad == "fail":
            raise FloatingPointError(
                f"the step's loss is {loss}, and its gradient norm is {norm}; set --nonfinite-grad skip to skip such "
                "steps"
            )
        self._set_lr(lr, peak)
        for optimizer in self.all:
            if finite:
                optimizer.step()
            optimizer.zero_grad()
        return float(norm), finite

    def reset(self) -> None:
        """Delete the moments of all optimizers (``--reset-optimizer-states``)."""
        for optimizer in self.all:
            optimizer.state.clear()

    def learning_rates(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [group["lr"] for optimizer in self.all for group in optimizer.param_groups]

    def _set_lr(self, lr: float, peak: float) -> None:
        for optimizer in self.all:
            scaled = isinstance(optimizer, Muon) and peak > 0
            for group in optimizer.param_groups:
                group["lr"] = self.args.muon_lr * lr / peak if scaled else lr

    def _clip(self) -> Tensor:
        # keep this order of the parameters: it determines the rounding of the sum of squares
        parameters = [p for optimizer in self.all for group in optimizer.param_groups for p in group["params"]]
        norm = whole(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
        if self.args.clip_grad > 0 and norm.isfinite():
            nn.utils.clip_grads_with_norm_(parameters, self.args.clip_grad, norm)
        return norm


# a, b, c of the iteration x -> ax + b(xxᵀ)x + c(xxᵀ)²x. It moves all singular values to about 1
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5

# largest stack of matrices on a rank. A larger matrix is iterated alone. An iteration uses about five times this memory
STACK_BYTES = 2**28


class Muon(torch.optim.Optimizer):
    """Muon for 2-D parameters, plain or sharded by rows (kellerjordan.github.io/posts/muon). Newton-Schulz iterations
    orthogonalize the momentum of each matrix, and the result is the update.

    `torch.optim.Muon` computes the same update in bf16, one matrix at a time, and every rank gathers the shards in
    every iteration. This class stacks matrices of equal shape, and computes their iterations together in fp32, the
    parameters' dtype. (On a CPU fp32 is several times faster than bf16.) The ranks that share a model distribute the
    matrices among themselves. Each rank gathers some whole matrices, computes their iterations, and sends every rank
    its rows of the result.

    Args:
        params: 2-D parameters.
        lr: learning rate. The elements of an update have an RMS of about lr / sqrt(columns).
        momentum: the factor of the old average in the (Nesterov) average of gradients.
        weight_decay: factor of the decoupled weight decay.
    """

    def __init__(self, params: Iterable[nn.Parameter], *, lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
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
                    directions = [local(self._momentum(parameter, group["momentum"])) for parameter in part]
                    for parameter, update in zip(part, ranks.orthogonalize(directions), strict=True):
                        mine = local(parameter)
                        mine.mul_(1 - group["lr"] * group["weight_decay"])
                        mine.add_(update, alpha=-group["lr"] * scale)

    def _momentum(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        """The Nesterov average of past and current gradients, sharded like the gradients."""
        assert parameter.grad is not None
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(state["momentum"], momentum)


class _Ranks:
    """The ranks among which matrices such as ``parameter`` are sharded by rows."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.size, self.rank, self.group = 1, 0, None
        if isinstance(parameter, DTensor):
            dimension = parameter.placements.index(Shard(0))
            self.size = parameter.device_mesh.size(dimension)
            self.rank = parameter.device_mesh.get_local_rank(dimension)
            self.group = parameter.device_mesh.get_group(dimension)
        every = -(-len(parameter) // self.size)
        # number of rows of each rank, as in torch.chunk
        self.rows = [min(every, max(0, len(parameter) - rank * every)) for rank in range(self.size)]

    def orthogonalize(self, shards: Sequence[Tensor]) -> Sequence[Tensor]:
        """This rank's rows of each orthogonalized matrix, computed from every rank's rows (collective)."""
        if self.size == 1:
            return orthogonalize(torch.stack(list(shards))).unbind()
        columns = shards[0].shape[1]
        theirs = [range(rank, len(shards), self.size) for rank in range(self.size)]
        order = [i for matrices in theirs for i in matrices]
        mine = len(theirs[self.rank])
        out = [len(matrices) * shards[0].numel() for matrices in theirs]
        back = [mine * rows * columns for rows in self.rows]
        parts = self._exchange(torch.cat([shards[i].flatten() for i in order]), out, back).split(back)
        whole = torch.cat([x.view(mine, n, columns) for x, n in zip(parts, self.rows, strict=True)], dim=1)
        updates = orthogonalize(whole) if mine else whole
        by_holder = torch.cat([x.flatten() for x in updates.split(self.rows, dim=1)])
        updates = self._exchange(by_holder, back, out).view(len(shards), *shards[0].shape)
        return updates[np.argsort(order)].unbind()

    def _exchange(self, tensor: Tensor, sizes: list[int], received: list[int]) -> Tensor:
        result = tensor.new_empty(sum(received))
        dist.all_to_all_single(result, tensor, received, sizes, group=self.group)
        return result


def orthogonalize(matrices: Tensor) -> Tensor:
    """An approximation of U·Vᵀ for each matrix of [n, rows, columns], whose singular value decomposition is U·S·Vᵀ. The
    singular values of the result are between 0.7 and 1.2."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
