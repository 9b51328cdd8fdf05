"""The groups that a rollout does not train on: a few are kept, each with its reason, for a person to read."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

from slimelite.arguments import Args
from slimelite.sample import Sample
from slimelite.table import SampleTable


class DroppedGroups:
    """At most ``--keep-dropped`` groups of a rollout, in ``dropped/`` of the run folder.

    The first ones stay, but a new reason takes the place of the last group of the commonest one.
    """

    def __init__(self, args: Args, rollout_id: int) -> None:
        self._limit = args.keep_dropped if args.run_dir else 0
        self._key = args.reward_key
        self._path = Path(args.run_dir or "") / "dropped" / f"{rollout_id:07d}.parquet"
        self._groups: list[tuple[str, list[Sample]]] = []  # kind of reason, samples

    def add(self, samples: list[Sample], kind: str, detail: str = "") -> None:
        """Keep the group, if there is room: ``metadata["dropped"]`` of its samples is ``kind`` and ``detail``."""
        kinds = Counter(kind for kind, _ in self._groups)
        if len(self._groups) >= self._limit:
            commonest = max(kinds, key=kinds.__getitem__, default=kind)
            if kind in kinds or kinds[commonest] < 2:
                return
            del self._groups[max(i for i, (k, _) in enumerate(self._groups) if k == commonest)]
        self._groups.append((kind, [self._readable(sample, kind + detail) for sample in samples]))

    def save(self) -> str:
        """Write what was kept; how many there are and where, as the end of a sentence ("" where there are none)."""
        if not self._groups:
            return ""
        SampleTable.from_samples([samples for _, samples in self._groups], self._key).to_parquet(self._path)
        return f"{len(self._groups)} of these groups, with responses and rewards, are in {self._path} (--keep-dropped)"

    def _readable(self, sample: Sample, reason: str) -> Sample:
        try:
            sample.reward_value(self._key)
            reward = sample.reward
        except ValueError:  # it failed, or was never scored
            reward = math.nan
        return replace(sample, reward=reward, metadata={**sample.metadata, "dropped": reason})
