"""Random ragged batches, and the comparison of a packed function with a naive loop over its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

few = settings(max_examples=30, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass
class Batch:
    """Rows of ``lengths`` tokens end to end; values are poisoned with NaN and inf wherever the mask is 0."""

    lengths: list[int]
    mask: Tensor
    segments: Tensor
    generator: torch.Generator

    @property
    def rows(self) -> int:
        return len(self.lengths)

    def tokens(self, row: int) -> list[int]:
        """Positions of the row's tokens."""
        start = sum(self.lengths[:row])
        return list(range(start, start + self.lengths[row]))

    def trained(self, row: int) -> list[int]:
        """Positions of the row's unmasked tokens."""
        return [t for t in self.tokens(row) if self.mask[t]]

    def all_trained(self) -> Iterator[tuple[int, int]]:
        """(row, position) of every unmasked token."""
        return ((row, t) for row in range(self.rows) for t in self.trained(row))

    def randn(self, scale: float = 1.0, poison: bool = True) -> Tensor:
        """[T] float64 normal values."""
        values = scale * torch.randn(len(self.mask), generator=self.generator, dtype=torch.float64)
        if poison:
            values[~self.mask] = torch.tensor([torch.nan, torch.inf, -torch.inf]).double()[
                torch.arange(int((~self.mask).sum())) % 3
            ]
        return values


def make_batch(lengths: list[int], seed: int, density: float) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(sum(lengths), generator=generator) < density
    segments = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return Batch(lengths, mask, segments, generator)


seeds = st.integers(0, 2**31)
batches = st.builds(
    make_batch,
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    seed=seeds,
    density=st.sampled_from([0.0, 0.6, 1.0]),
)


def same(actual: Tensor, expected: Tensor) -> None:
    """Equal to 1e-9 relative in float64."""
    assert actual.dtype == torch.float64
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-14)


def check(packed: Callable[[Tensor], Tensor], naive: Callable[[Tensor], Tensor], leaf: Tensor, batch: Batch) -> None:
    """Both functions of ``leaf`` have equal values and, for a random weighting of them, equal gradients."""
    results = []
    weights = None
    for function in (packed, naive):
        x = leaf.clone().requires_grad_()
        values = function(x)
        if weights is None:
            weights = torch.randn(values.shape, generator=batch.generator, dtype=torch.float64)
        total = (values * weights).sum()
        # a batch without unmasked tokens has a constant for a loss
        gradient = torch.autograd.grad(total, x)[0] if total.requires_grad else torch.zeros_like(x)
        results.append((values.detach(), gradient))
    same(results[0][0], results[1][0])
    same(results[0][1], results[1][1])


def per_token(batch: Batch, formula: Callable[[int, int], Tensor]) -> Tensor:
    """[T] ``formula(row, position)`` at every unmasked token, 0 elsewhere."""
    values = [torch.zeros((), dtype=torch.float64)] * len(batch.mask)
    for row, t in batch.all_trained():
        values[t] = formula(row, t)
    return torch.stack(values) if values else torch.zeros(0, dtype=torch.float64)


def clip(x: Tensor, low: float, high: float) -> Tensor:
    """Clamp by cases."""
    if x < low:
        return torch.full_like(x, low)
    return torch.full_like(x, high) if x > high else x


def bounded_exp(x: Tensor) -> Tensor:
    """exp(clamp(x, −20, 20)) by cases."""
    return torch.exp(clip(x, -20.0, 20.0))


def mean(values: list[Tensor]) -> Tensor:
    """The mean of a list of scalars; 0 of none."""
    total = torch.zeros((), dtype=torch.float64)
    for value in values:
        total = total + value
    return total / max(len(values), 1)


def ratio_of(metric: tuple[Tensor, Tensor]) -> float:
    """A (sum, weight) metric as a number."""
    assert metric[0].shape == metric[1].shape == ()
    return float(metric[0] / metric[1])


def token_weights(weights: Tensor, mask: Tensor, segments: Tensor) -> Tensor:
    """[T] of the weights of rows."""
    return torch.where(mask, weights[segments], 0.0)
