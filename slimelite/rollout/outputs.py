"""What rollout functions return; the names are slime's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from slimelite.sample import Sample


class Generated(NamedTuple):
    """What a rollout added to one response: ``tokens``, those the loss sees, and seconds spent on tools."""

    tokens: int
    effective: int
    waited: float = 0.0


@dataclass
class RolloutFnTrainOutput:
    """Finished, scored groups (fan-out siblings side by side in their group), and metrics by their full names.

    ``generated``: all that this rollout generated, also what was not accepted; None: the samples from end to end.
    """

    samples: list[list[Sample]]
    metrics: dict[str, Any] = field(default_factory=dict)
    generated: list[Generated] | None = None


@dataclass
class RolloutFnEvalOutput:
    """For each dataset its ``samples``, and slime's ``rewards`` and ``truncated`` columns; metrics by full names."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] = field(default_factory=dict)


def train_output(value: Any) -> RolloutFnTrainOutput:
    """What a rollout function returned: an object with ``samples`` and ``metrics``, groups, or samples (regrouped).

    Raises:
        ValueError: it is none of these, or empty.
    """
    samples = getattr(value, "samples", value)
    metrics = getattr(value, "metrics", None) or {}
    generated = getattr(value, "generated", None)
    if not isinstance(samples, list) or not samples:
        raise ValueError(
            f"a rollout function returns a list of groups of samples, or an object with it, not {value!r:.200}"
        )
    if isinstance(samples[0], Sample):
        by_group: dict[int | None, list[Sample]] = {}
        for sample in samples:
            by_group.setdefault(sample.group_index, []).append(sample)
        samples = list(by_group.values())
    return RolloutFnTrainOutput([flatten(group) for group in samples], metrics, generated)


def flatten(group: list[Any]) -> list[Sample]:
    """slime nests the siblings of a fan-out in their group; here they stand side by side, sharing a rollout id.

    Raises:
        ValueError: something in it is not a sample.
    """
    flat: list[Sample] = []
    for item in group:
        siblings = item if isinstance(item, list) else [item]
        for sample in siblings:
            if not isinstance(sample, Sample):
                raise ValueError(f"expected a Sample in a group, got a {type(sample).__name__}")
            if isinstance(item, list) and sample.rollout_id is None:
                sample.rollout_id = siblings[0].index
        flat.extend(siblings)
    return flat
