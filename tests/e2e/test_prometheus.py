"""``--use-prometheus``: what a scrape of a run gets, over HTTP."""

from __future__ import annotations

import math
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import slimelite
import train
from slimelite.tracking import tracker
from slimelite.tracking.metrics_file import read_metrics
from slimelite.tracking.writers import PrometheusWriter

from .conftest import SMALL_FLAGS

pytestmark = pytest.mark.e2e


def scrape(url: str) -> dict[str, tuple[str, dict[str, str], float]]:
    """What Prometheus' own parser reads: metric as the run names it -> name, labels, value."""
    with urllib.request.urlopen(url, timeout=600) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        families = text_string_to_metric_families(answer.read().decode())
    samples = [sample for family in families for sample in family.samples]
    return {s.labels.get("metric", s.name): (s.name, s.labels, s.value) for s in samples}


def newest(run_dir: Path) -> dict[str, float]:
    """The newest value of every metric in the run's file."""
    values: dict[str, Any] = {}
    for record in read_metrics(run_dir):
        values |= {name: value for name, value in record.items() if name not in ("time", "kind")}
    return values


def test_a_scrape_gets_what_the_metrics_file_has(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(small)
    writers: list[PrometheusWriter] = []
    scrapes: list[dict[str, tuple[str, dict[str, str], float]]] = []
    open_writers = tracker.open_writers

    def kept(*args: Any) -> list[Any]:
        opened = open_writers(*args)
        writers.extend(writer for writer in opened if isinstance(writer, PrometheusWriter))
        return opened

    def scraped_after(name: str) -> None:
        method = getattr(tracker.Tracker, name)

        def wrapped(self: tracker.Tracker, *args: Any) -> None:
            method(self, *args)
            (writer,) = writers
            scrapes.append(scrape(writer.where))
            for metric, value in newest(Path("run")).items():
                scraped = scrapes[-1][metric][2]
                assert scraped == value or (math.isnan(scraped) and math.isnan(value)), metric

        monkeypatch.setattr(tracker.Tracker, name, wrapped)

    monkeypatch.setattr(tracker, "open_writers", kept)
    scraped_after("banner")
    scraped_after("finish_rollout")
    flags = ("--num-rollout", "2", "--run-dir", "run", "--use-prometheus", "--prometheus-port", "0")
    assert train.main([*SMALL_FLAGS, *flags, "--prometheus-run-name", "mine"]) == 0

    first, *after = scrapes
    assert first["slimelite_run_info"][1:] == (
        {"run_name": "mine", "run_dir": "run", "version": slimelite.__version__},
        1,
    )
    assert "rollout/raw_reward" not in first
    assert [each["rollout/step"][2] for each in after] == [0, 1]
    assert after[1]["train/loss"][:2] == ("slimelite_train_loss", {"run_name": "mine", "metric": "train/loss"})
    assert after[1]["slimelite_updated_seconds"][2] > after[0]["slimelite_updated_seconds"][2]
    with pytest.raises(OSError, match="refused"):
        scrape(writers[0].where)
