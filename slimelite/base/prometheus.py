"""Numbers in Prometheus' text format, for every ``/metrics`` of ours."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metric_name(name: str) -> str:
    """The name that Prometheus allows: ``rollout/raw_reward`` is ``slimelite_rollout_raw_reward``."""
    return "slimelite_" + re.sub(r"[^a-zA-Z0-9_]", "_", name.replace("@", "_at_"))


class Collected:
    """A registry of the metrics that ``collect`` gives for each scrape."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self.collect = collect
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def text(self) -> str:
        """What a scrape gets."""
        return generate_latest(self.registry).decode()
