"""Writes and reads ``metrics.jsonl``, which has every metric of a run, one JSON object per line.

A line has ``time`` (seconds since the epoch), ``kind``, and metrics by their full names. These metrics include the
axes, such as ``rollout/step``. Numbers that JSON cannot hold are the strings "NaN", "Infinity" and "-Infinity", which
``float()`` understands. Lines are only appended. A line of kind ``start`` has the rollout at which the run began or
resumed, and the format of the run folder. Earlier lines about this rollout or a later rollout are then invalid.
``eval/step`` is the number of the last rollout before an evaluation; -1 stands for an evaluation before training.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, Literal

from slimelite.base.files import FORMAT, check_format, named

Kind = Literal["start", "rollout", "train", "eval", "perf"]
Record = dict[str, Any]

FILE_NAME = "metrics.jsonl"
# prefix of a metric -> the metric that is its x-axis
AXES = {"train/": "train/step", "eval/": "eval/step"}
DEFAULT_AXIS = "rollout/step"
# for an unknown name: the maximum number of suggested names, and their least similarity
NEAREST, ALIKE = 3, 0.7


def axis_of(metric: str) -> str:
    """The metric on the x-axis of ``metric``."""
    return next((axis for prefix, axis in AXES.items() if metric.startswith(prefix)), DEFAULT_AXIS)


class MetricsFile:
    """Appends records to the file. `write` flushes each record."""

    name = "metrics"

    def __init__(self, run_dir: Path) -> None:
        path = run_dir / FILE_NAME
        self.where = str(path)
        # after a crash in the last line, start a new line, so that the next record can be read
        torn = path.is_file() and path.read_bytes()[-1:] not in (b"", b"\n")
        self._file = path.open("a", encoding="utf-8")
        self._file.write("\n" if torn else "")

    def write(self, kind: Kind, metrics: Mapping[str, float], /) -> None:
        """Append one record."""
        head = {"time": round(time.time(), 3), "kind": kind, **({"format": FORMAT} if kind == "start" else {})}
        record = head | {k: _to_json(v) for k, v in metrics.items()}
        with named(Path(self.where)):
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()

    def write_alarm(self, title: str, text: str, rollout_id: int, /) -> None:
        """Write nothing: this file has only numbers, and alarms.jsonl has the alarms."""

    def close(self, _failed: bool, /) -> None:
        """Close the file."""
        with named(Path(self.where)):
            self._file.close()


def read_metrics(run_dir: str | Path) -> list[Record]:
    """The valid records, in file order: all except those that a resume made invalid. Numbers are floats.

    Raises:
        ValueError: the file does not exist or has another format, or a line is not a JSON object of numbers. Only the
            last line may be incomplete, because a crashed run may leave such a line.
    """
    path = Path(run_dir) / FILE_NAME
    if not path.is_file():
        raise ValueError(f"{run_dir} is not a run folder: it has no {FILE_NAME}")
    records: list[Record] = []
    torn: tuple[int, str] | None = None
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line:
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            torn = (number, line)
            continue
        try:
            stated = entry.pop("format", None)
            record = {k: v if k == "kind" else float(v) for k, v in entry.items()}
            kind, _ = record["kind"], record[AXES["eval/"] if record["kind"] == "eval" else DEFAULT_AXIS]
        except (AttributeError, KeyError, TypeError, ValueError):
            if torn is None:
                raise ValueError(f"{path}:{number}: not a record of metrics: {line[:80]!r}") from None
            kind = stated = None
        check_format(path, stated)
        if torn is not None and kind != "start":
            raise ValueError(f"{path}:{torn[0]}: not JSON: {torn[1][:80]!r}")
        torn = None
        if kind == "start":
            records = [r for r in records if _precedes(r, record[DEFAULT_AXIS])]
        records.append(record)
    return records


def series(records: Iterable[Record], metric: str) -> tuple[list[float], list[float]]:
    """(steps, values) of a metric on its axis, sorted by step. If a step has several values, the last value is used."""
    axis = axis_of(metric)
    points = {r[axis]: r[metric] for r in records if metric in r and axis in r}
    return sorted(points), [points[step] for step in sorted(points)]


def eval_metrics(records: Iterable[Mapping[str, object]]) -> list[str]:
    """Names of the mean scores of eval datasets, in order of first appearance."""
    names = dict.fromkeys(name for r in records for name in r if name.startswith("eval/") and name.count("/") == 1)
    beside = ("eval/step", "eval/reward_errors")
    endings = ("-truncated_ratio", "-stderr", "-centred")
    return [n for n in names if n not in beside and "-pass@" not in n and not n.endswith(endings)]


def unknown_metrics(wanted: Iterable[str], runs: Iterable[Iterable[Record]]) -> str:
    """The message about metrics that no run has. It lists the metrics that the runs have, first those with similar
    names."""
    known = sorted({name for records in runs for r in records for name in r if "/" in name and name != axis_of(name)})
    near: dict[str, None] = {}
    for name in (wanted := list(wanted)):
        likeness = {other: SequenceMatcher(None, name, other).ratio() + (name in other) for other in known}
        best = sorted(known, key=likeness.__getitem__, reverse=True)[:NEAREST]
        near |= dict.fromkeys(other for other in best if likeness[other] >= ALIKE)
    hint = f"did you mean {' or '.join(near)}? other metrics are" if near else "the metrics are"
    return f"no run has {', '.join(wanted)}; {hint}: {', '.join(name for name in known if name not in near)}"


def _precedes(record: Record, start: float) -> bool:
    """Whether a record is from a time before rollout ``start``. A run that starts at rollout 0 repeats the evaluation
    before training."""
    return start > 0 and record["eval/step" if record["kind"] == "eval" else DEFAULT_AXIS] < start


def _to_json(value: float) -> float | str:
    number = float(value)
    if math.isfinite(number):
        return int(number) if isinstance(value, int) else number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
