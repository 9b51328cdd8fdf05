"""Data sources of users."""

from __future__ import annotations

from typing import Any

from slime.rollout.data_source import RolloutDataSourceWithBuffer

from slimelite.samples.sample import Sample


class Empty:
    def __init__(self, args: Any) -> None: ...

    def get_samples(self, n: int) -> list[list[Sample]]:
        return []

    def add_samples(self, groups: list[list[Sample]]) -> None: ...

    def __len__(self) -> int:
        return 0


class Hinted(RolloutDataSourceWithBuffer):
    """A subclass written for slime."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        groups = super().get_samples(num_samples)
        for group in groups:
            for sample in group:
                sample.metadata["hint"] = True
        return groups


def newest_first(args: Any, rollout_id: int | None, buffer: list[list[Sample]], n: int) -> list[list[Sample]]:
    taken = buffer[::-1][:n]
    del buffer[len(buffer) - len(taken) :]
    return taken
