"""Metrics in Prometheus' text format, for our ``/metrics`` pages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metric_name(name: str) -> str:
    """``name`` in a form that Prometheus allows: ``rollout/raw_reward`` becomes ``slimelite_rollout_raw_reward``."""
    return "slimelite_" + re.sub(r"[^a-zA-Z0-9_]", "_", name.replace("@", "_at_"))


class Collected:
    """A registry that calls ``collect`` for the metrics at each scrape."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self.collect = collect
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def text(self) -> str:
        """The answer to a scrape, as text."""
        return generate_latest(self.registry).decode()
