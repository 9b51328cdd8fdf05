"""A model in training: its passes, its gradients over micro-batches, its optimizer steps and its progress. This file
also sums metrics over the micro-batches of all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from time import perf_counter
from typing import Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from slimelite.algorithms.corrections import effective_sample_size
from slimelite.algorithms.packed import Metrics
from slimelite.arguments import Args
from slimelite.base import trace
from slimelite.samples.table import SampleTable
from slimelite.training.batch import MicroBatch
from slimelite.training.columns import TokenColumns
from slimelite.training.model import LanguageModel
from slimelite.training.optimizer import FLAGS, LrSchedule, Optimizers
from slimelite.training.parallel import World, reshard
from slimelite.training.planning import Step, tokens_shared

Sums = dict[str, tuple[float, float]]
StepSums = dict[tuple[int, str], tuple[float, float]]  # (optimizer step, name) -> (sum, weight)


@dataclass(slots=True)
class Progress:
    """The progress of training. ``rollout_id``: the last rollout that was trained on. ``steps``: the number of finished
    optimizer steps. ``weight_version``: the version of the weights that were sent last. ``schedule``: the learning-rate
    schedule.
    """

    rollout_id: int
    steps: int
    weight_version: int
    schedule: LrSchedule


# covariant: a Learner[PolicyModel] is a Learner[LanguageModel]
Model = TypeVar("Model", bound=LanguageModel, covariant=True)


class Learner(Generic[Model]):
    """A model, its optimizers and its progress. It is the base class of the policy's trainer and the critic.

    Args:
        args: the flags, with the values that apply to this model.
        world: this rank, and facts about all ranks.
        model: the model to train, already sharded.
        prefix: the prefix of the metrics' names.
        lr_flags: field of the learning-rate schedule -> its flag, see `LrSchedule.differences`.

    ``run_steps``: the number of optimizer steps of the run, after which the schedule ends.
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
        """A context in which the weights are on the device, as they always are for a model in training."""
        yield self.model

    def accumulate(self, columns: TokenColumns, step: Step, share: Callable[[MicroBatch], Tensor]) -> Tensor:
        """Compute the gradients of one optimizer step: sum them over micro-batches, and after the last micro-batch over
        ranks.

        ``share``: a function that returns a micro-batch's part of the step's loss, 0-d with a gradient.

        Returns:
            0-d: this rank's share of the step's loss.
        """
        total = torch.zeros((), device=self.world.device)
        batches = step.micro_batches[self.world.dp_rank]
        for i, rows in enumerate(batches):
            if isinstance(self.model, FSDPModule):
                # reduce_once_a_step: ranks sum their gradients after the last micro-batch, and keep unsharded gradients
                # until then. Otherwise they sum after each micro-batch, and each rank keeps only its shard
                reduces = i + 1 == len(batches) or not self.args.reduce_once_a_step
                self.model.set_requires_gradient_sync(reduces)
                # FSDP also frees its send buffers then. For the embedding and head of a 7B model, these have 4 GB
                self.model.set_is_last_backward(reduces)
            loss = share(MicroBatch(columns, rows, self.world.device, shares=self.model.shares).fetch())
            # undo FSDP's average over ranks, because the token weights already divide by the whole step
            (loss * self.world.dp_size).backward()
            total = total + loss.detach()
        return total

    def update(self, sums: MetricSums, loss: Tensor) -> None:
        """Clip the gradient, update the weights, and advance the schedule. ``loss`` is the result of `accumulate`.

        The gradient norm and the learning rates are added to ``sums``.
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
        """The tensors that stay on the device after an optimizer step: the weights and the optimizers' state."""
        reshard(self.model)
        yield from self.model.parameters()
        for optimizer in self.optimizers.all:
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))


