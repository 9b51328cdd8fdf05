"""Combines results of micro-batches and ranks: means of metrics, scores of tokens, cost of passes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slimelite.algorithms.corrections import effective_sample_size
from slimelite.algorithms.packed import Metrics
from slimelite.base import trace
from slimelite.samples.table import SampleTable
from slimelite.tracking.phases import Timer
from slimelite.training.batch import MicroBatch
from slimelite.training.columns import TokenColumns
from slimelite.training.model import ForwardFlops, LanguageModel
from slimelite.training.parallel import World, reshard
from slimelite.training.planning import tokens_shared

Sums = dict[str, tuple[float, float]]
StepSums = dict[tuple[int, str], tuple[float, float]]  # by optimizer step and name


class MetricSums:
    """Named (sum, weight) pairs of optimizer steps; they stay on their device until `means`, so that adding never
    waits for a GPU.

    ``step``: the optimizer step that pairs are added to.
    """

    def __init__(self, world: World) -> None:
        self.step = 0
        self._world = world
        self._pairs: dict[tuple[int, str], list[tuple[Tensor | float, Tensor | float]]] = {}
        self._notes: defaultdict[int, dict[str, float]] = defaultdict(dict)  # by step

    def add(self, name: str, total: Tensor | float, weight: Tensor | float) -> None:
        """Add one pair to those of its name."""
        if isinstance(total, Tensor):
            total = total.detach()
        self._pairs.setdefault((self.step, name), []).append((total, weight))

    def add_share(self, name: str, share: Tensor) -> None:
        """Add a micro-batch's part of a number that is a sum over the step and all ranks, such as the loss."""
        first = (self.step, name) not in self._pairs
        self.add(name, share, 1 / self._world.dp_size if first else 0.0)

    def add_all(self, metrics: Metrics) -> None:
        """Add a pair to each name."""
        for name, pair in metrics.items():
            self.add(name, *pair)

    def note(self, name: str, value: float) -> None:
        """Record a number of the step that is equal on all ranks; `means` takes the last step's instead of a mean."""
        self._notes[self.step][name] = value

    def means(self) -> tuple[dict[str, float], list[dict[str, float]]]:
        """Metrics of all steps together and of each step: sum of sums / sum of weights over all ranks (collective).
        Names whose weight is 0 are left out, notes are added.
        """
        steps: list[Sums] = [{} for _ in range(self.step + 1)]
        whole: Sums = {}
        for pairs in self._gather(self._local_sums()):
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

    def _gather(self, local: StepSums) -> list[StepSums]:
        if self._world.dp_size == 1:
            return [local]
        everyone: list[StepSums] = [{} for _ in range(self._world.dp_size)]
        dist.all_gather_object(everyone, local)
        return everyone


def _means(sums: Sums) -> dict[str, float]:
    """The mean of each name with a weight; the effective sample size, not a mean, replaces the mean squared ratio."""
    means = {name: total / weight for name, (total, weight) in sums.items() if weight}
    square = means.pop("mismatch_ratio_sq", None)
    if square is not None:
        means["mismatch_ess"] = effective_sample_size(means["mismatch_ratio"], square)
    return means


class Scores:
    """A model's outputs for a table's response tokens (log-prob and entropy, or value), collected from micro-batches
    and then from ranks.

    They stay on their device until `gather`, so that adding never waits for a GPU.
    """

    def __init__(self, tokens: int, world: World) -> None:
        self._tokens, self._world = tokens, world
        self._parts: list[tuple[Tensor, Tensor]] = []

    def __bool__(self) -> bool:
        """Whether anything was added."""
        return bool(self._parts)

    def add(self, batch: MicroBatch, *values: Tensor) -> None:
        """Add the model's outputs for one micro-batch; each [R]."""
        self._parts.append((batch.token_index, torch.stack([v.detach() for v in values])))

    def gather(self) -> tuple[Tensor, ...]:
        """[tokens] of each output on the CPU, the same on every rank (collective); NaN for tokens never added."""
        assert self._parts, "every rank has a micro-batch, if only an empty one"
        first = self._parts[0][1]
        found = torch.zeros(len(first) + 1, self._tokens, dtype=first.dtype)
        for index, values in self._parts:
            found[:-1, index] = values.cpu()
            found[-1, index] = 1
        *columns, seen = self._world.all_reduce(found)
        return tuple(column.masked_fill(seen == 0, torch.nan) for column in columns)


@torch.no_grad()
def table_scores(
    model: LanguageModel, columns: TokenColumns, dealt: list[list[np.ndarray]], world: World, *options: float
) -> tuple[Tensor, ...]:
    """A model's outputs by a pass over ``dealt``, the rows of each rank's micro-batches; see `Scores.gather`.

    ``options``: more arguments of its ``forward``, such as a policy's temperature.
    """
    scores = Scores(len(columns.mask), world)
    for rows in dealt[world.dp_rank]:
        batch = MicroBatch(columns, rows, world.device, shares=model.shares)
        found = model(batch, *options)
        scores.add(batch, *(found if isinstance(found, tuple) else (found,)))
    reshard(model)
    return scores.gather()


class PassTimer:
    """Seconds and floating-point operations of the passes of a rollout, by name.

    ``worker``: its name in the trace; ``around``: gives a context for each pass, by its name.
    """

    def __init__(self, worker: str) -> None:
        self._worker, self._timer = worker, Timer()
        self.around: Callable[[str], AbstractContextManager[None]] = lambda _name: nullcontext()
        # by pass, the tokens that are computed on all ranks, and those of the rows
        self._tokens: dict[str, tuple[int, int]] = {}
        self._flops: dict[str, float] = {}

    def restart(self) -> None:
        """Forget what was measured."""
        self._timer.restart()
        self._tokens.clear()
        self._flops.clear()

    @contextmanager
    def __call__(
        self,
        name: str,
        model: LanguageModel | None = None,
        table: SampleTable | None = None,
        dealt: Iterable[list[np.ndarray]] = (),
    ) -> Iterator[None]:
        """Time a pass; with ``model`` and ``table``, also count its tokens and its operations over the micro-batches
        ``dealt`` to each rank.
        """
        if model is not None and table is not None:
            rows, shared = tokens_shared(table, chain(*dealt), shares=model.shares)
            lengths = table.total_lengths[rows]
            before = self._tokens.get(name, (0, 0))
            self._tokens[name] = (before[0] + int((lengths - shared).sum()), before[1] + int(lengths.sum()))
            flops = ForwardFlops.of(model)
            if flops is not None:
                count = flops.step if name.endswith("_train") else flops.total
                total = count(lengths, table.response_lengths[rows], shared)
                self._flops[name] = self._flops.get(name, 0.0) + total
        with trace.span(self._worker, "passes", name), self.around(name), self._timer(name):
            yield

    def metrics(self, ranks: int) -> dict[str, float]:
        """``perf/{name}_time``; where operations were counted, ``perf/{name}_tflops`` of one rank; and of training the
        share of the rows' tokens that were computed.
        """
        seconds = self._timer.seconds
        metrics = {f"perf/{name}_time": value for name, value in seconds.items()}
        for name, flops in self._flops.items():
            metrics[f"perf/{name}_tflops"] = flops / seconds[name] / ranks / 1e12
        computed, of_rows = self._tokens.get("actor_train", (0, 0))
        return metrics | ({"perf/computed_tokens_ratio": computed / of_rows} if of_rows else {})
