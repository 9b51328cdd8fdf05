"""Learning rate by optimizer step: warm-up, then one of Megatron's decay styles."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from slimelite.arguments import OptimizerArgs

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
    """Learning rates relative to a peak; fields are the ``--lr-*`` flags, in optimizer steps.

    ``decay_iters`` None: all steps of the run.
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
        """The schedule that the flags describe.

        Raises:
            ValueError: WSD without the length of its last phase.
        """
        if args.lr_decay_style == "WSD" and not args.lr_wsd_decay_iters:
            raise ValueError("--lr-decay-style WSD needs --lr-wsd-decay-iters, the length of its last phase")
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
        """What differs from ``other``, as "--lr 0.001 (not 0.005)"."""
        return [
            f"{flag} {getattr(self, name)} (not {getattr(other, name)})"
            for name, flag in flags.items()
            if getattr(self, name) != getattr(other, name)
        ]

    def at(self, step: int, run_steps: int) -> float:
        """The learning rate of optimizer step ``step`` (the first is 0) in a run of ``run_steps``.

        Warm-up ends with the peak: its first step has peak / warmup_iters where Megatron's has 0.
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
        """The share of (peak - min_lr) that is left: 1 after warm-up, falling to 0 at ``total``."""
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