class MetricSums:
    """Named (sum, weight) pairs of optimizer steps. The pairs stay on their device until `means` is called, so adding
    a pair never waits for a GPU.

    ``step``: the optimizer step to which pairs are added.
    """

    def __init__(self, world: World) -> None:
        self.step = 0
        self._world = world
        self._pairs: dict[tuple[int, str], list[tuple[Tensor | float, Tensor | float]]] = {}
        self._notes: defaultdict[int, dict[str, float]] = defaultdict(dict)  # by step

    def add(self, name: str, total: Tensor | float, weight: Tensor | float) -> None:
        """Add one pair under ``name``."""
        if isinstance(total, Tensor):
            total = total.detach()
        self._pairs.setdefault((self.step, name), []).append((total, weight))

    def add_share(self, name: str, share: Tensor) -> None:
        """Add a micro-batch's part of a metric that is a sum over the whole step and all ranks, such as the loss."""
        first = (self.step, name) not in self._pairs
        self.add(name, share, 1 / self._world.dp_size if first else 0.0)

    def add_all(self, metrics: Metrics) -> None:
        """Add each pair of ``metrics`` under its name."""
        for name, pair in metrics.items():
            self.add(name, *pair)

    def note(self, name: str, value: float) -> None:
        """Record a number of the step that is equal on all ranks. Over all steps, `means` returns the last step's
        number, not a mean."""
        self._notes[self.step][name] = value

    def means(self) -> tuple[dict[str, float], list[dict[str, float]]]:
        """The metrics over all steps, and the metrics of each step (collective). A metric is Σ sums / Σ weights, over
        the pairs of all ranks. Metrics whose weights add up to 0 are left out. The numbers that `note` recorded are
        included.
        """
        steps: list[Sums] = [{} for _ in range(self.step + 1)]
        whole: Sums = {}
        everyone = [self._local_sums()]
        if self._world.dp_size > 1:
            everyone, local = [{} for _ in range(self._world.dp_size)], everyone[0]
            dist.all_gather_object(everyone, local)
        for pairs in everyone:
            for (step, name), (total, weight) in pairs.items():
                for sums in (whole, steps[step]):
                    before = sums.get(name, (0.0, 0.0))
                    sums[name] = (before[0] + total, before[1] + weight)
        return _means(whole) | self._notes[self.step], [_means(s) | self._notes[i] for i, s in enumerate(steps)]

    def _local_sums(self) -> StepSums:
        flat = [value for pairs in self._pairs.values() for pair in pairs for value in pair]
        tensors = [torch.as_tensor(value, dtype=torch.float64, device=self._world.device) for value in flat]
        values = iter(torch.stack(tensors).tolist() if tensors else [])
        sums: StepSums = {}
        for key, pairs in self._pairs.items():
            total, weight = zip(*[(next(values), next(values)) for _ in pairs], strict=True)
            sums[key] = (sum(total), sum(weight))
        return sums


def _means(sums: Sums) -> dict[str, float]:
    """The mean of each name whose weight is not 0. The effective sample size, which is not a mean, replaces the mean
    squared ratio."""
    means = {name: total / weight for name, (total, weight) in sums.items() if weight}
    square = means.pop("mismatch_ratio_sq", None)
    if square is not None:
        means["mismatch_ess"] = effective_sample_size(means["mismatch_ratio"], square)
    return means


class Scores:
    """Collects a model's results for each response token of a table: log-prob and entropy, or value. `add` collects the
    results of a micro-batch, and `gather` joins the results of all ranks.

    The results stay on their device until `gather` is called, so adding results never waits for a GPU. ``parts``: the
    results that `add` has collected.
    """

    def __init__(self, tokens: int, world: World) -> None:
        self._tokens, self._world = tokens, world
        self.parts: list[tuple[Tensor, Tensor]] = []

    def add(self, batch: MicroBatch, *values: Tensor) -> None:
        """Add the model's outputs, each [R], for one micro-batch."""
        self.parts.append((batch.token_index, torch.stack(values).detach()))

    def gather(self) -> tuple[Tensor, ...]:
        """Each output of the model as a [tokens] tensor on the CPU, equal on every rank (collective). Tokens that were
        not added have the value NaN."""
        assert self.parts, "every rank must have a micro-batch, which may be empty"
        first = self.parts[0][1]
        sums = torch.zeros(len(first) + 1, self._tokens, dtype=first.dtype)
        for index, values in self.parts:
            sums[:-1, index] = values.cpu()
            sums[-1, index] = 1
        sums = self._world.all_reduce(sums)
        return sums[:-1].masked_fill(sums[-1] == 0, torch.nan).unbind()


