"""Optimizers and the step they take together."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from slimelite.arguments import OptimizerArgs
from slimelite.training.model import LanguageModel
from slimelite.training.muon import Muon
from slimelite.training.parallel import whole


class Optimizers:
    """AdamW, or Muon for the matrices between embedding and head and AdamW for the rest (``--optimizer muon``).

    Norms and biases have no weight decay.
    """

    def __init__(self, args: OptimizerArgs, model: LanguageModel) -> None:
        self.args = args
        self.all = _build(args, model)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Everything that is trained."""
        return [p for optimizer in self.all for group in optimizer.param_groups for p in group["params"]]

    def step(self, lr: float, peak: float, loss: Tensor) -> tuple[float, bool]:
        """Clip the gradients, update at learning rate ``lr`` and forget the gradients.

        ``loss``: 0-d, of the step, over all ranks; a loss that is no number may have a gradient that is one.

        Muon's rate is to ``--muon-lr`` what ``lr`` is to ``peak``, that of the schedule (a checkpoint's, not ``--lr``).

        Returns:
            the norm of the gradient before clipping, and whether it and the loss were finite; a step where one was
            not changes nothing.

        Raises:
            FloatingPointError: loss or gradient is not finite, under ``--nonfinite-grad fail``.
        """
        norm = self._clip()
        finite = bool(norm.isfinite()) and bool(loss.isfinite())
        if not finite and self.args.nonfinite_grad == "fail":
            raise FloatingPointError(
                f"the step's loss is {loss}, its gradient's norm {norm}; --nonfinite-grad skip leaves such steps out"
            )
        self._set_lr(lr, peak)
        for optimizer in self.all:
            if finite:
                optimizer.step()
            optimizer.zero_grad()
        return float(norm), finite

    def reset(self) -> None:
        """Forget the moments (``--reset-optimizer-states``)."""
        for optimizer in self.all:
            optimizer.state.clear()

    def learning_rates(self) -> list[float]:
        """Of each parameter group."""
        return [group["lr"] for optimizer in self.all for group in optimizer.param_groups]

    def _set_lr(self, lr: float, peak: float) -> None:
        for optimizer in self.all:
            scaled = isinstance(optimizer, Muon) and peak > 0
            for group in optimizer.param_groups:
                group["lr"] = self.args.muon_lr * lr / peak if scaled else lr

    def _clip(self) -> Tensor:
        parameters = self.parameters
        grads = [p.grad for p in parameters if p.grad is not None]
        norm = whole(nn.utils.get_total_norm(grads))
        if self.args.clip_grad > 0 and norm.isfinite():
            nn.utils.clip_grads_with_norm_(parameters, self.args.clip_grad, norm)
        return norm


def _build(args: OptimizerArgs, model: LanguageModel) -> list[Optimizer]:
    trained = [(name, p) for name, p in model.named_weights() if p.requires_grad]
    if args.optimizer != "muon":
        return [_adamw(args, [p for _, p in trained])]
    outer = {id(model.hf.get_input_embeddings().weight), id(model.hf.get_output_embeddings().weight)}
    matrices = [p for _, p in trained if p.ndim == 2 and id(p) not in outer]
    rest = [p for _, p in trained if p.ndim != 2 or id(p) in outer]
    muon = Muon(matrices, lr=args.muon_lr, momentum=args.muon_momentum, weight_decay=args.weight_decay)
    return [_adamw(args, rest), muon]


def _adamw(args: OptimizerArgs, parameters: Iterable[nn.Parameter]) -> AdamW:
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": args.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW(
        [g for g in groups if g["params"]],
        lr=args.lr,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_eps,
        fused=True,
    )
