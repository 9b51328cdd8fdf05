"""Alarms: what usually means that training goes wrong, in words, with the rollout it began and what people do about it.

`Alarms` is fed with the records of metrics.jsonl in their order, by the tracker while the run goes on and by `replay`
afterwards, so both find the same. It has no clock and reads no file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from slimelite.tracking.conditions import (
    MISMATCH_LIMIT,
    QUIET,
    History,
    Score,
    Seen,
    all_right,
    all_wrong,
    entropy_collapse,
    failed_groups,
    filtered,
    grad_spike,
    length,
    mismatch,
    reward_collapse,
    reward_without_eval,
    rollout_values,
    skipped_steps,
    stale,
    stall,
    truncation,
)
from slimelite.tracking.metrics_file import DEFAULT_AXIS, eval_metrics

UNKNOWN_ERROR = 0.04  # of an evaluation that does not say its standard error: that of 150 answers, right or wrong


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something that goes wrong from rollout ``rollout_id`` on, up to ``ended``, the first rollout without it.

    ``kind``: a name in ``KINDS``; ``says``: what is seen, with numbers; ``advice``: what people usually do about it.
    """

    kind: str
    rollout_id: int
    says: str
    advice: str
    ended: int | None = None

    @property
    def title(self) -> str:
        """Such as ``alarm mismatch since rollout 12``."""
        until = "" if self.ended is None else f", over in rollout {self.ended}"
        return f"alarm {self.kind} since rollout {self.rollout_id}{until}"

    @property
    def text(self) -> str:
        """What is seen and what people do about it, in one line."""
        return f"{self.says}. {self.advice}"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of alarm: ``when`` it begins, in words for docs/metrics.md, and how that is found."""

    name: str
    when: str
    advice: str
    see: Callable[[History], Seen | None]


KINDS = (
    Kind(
        "reward_collapse",
        "nine groups in ten have no right answer any more, or the reward lost half of its best level",
        "Usually the learning rate is too high: go back to an earlier checkpoint and divide --lr by 3 to 10; a lower "
        "--clip-grad, --use-kl-loss and --lr-warmup-iters help, too.",
        reward_collapse,
    ),
    Kind(
        "all_wrong",
        "nine groups in ten have had no right answer (a reward of 0 or less) for 3 rollouts, from the start",
        "Read samples beside their labels: is --label-key the right column, does --rm-type read such answers, is "
        "--rollout-max-response-len long enough? If so, the task is too hard: take easier prompts, more samples for "
        "each, or SFT first.",
        all_wrong,
    ),
    Kind(
        "all_right",
        "nine groups in ten have had equal rewards above 0 for 3 rollouts, and a new eval score is below 0.9",
        "These prompts have nothing left to teach: take harder ones, or drop solved groups with "
        "--dynamic-sampling-filter-path. If the score falls, the reward pays for something else: read samples.",
        all_right,
    ),
    Kind(
        "entropy_collapse",
        "entropy is a quarter of what it was 20 rollouts before, the reward did not rise, and fewer than half of the "
        "groups are all right",
        "The policy has stopped exploring: raise --eps-clip-high (0.28), lower --lr, add --entropy-coef or "
        "--use-kl-loss, and sample at --rollout-temperature 1.",
        entropy_collapse,
    ),
    Kind(
        "truncation",
        "more than 25 % of the responses run into the length limit, a tenth more of them than 20 rollouts before",
        "Read the ends of long samples. Answers that are cut off need a larger --rollout-max-response-len; loops and "
        "padding need --overlong-buffer-len, a reward that does not pay for length, or a lower --lr.",
        truncation,
    ),
    Kind(
        "length",
        "responses are twice as long as 20 rollouts before, and no eval score (without evaluations: no reward) rose",
        "Read the longest samples: does the reward pay for length? --overlong-buffer-len punishes it; under "
        "--calculate-per-token-loss a long wrong answer costs its full length.",
        length,
    ),
    Kind(
        "reward_without_eval",
        "the reward rose by a tenth, and an eval score has not gained 0.02 in 20 rollouts, or fell by a tenth from its "
        "best",
        "The policy learns what the reward pays for instead of the task, or learns the prompts by heart. Read the "
        "samples with the highest reward, mend it, and keep the checkpoint of the best evaluation; more prompts help "
        "against learning by heart.",
        reward_without_eval,
    ),
    Kind(
        "mismatch",
        f"the mean |trainer − engine log-prob| is above {MISMATCH_LIMIT:g}, and 0.2 more for each update that the "
        "weights of the tokens are old, or rose fivefold "
        f"in 20 rollouts and is above {MISMATCH_LIMIT / 10:g}",
        "The gradient belongs to another policy than the one that wrote the samples. --check-weight-update-equal tells "
        "whether the weights arrive; --correction tis corrects small differences; docs/metrics.md lists the causes.",
        mismatch,
    ),
    Kind(
        "stale",
        "trained tokens are 4 weight updates old on average, or half of the groups are dropped as too old",
        "Sync more often (--update-weights-interval 1), set --max-weight-staleness, or correct with --correction tis.",
        stale,
    ),
    Kind(
        "grad_spike",
        "a gradient norm is above 10 times the median of the last 20 and 5 times the largest of them",
        "One spike that --clip-grad catches is harmless. If they come back, lower --lr and read that rollout: long, "
        "repetitive or extremely rewarded samples make them.",
        grad_spike,
    ),
    Kind(
        "skipped_steps",
        "an optimizer step changed nothing, because its loss or gradient was not finite",
        "Look for infinite rewards and a custom loss that divides by zero; lower --lr; take bfloat16 rather than "
        "float16. --nonfinite-grad fail stops at the first.",
        skipped_steps,
    ),
    Kind(
        "filtered",
        "the filter dropped nine groups in ten of a rollout, at least 32",
        "Read the groups in dropped/ of the run folder, each with its reason: is the reward right, is the task within "
        "reach, is the temperature above 0? Otherwise loosen --dynamic-sampling-filter-path or leave it out.",
        filtered,
    ),
    Kind(
        "failed_groups",
        "a tenth of a rollout's groups could not be generated, or an engine died",
        "log.txt has the errors: memory, a time limit, or a generate function that raises. The run goes on with other "
        "prompts; those that fail are missing from what it learns.",
        failed_groups,
    ),
    Kind(
        "stall",
        "a rollout took five times the median of the last 20, and a minute more (without evaluating and saving)",
        "Look which phase grew: gen by an endless response, or a slow reward (--reward-timeout) or tool; sync by the "
        "network or a disk; all of them by another job on the machine.",
        stall,
    ),
)


class Alarms:
    """The alarms of a run: those that go on and those that ended. ``all`` has them in the order they began."""

    def __init__(self) -> None:
        self.all: list[Alarm] = []
        self._history = History()
        self._pending: defaultdict[str, list[float]] = defaultdict(list)
        self._going: dict[str, tuple[int, Seen, int]] = {}  # kind -> (index in all, condition, rollouts without it)

    @property
    def active(self) -> int:
        """The number of alarms that go on."""
        return len(self._going)

    def note(self, record: Mapping[str, Any]) -> list[Alarm]:
        """Take one record of metrics.jsonl; returns the alarms that began or ended (``ended`` is set) with it."""
        if record["kind"] == "start":
            self._pending.clear()
            return []
        if record["kind"] == "eval":
            done = self._history.rollouts + (DEFAULT_AXIS in self._pending)
            for name in eval_metrics([record]):
                score = Score(done, float(record[name]), float(record.get(f"{name}-stderr", UNKNOWN_ERROR)))
                self._history.scores[name].append(score)
            return []
        for name, value in record.items():
            if name != "kind":
                self._pending[name].append(float(value))
        return self.judge() if record["kind"] == "perf" else []

    def judge(self) -> list[Alarm]:
        """End the rollout that the last records are about, which a failed one does not do itself."""
        if DEFAULT_AXIS not in self._pending:
            return []
        rollout_id = int(self._pending[DEFAULT_AXIS][-1])
        self._history.add(rollout_values(self._pending))
        self._pending.clear()
        changed = []
        for kind in KINDS:
            if kind.name in self._going:
                changed += self._go_on(kind.name, rollout_id)
            elif seen := kind.see(self._history):
                alarm = Alarm(kind.name, rollout_id, seen.says, kind.advice)
                self._going[kind.name] = (len(self.all), seen, 0)
                self.all.append(alarm)
                changed.append(alarm)
        return changed

    def _go_on(self, kind: str, rollout_id: int) -> list[Alarm]:
        index, seen, quiet = self._going[kind]
        quiet = 0 if seen.goes_on(self._history) else quiet + 1
        self._going[kind] = (index, seen, quiet)
        if quiet < QUIET:
            return []
        del self._going[kind]
        self.all[index] = replace(self.all[index], ended=rollout_id - QUIET + 1)
        return [self.all[index]]


def replay(records: Iterable[Mapping[str, Any]]) -> list[Alarm]:
    """The alarms of a run, from its valid records (`read_metrics`), in the order they began."""
    alarms = Alarms()
    for record in records:
        alarms.note(record)
    alarms.judge()
    return alarms.all
