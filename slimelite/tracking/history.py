"""The history of a run: the values of its metrics for each rollout, and their levels, in which `alarms` looks for
problems.

A level is a median over a few rollouts. Noise is measured from the differences of successive rollouts. Therefore
neither one odd rollout nor the scale of the reward matters.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

LEVEL = 5  # a level is the median of this many rollouts; two odd rollouts do not change it
WINDOW = 20  # rollouts between two compared levels: enough to see a slow change, and to forget an old one
QUIET = 3  # an alarm ends if its condition does not hold for this many rollouts
NOISE = 3.0  # smallest change of a level that counts, in standard deviations of one rollout

METRICS = {
    "reward": "rollout/raw_reward",
    "length": "rollout/response_len/mean",
    "truncated": "rollout/truncated_ratio",
    "entropy": "rollout/entropy",
    "mismatch": "train/train_rollout_logprob_abs_diff",
    "staleness": "rollout/weight_staleness/mean",
    "grad": "train/grad_norm",
    # shares of groups with equal rewards: rewards of at most 0, and rewards above 0
    "wrong": "",
    "right": "",
    "deaths": "rollout/engine_deaths",
    "turn_limit": "rollout/environment/turn_limit",
    "seconds": "",  # time of the rollout without evaluation and saving
}
EQUAL = "rollout/zero_std/count_"
SKIPPED = ("train/skipped_steps", "train/critic-skipped_steps")


class Score(NamedTuple):
    """The mean score of an evaluation, its standard error, and the number of rollouts before it."""

    rollouts: int
    mean: float
    error: float


class History:
    """The values of each metric, one for every rollout that has it, and the scores of evaluations."""

    def __init__(self) -> None:
        self.values: defaultdict[str, list[float]] = defaultdict(list)
        self.row: dict[str, float] = {}  # of the last rollout
        self.rollouts = 0
        self.scores: defaultdict[str, list[Score]] = defaultdict(list)
        self.best_reward = -math.inf  # the highest level so far
        self.least_wrong = math.inf  # lowest level of "wrong" so far, over three rollouts

    def add(self, row: dict[str, float]) -> None:
        """Add the values of a finished rollout."""
        self.row = row
        self.rollouts += 1
        for name, value in row.items():
            if name in METRICS and math.isfinite(value):
                self.values[name].append(value)
        if len(self.values["reward"]) >= LEVEL:
            self.best_reward = max(self.best_reward, self.now("reward"))
        if self.values["wrong"]:
            self.least_wrong = min(self.least_wrong, self.now("wrong", QUIET))

    def enough(self, name: str) -> bool:
        """Whether a metric has enough values to compute two levels."""
        return len(self.values[name]) >= 2 * LEVEL

    def now(self, name: str, rollouts: int = LEVEL) -> float:
        """The present level of a metric; -inf if the metric has no values."""
        return median(self.values[name][-rollouts:] or [-math.inf])

    def then(self, name: str) -> float:
        """The level about ``WINDOW`` rollouts ago (early in a run: the first level), without the rollouts of `now`."""
        return median(self.values[name][-WINDOW - LEVEL : -LEVEL][:LEVEL] or [math.inf])

    def at(self, name: str, rollouts: int) -> float:
        """The level after ``rollouts`` rollouts, or after ``LEVEL`` rollouts if ``rollouts`` is smaller."""
        return median(self.values[name][max(rollouts - LEVEL, 0) : max(rollouts, LEVEL)] or [math.inf])

    def noise(self, name: str) -> float:
        """Standard deviation of a metric, from the median change between successive rollouts; a trend adds little."""
        recent = self.values[name][-WINDOW - LEVEL :]
        steps = [abs(after - before) for before, after in pairwise(recent)]
        return 1.4826 * median(steps or [0.0]) / math.sqrt(2)

    def rose(self, name: str, since: float) -> bool:
        """Whether the level of a metric is above ``since`` by more than the noise."""
        return self.now(name) - since > NOISE * self.noise(name)

    def improved(self, rollouts: int) -> bool:
        """Whether an eval score (without evaluations: the reward) rose after the first ``rollouts`` rollouts."""
        pairs = [
            ([s for s in scores if s.rollouts <= rollouts] or scores[:1], scores) for scores in self.scores.values()
        ]
        measured = [scores[-1].mean > old[-1].mean for old, scores in pairs if scores[-1].rollouts > old[-1].rollouts]
        return any(measured) if measured else self.rose("reward", self.at("reward", rollouts))

    def evaluated(self) -> dict[str, list[Score]]:
        """The scores of the datasets that were evaluated after the last rollout."""
        return {name: scores for name, scores in self.scores.items() if scores[-1].rollouts == self.rollouts}


def rollout_values(pending: Mapping[str, list[float]]) -> dict[str, float]:
    """The last value of each metric in a rollout. Exceptions: the largest gradient norm, and the means of `SKIPPED`."""
    row = {name: values[-1] for name, values in pending.items()}
    row |= {name: fmean(pending[name]) for name in SKIPPED if name in pending}
    row |= {short: row[name] for short, name in METRICS.items() if name in row}
    if grads := [value for value in pending.get(METRICS["grad"], []) if value > 0]:
        row["grad"] = max(grads)
    else:
        row.pop("grad", None)  # a rollout with only equal rewards has no gradient
    row.setdefault("entropy", row.get("train/entropy_loss", math.nan))
    if "perf/step_time" in row:
        row["seconds"] = row["perf/step_time"] - row.get("perf/eval_time", 0.0) - row.get("perf/save_model_time", 0.0)
    equal = {float(name.removeprefix(EQUAL)): n for name, n in row.items() if name.startswith(EQUAL)}
    if "rollout/zero_variance_groups" in row and "rollout/opd_reverse_kl" not in row:
        share = row["rollout/zero_variance_groups"] / max(sum(equal.values()), 1)
        row["wrong"] = share * sum(n for reward, n in equal.items() if reward <= 0)
        row["right"] = share * sum(n for reward, n in equal.items() if reward > 0)
    if row.get("length") == 0:  # see `no_tokens`: rewards of empty responses have no meaning
        row = {name: value for name, value in row.items() if name not in ("reward", "wrong", "right")}
    return row
