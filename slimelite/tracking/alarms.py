"""Alarms: what usually means that training goes wrong, in words, with the rollout it began and what people do about it.

`Alarms` is fed with the records of metrics.jsonl in their order, by the tracker while the run goes on and by `replay`
afterwards, so both find the same. It has no clock and reads no file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from slimelite.tracking.conditions import KINDS, QUIET, History, Score, Seen, rollout_values
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


def replay(records: Iterable[Mapping[str, object]]) -> list[Alarm]:
    """The alarms of a run, from its valid records (`read_metrics`), in the order they began."""
    alarms = Alarms()
    for record in records:
        alarms.note(record)
    alarms.judge()
    return alarms.all
