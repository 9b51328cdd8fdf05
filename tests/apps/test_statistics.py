from __future__ import annotations

import itertools
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimelite.apps.permutations import EXACT_SIGNS as EXACT
from slimelite.apps.permutations import SIGN_DRAWS as DRAWS
from slimelite.apps.permutations import paired_test

# quarters have exact sums
QUARTERS = st.integers(-8, 8).map(lambda n: n / 4)


@given(st.lists(QUARTERS, min_size=1, max_size=7))
def test_p_is_the_share_of_sign_patterns_that_are_as_far_from_zero(differences: list[float]) -> None:
    patterns = list(itertools.product((-1, 1), repeat=len(differences)))  # those of differences of 0 too
    sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in patterns]
    extreme = sum(total >= abs(sum(differences)) for total in sums)
    found = paired_test(np.array(differences))
    assert found.p == extreme / len(patterns)
    assert found.difference == pytest.approx(statistics.fmean(differences))
    if len(differences) > 1:
        assert found.standard_error == pytest.approx(statistics.stdev(differences) / math.sqrt(len(differences)))
    else:
        assert found.standard_error is None


@pytest.mark.parametrize(("won", "lost"), [(9, 5), (20, 8), (30, 26), (60, 40)])
def test_p_of_right_and_wrong_answers_is_mcnemars_exact_one(won: int, lost: int) -> None:
    """With scores of 0 and 1 the number of prompts that got better is binomial."""
    of = won + lost
    exact = min(1.0, 2 * sum(math.comb(of, k) for k in range(won, of + 1)) / 2**of)
    differences = np.array([1.0] * won + [-1.0] * lost + [0.0] * 200)
    p = paired_test(differences).p
    if of <= EXACT:
        assert p == exact
    else:
        assert abs(p - exact) < 4 * math.sqrt(exact * (1 - exact) / DRAWS) + 1 / DRAWS


def test_p_is_never_zero_and_always_the_same() -> None:
    clear = np.full(500, 0.5)
    assert paired_test(clear).p == 1 / (DRAWS + 1)
    noisy = np.random.default_rng(1).normal(0.05, 1, 900)
    assert paired_test(noisy) == paired_test(noisy)


def test_equal_scores_are_equal() -> None:
    assert paired_test(np.zeros(5)) == (5, 0.0, 0.0, 1.0)
    # 0.1 + 0.2 is not 0.3 in binary, but these sums are equal
    assert paired_test(np.array([0.1, 0.2, -0.3])).p == 1.0


def test_equally_good_runs_differ_in_one_case_of_twenty() -> None:
    generator = np.random.default_rng(0)
    p = np.array([paired_test(generator.normal(size=10)).p for _ in range(1000)])
    assert abs((p <= 0.05).mean() - 0.05) < 4 * math.sqrt(0.05 * 0.95 / 1000)


def test_no_prompts_are_no_test() -> None:
    with pytest.raises(ValueError, match="no prompts to compare"):
        paired_test(np.array([]))
