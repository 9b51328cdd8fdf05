"""Is one score really higher than another? The paired test of ``slimelite compare``."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

# up to so many differences that are not 0, every pattern of signs is tried
EXACT = 14
DRAWS = 10_000
DRAWS_AT_ONCE = 256


class Paired(NamedTuple):
    """How the scores of two runs on the same prompts differ.

    ``standard_error``: of ``difference``; None for one prompt. ``p``: the two-sided sign-flip permutation test.
    """

    prompts: int
    difference: float
    standard_error: float | None
    p: float


def paired_test(differences: np.ndarray) -> Paired:
    """Test whether the mean of ``differences``, [prompts] float64, is 0.

    If the two runs were equally good, each prompt's difference could as well have had the other sign. ``p`` is the
    share of all patterns of signs whose mean is at least as far from 0 as the one that was found. With more than
    `EXACT` differences that are not 0 it is estimated from `DRAWS` random patterns, the found one being counted too,
    so that it is never 0; the same differences give the same ``p``.

    Raises:
        ValueError: there is no difference at all to test.
    """
    if not len(differences):
        raise ValueError("no prompts to compare")
    error = float(differences.std(ddof=1) / np.sqrt(len(differences))) if len(differences) > 1 else None
    return Paired(len(differences), float(differences.mean()), error, _sign_flip(differences[differences != 0]))


def _sign_flip(values: np.ndarray) -> float:
    """The p-value; ``values``: differences that are not 0."""
    # sums that differ by rounding alone are equal
    found = abs(values.sum()) - 1e-9 * np.abs(values).sum()
    if len(values) <= EXACT:
        patterns = np.arange(2 ** len(values))[:, None] >> np.arange(len(values)) & 1
        return float((np.abs((2 * patterns - 1) @ values) >= found).mean())
    generator = np.random.default_rng(0)
    extreme = 1
    for first in range(0, DRAWS, DRAWS_AT_ONCE):
        count = min(DRAWS_AT_ONCE, DRAWS - first)
        signs = 2 * generator.integers(0, 2, (count, len(values)), np.int8) - 1
        extreme += int((np.abs(signs @ values) >= found).sum())
    return extreme / (DRAWS + 1)
