"""A model in training: gradients over micro-batches, optimizer steps, and progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from slimelite.arguments import Args
from slimelite.training.batch import MicroBatch
from slimelite.training.columns import TokenColumns
from slimelite.training.model import LanguageModel
from slimelite.training.optimizer import FLAGS, LrSchedule, Optimizers
from slimelite.training.parallel import World, reshard
from slimelite.training.planning import Step
from slimelite.training.sums import MetricSums


@dataclass(slots=True)
class Progress:
    """How far training is: ``rollout_id`` of the last rollout trained on, optimizer ``steps`` taken, ``weight_version``
    last pushed, and the learning rate's ``schedule``.
    """

    rollout_id: int
    steps: int
    weight_version: int
    schedule: LrSchedule


# covariant: a Learner[PolicyModel] is a Learner[LanguageModel]
Model = TypeVar("Model", bound=LanguageModel, covariant=True)


class Learner(Generic[Model]):
    """A model, its optimizers and its progress; what the policy and the critic have in common.

    Args:
        args: the flags, with the values that apply to this model.
        world: this rank among the others.
        model: the model to train, already sharded.
        prefix: of the names of its metrics.
        lr_flags: fields of its learning rate's schedule -> flags, see `LrSchedule.differences`.

    ``run_steps``: optimizer steps of the run, where the schedule ends.
    """

    def __init__(
        self, args: Args, world: World, model: Model, prefix: str = "", lr_flags: Mapping[str, str] = FLAGS
    ) -> None:
        self.args, self.world, self.model = args, world, model
        self.prefix, self.lr_flags = prefix, lr_flags
        self.optimizers = Optimizers(args, model)
        self.progress = Progress(-1, 0, 0, LrSchedule.from_args(args))
        self.run_steps = 0
        # True until the first step with a trained token is done; `--ci-test` checks that step
        self._fresh = True

    @contextmanager
    def weights(self) -> Iterator[Model]:
        """A context with the weights on the device, where they are while it trains."""
        yield self.model

    def accumulate(self, columns: TokenColumns, step: Step, share: Callable[[MicroBatch], Tensor]) -> Tensor:
        """Gradients of one optimizer step, summed over micro-batches and, after the last one, over ranks.

        ``share``: returns the part of the step's loss that a micro-batch adds, 0-d with gradient.

        Returns:
            0-d, this rank's share of the step's loss.
        """
        total = torch.zeros((), device=self.world.device)
        batches = step.micro_batches[self.world.dp_rank]
        for i, rows in enumerate(batches):
            if isinstance(self.model, FSDPModule):
                # reduce once a step: ranks sum gradients after the last micro-batch and hold unsharded ones until then;
                # otherwise they sum after each micro-batch, so that a rank keeps only its shard
                reduces = i + 1 == len(batches) or not self.args.reduce_once_a_step
                self.model.set_requires_gradient_sync(reduces)
                # FSDP then frees its send buffers too: for embedding and head together these are 4 GB in a 7B model
                self.model.set_is_last_backward(reduces)
            loss = share(MicroBatch(columns, rows, self.world.device, shares=self.model.shares))
            # FSDP averages over ranks; the weights already divide by the whole step
            (loss * self.world.dp_size).backward()
            total = total + loss.detach()
        return total

    def update(self, sums: MetricSums, loss: Tensor) -> None:
        """Clip, update the weights, advance the schedule; ``loss`` is what `accumulate` returned.

        Norm and learning rates go into ``sums``.
        """
        schedule = self.progress.schedule
        norm, finite = self.optimizers.step(
            schedule.at(self.progress.steps, self.run_steps), schedule.peak, self.world.all_reduce(loss.cpu())
        )
        self.progress.steps += finite
        sums.add(f"{self.prefix}grad_norm", norm if finite else 0.0, float(finite))
        sums.add(f"{self.prefix}skipped_steps", float(not finite), 1.0)
        for i, rate in enumerate(self.optimizers.learning_rates()):
            sums.note(f"{self.prefix}lr-pg_{i}", rate)

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that stay on the device after an optimizer step: weights and the optimizers' state."""
        reshard(self.model)
        yield from self.model.parameters()
        for optimizer in self.optimizers.all:
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))
