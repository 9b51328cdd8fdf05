"""Counts of a server in Prometheus' text format, for ``/metrics``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from slimelite.base.prometheus import Collected, metric_name
from slimelite.engines.protocol import GenerateRequest, GenerateResult, OnTokens
from slimelite.engines.sampling import Sampler

# name -> type, help
METRICS = {
    "requests_total": ("counter", "answered requests"),
    "requests_running": ("gauge", "requests that are running or waiting"),
    "responses_running": ("gauge", "responses that the engine is sampling"),
    "responses_waiting": ("gauge", "responses that wait because the engine samples its largest number of responses"),
    "prompt_tokens_total": ("counter", "prompt tokens of responses that ended"),
    "cached_prompt_tokens_total": ("counter", "cached prompt tokens of responses that ended"),
    "generated_tokens_total": ("counter", "sampled tokens of responses that ended"),
    "sessions_open": ("gauge", "open sessions"),
}


class Counts:
    """The numbers of requests, responses and tokens of a server."""

    def __init__(self) -> None:
        # (method, path of the route, status) -> number of requests
        self.requests: Counter[tuple[str, str, int]] = Counter()
        self.sampling = 0
        self._tokens: Counter[str] = Counter()

    def counted(self, sampler: Sampler) -> Sampler:
        """A sampler that calls ``sampler`` and counts its responses."""

        async def sample(request: GenerateRequest, on_tokens: OnTokens | None) -> GenerateResult:
            self.sampling += 1
            try:
                result = await sampler(request, on_tokens)
            finally:
                self.sampling -= 1
            self._tokens["prompt_tokens_total"] += len(request.input_ids)
            self._tokens["cached_prompt_tokens_total"] += result.cached_tokens
            self._tokens["generated_tokens_total"] += len(result.output_ids)
            return result

        return sample

    def text(self, running: int, sessions: int, most: int) -> str:
        """The text of ``/metrics``. ``running``: the number of running requests. ``most``: the largest number of
        responses that the engine samples at the same time."""
        values = {"requests_running": running, "sessions_open": sessions}
        values |= {"responses_running": min(self.sampling, most), "responses_waiting": max(0, self.sampling - most)}

        def collect() -> Iterator[Metric]:
            for name, (kind, meaning) in METRICS.items():
                if name == "requests_total":
                    family = CounterMetricFamily(metric_name(name), meaning, labels=("method", "path", "status"))
                    for (method, path, status), number in sorted(self.requests.items()):
                        family.add_metric((method, path, str(status)), number)
                    yield family
                else:
                    form = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
                    yield form(metric_name(name), meaning, value=values.get(name, self._tokens[name]))

        return Collected(collect).text()