@torch.no_grad()
def table_scores(
    model: LanguageModel, columns: TokenColumns, dealt: list[list[np.ndarray]], world: World, *options: float
) -> tuple[Tensor, ...]:
    """Run a model on the micro-batches ``dealt``, and return its outputs as `Scores.gather` does.

    ``dealt``: for each rank, the rows of each of its micro-batches. ``options``: additional arguments of the model's
    ``forward``, such as a policy's temperature.
    """
    scores = Scores(len(columns.mask), world)
    for rows in dealt[world.dp_rank]:
        batch = MicroBatch(columns, rows, world.device, shares=model.shares)
        outputs = model(batch, *options)
        scores.add(batch, *(outputs if isinstance(outputs, tuple) else (outputs,)))
    reshard(model)
    return scores.gather()


class PassTimer:
    """Measures the seconds and the floating-point operations of the passes of a rollout, by name.

    ``worker``: the name of this worker in the trace. ``around``: name of a pass -> the context in which the pass runs.
    """

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self.around: Callable[[str], AbstractContextManager[str | None]] = nullcontext
        self.restart()

    def restart(self) -> None:
        """Delete all measurements."""
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._flops: defaultdict[str, float] = defaultdict(float)
        # in training: the number of computed tokens on all ranks, and the number of tokens of all rows
        self._computed = self._of_rows = 0

    @contextmanager
    def __call__(
        self,
        name: str,
        model: LanguageModel | None = None,
        table: SampleTable | None = None,
        dealt: Iterable[list[np.ndarray]] = (),
    ) -> Iterator[None]:
        """A context that measures a pass. With ``model`` and ``table``, it also counts the tokens and operations of the
        micro-batches ``dealt`` to each rank.
        """
        if model is not None and table is not None:
            rows, shared = tokens_shared(table, chain(*dealt), shares=model.shares)
            lengths = table.total_lengths[rows]
            if name == "actor_train":
                self._computed += int((lengths - shared).sum())
                self._of_rows += int(lengths.sum())
            if model.flops is not None:
                count = model.flops.step if name.endswith("_train") else model.flops.total
                self._flops[name] += count(lengths, table.response_lengths[rows], shared)
        with trace.span(self._worker, "passes", name), self.around(name):
            began = perf_counter()
            yield
            self._seconds[name] += perf_counter() - began

    def metrics(self, ranks: int, rate: float | None = None) -> dict[str, float]:
        """The metrics of all passes. Every pass has ``perf/{name}_time``.

        If operations were counted, a pass also has ``perf/{name}_tflops`` (of one rank) and, with ``rate``,
        ``perf/{name}_mfu``. ``rate``: the peak operations per second of a rank's device. Training also has
        ``perf/actor_train_flops`` (the operations of all ranks) and ``perf/computed_tokens_ratio`` (the computed tokens
        divided by the tokens of all rows).
        """
        metrics = {}
        for name, seconds in self._seconds.items():
            metrics[f"perf/{name}_time"] = seconds
            if name in self._flops:
                metrics[f"perf/{name}_tflops"] = self._flops[name] / seconds / ranks / 1e12
                if rate is not None:
                    metrics[f"perf/{name}_mfu"] = self._flops[name] / seconds / ranks / rate
        if "actor_train" in self._flops:
            metrics["perf/actor_train_flops"] = self._flops["actor_train"]
        return metrics | ({"perf/computed_tokens_ratio": self._computed / self._of_rows} if self._of_rows else {})
