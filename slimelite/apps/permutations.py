"""The permutation tests of `slimelite compare`: a test of paired differences, and a test of two groups."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# up to this many differences that are not 0, every pattern of signs is tried
EXACT_SIGNS = 14
SIGN_DRAWS = 10_000
DRAWS_AT_ONCE = 256
# up to this many ways to divide the runs into two groups, every way is tried
EXACT = 20_000
DRAWS = 20_000


class Paired(NamedTuple):
    """The difference between the scores of two runs on the same prompts.

    ``standard_error``: the standard error of ``difference``; None for one prompt. ``p``: the p-value of the two-sided
    sign-flip permutation test.
    """

    prompts: int
    difference: float
    standard_error: float | None
    p: float


def paired_test(differences: np.ndarray) -> Paired:
    """Test whether the mean of ``differences``, [prompts] float64, is 0.

    If both runs were equally good, both signs of each difference would be equally likely. ``p`` is the share of sign
    patterns for which the mean is at least as far from 0 as the observed mean. If more than `EXACT_SIGNS` differences
    are not 0, ``p`` is estimated from `SIGN_DRAWS` random patterns. The observed pattern counts too, so ``p`` is never
    0. The same differences always give the same ``p``.

    Raises:
        ValueError: there are no differences to test.
    """
    if not len(differences):
        raise ValueError("no prompts to compare")
    error = float(differences.std(ddof=1) / np.sqrt(len(differences))) if len(differences) > 1 else None
    return Paired(len(differences), float(differences.mean()), error, _sign_flip(differences[differences != 0]))


def _sign_flip(values: np.ndarray) -> float:
    """The p-value of the sign-flip test. ``values``: the differences that are not 0."""
    # sums that differ only by rounding are equal
    observed = abs(values.sum()) - 1e-9 * np.abs(values).sum()
    if len(values) <= EXACT_SIGNS:
        patterns = np.arange(2 ** len(values))[:, None] >> np.arange(len(values)) & 1
        return float((np.abs((2 * patterns - 1) @ values) >= observed).mean())
    generator = np.random.default_rng(0)
    extreme = 1
    for first in range(0, SIGN_DRAWS, DRAWS_AT_ONCE):
        count = min(DRAWS_AT_ONCE, SIGN_DRAWS - first)
        signs = 2 * generator.integers(0, 2, (count, len(values)), np.int8) - 1
        extreme += int((np.abs(signs @ values) >= observed).sum())
    return extreme / (SIGN_DRAWS + 1)


class Unpaired(NamedTuple):
    """The mean of a second group minus the mean of the first group.

    ``standard_error``: the standard error of ``difference``, sqrt(s₁²/n₁ + s₂²/n₂). ``p``: the p-value of the
    permutation test. ``least_p``: the smallest p-value that this number of runs can give.
    """

    difference: float
    standard_error: float
    p: float
    least_p: float


def unpaired_test(first: Sequence[float], other: Sequence[float]) -> Unpaired:
    """Test whether two groups of runs have the same mean: Fisher's randomization test (Design of Experiments, 1935).

    If the groups were alike, every division of the n₁ + n₂ values into groups of n₁ and n₂ would be equally likely.
    ``p`` is the share of divisions for which the means differ at least as much as the observed means, in either
    direction. The test does not assume a normal distribution. The test needs at least seven runs, such as 3 + 4, to
    reach a p below 0.05. If there are more than `EXACT` divisions, the test uses `DRAWS` random divisions and the
    observed division (Phipson and Smyth, 2010, doi:10.2202/1544-6115.1585).
    """
    values, count = np.array([*first, *other], np.float64), len(other)
    difference = values[-count:].mean() - values[:-count].mean()
    error = math.sqrt(sum(np.var(group, ddof=1) / len(group) for group in (first, other)))
    # sums that differ only by rounding are equal
    observed = abs(difference) * (1 - 1e-9) - 1e-12 * np.abs(values).max(initial=0.0)

    def distances(chosen: np.ndarray) -> np.ndarray:
        """The absolute difference of the two means for each row of ``chosen`` [ways, count]. A row has the indices of
        the second group."""
        sums = values[chosen].sum(axis=1)
        means: np.ndarray = sums / count - (values.sum() - sums) / (len(values) - count)
        return np.abs(means)

    ways = math.comb(len(values), count)
    if ways <= EXACT:
        chosen = np.array(list(itertools.combinations(range(len(values)), count)))
        p = float((distances(chosen) >= observed).mean())
    else:
        generator = np.random.default_rng(0)
        chosen = generator.permuted(np.tile(np.arange(len(values)), (DRAWS, 1)), axis=1)[:, :count]
        p = (1 + int((distances(chosen) >= observed).sum())) / (DRAWS + 1)
    least = (2 if 2 * count == len(values) else 1) / ways
    return Unpaired(float(difference), error, p, max(least, 1 / (DRAWS + 1)))
