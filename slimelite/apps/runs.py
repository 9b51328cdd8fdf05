"""Reads a run folder. The page, the comparison and the plots read a run only through `Run`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from slimelite.arguments import Args
from slimelite.arguments.flags import all_flags
from slimelite.base.lifecycle import read_status
from slimelite.tracking.console import SUPERVISED
from slimelite.tracking.metrics_file import FILE_NAME, Record, axis_of, eval_metrics, read_metrics, series
from slimelite.tracking.run_folder import SOURCES

# the evaluation before training has this in its file name, as in eval/gsm8k-start.parquet; its eval/step is -1
START = "start"

# a measure of training is the mean over this many last rollouts
LAST = 10
FLOPS = "perf/actor_train_flops"
# (x on the metric's axis, values), both float64 [points], sorted by x
Series = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Run:
    """The content of a run folder at the moment of reading. A missing file is read as an empty dict.

    ``name``: see `short_names`. ``records``: the lines of metrics.jsonl that no later resume made invalid.
    """

    folder: Path
    name: str
    records: tuple[Record, ...]

    @classmethod
    def read(cls, folder: str | Path, name: str | None = None) -> Run:
        """Read the run in ``folder``. ``name`` defaults to the folder's name.

        While the run is still running, a half-written line of metrics.jsonl is left out.

        Raises:
            ValueError: ``folder`` is not a run folder, it has neither metrics nor samples, or a line of its metrics is
                not JSON.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a run folder: there is no such folder")
        if not (folder / FILE_NAME).is_file() and (folder / "rollouts").is_dir():
            raise ValueError(f"{folder} has no {FILE_NAME}, although it has rollouts: copy the whole run folder")
        run = cls(folder, name or folder.resolve().name, tuple(read_metrics(folder)))
        if not (run.series or run.rollouts or run.dropped):
            message = run.status.get("message") or "its first metrics are written after its first evaluation or rollout"
            raise ValueError(f"{folder} has no metrics yet: status {run.status.get('status', 'unknown')}; {message}")
        return run

    @cached_property
    def config(self) -> dict[str, object]:
        """Field name -> value of every argument of the run, including defaults and derived values. Secrets are
        ``***``."""
        return {name: value for name, value in self._json("config.json").items() if name != "derivations"}

    @cached_property
    def derivations(self) -> dict[str, str]:
        """Field name -> reason, for every argument that was derived."""
        derivations: dict[str, str] = self._json("config.json").get("derivations", {})
        return derivations

    @cached_property
    def versions(self) -> dict[str, object]:
        """versions.json: packages, ``commit``, ``machine``."""
        return self._json("versions.json")

    @cached_property
    def status(self) -> dict[str, object]:
        """status.json: ``status``, ``rollouts_done``, ``num_rollout``, ``message``, …; see `read_status`."""
        return read_status(self.folder)

    @cached_property
    def series(self) -> dict[str, Series]:
        """Metric -> (x, values), each metric on its own axis. Of two values at one x, the later value counts.
        ``rollout/flops`` is the number of floating-point operations of training so far."""
        names = dict.fromkeys(n for r in self.records for n in r if "/" in n and n != axis_of(n))
        points = {name: series(self.records, name) for name in names}
        curves = {name: (np.array(x), np.array(values)) for name, (x, values) in points.items() if x}
        if FLOPS in curves:
            curves["rollout/flops"] = (curves[FLOPS][0], np.cumsum(curves[FLOPS][1]))
        return curves

    @cached_property
    def scores(self) -> list[str]:
        """Names of the mean scores of the eval datasets, such as ``eval/gsm8k``."""
        return eval_metrics(self.records)

    @cached_property
    def unit(self) -> str:
        """The name of a turn of the loop, see `unit_of`. Only supervised training has no reward."""
        trained = {"train/loss", "rollout/response_len/mean"} & self.series.keys()
        return "batch" if trained and "rollout/raw_reward" not in self.series else "rollout"

    @cached_property
    def measures(self) -> dict[str, str]:
        """Title -> metric: the reward, or the measures of supervised training."""
        titles = SUPERVISED if self.unit == "batch" else {"rollout/raw_reward": "reward"}
        return {title: metric for metric, title in titles.items() if metric in self.series}

    def last(self, metric: str) -> float:
        """The last value of a metric of evaluations, or the mean of the last rollouts that have the metric."""
        x, values = self.series[metric]
        if axis_of(metric) == "eval/step":
            return float(values[-1])
        steps = self.config.get("num_steps_per_rollout") if axis_of(metric) == "train/step" else None
        rollouts = x // steps if isinstance(steps, int) else x
        return float(values[np.isin(rollouts, np.unique(rollouts)[-LAST:])].mean())

    @cached_property
    def rollouts(self) -> dict[int, Path]:
        """Rollout -> the parquet file of its samples (`SampleTable.from_parquet`)."""
        return self._numbered("rollouts")

    @cached_property
    def dropped(self) -> dict[int, Path]:
        """Rollout -> the parquet file of the rollout's groups that were not trained on."""
        return self._numbered("dropped")

    @cached_property
    def token_stats(self) -> dict[int, Path]:
        """Rollout -> the parquet file with the trainer's log-probs and entropies for the rollout's tokens."""
        return self._numbered("token_stats")

    @cached_property
    def evals(self) -> dict[str, dict[int, Path]]:
        """Dataset -> eval/step of an evaluation (-1: before training) -> the parquet file with the answers."""
        datasets: dict[str, dict[int, Path]] = {}
        for path in sorted((self.folder / "eval").glob("*.parquet")):
            dataset, _, number = path.stem.rpartition("-")
            if dataset and (number == START or number.isdecimal()):
                datasets.setdefault(dataset, {})[-1 if number == START else int(number)] = path
        return {dataset: dict(sorted(files.items())) for dataset, files in datasets.items()}

    @cached_property
    def alarms(self) -> list[dict[str, object]]:
        """The alarms of the run: each `Alarm` as a dict, in the order in which they began.

        The alarms come from alarms.jsonl. A run without alarms does not have this file.
        """
        path = self.folder / "alarms.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    @property
    def log(self) -> Path:
        """The path of log.txt."""
        return self.folder / "log.txt"

    def _json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        if not path.is_file():
            return {}
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
        if not isinstance(content, dict):
            raise ValueError(f"{path} is not a file of a run: it does not contain a JSON object")
        return content

    def _numbered(self, folder: str) -> dict[int, Path]:
        files = (self.folder / folder).glob("*.parquet")
        return dict(sorted((int(path.stem), path) for path in files if path.stem.isdecimal()))


def read_runs(folders: Iterable[str | Path]) -> list[Run]:
    """The runs in ``folders``, with `short_names`.

    Raises:
        ValueError: see `Run.read`; also if a folder is given twice.
    """
    paths = list(folders)
    places = [Path(folder).resolve() for folder in paths]
    if twice := [str(folder) for i, folder in enumerate(paths) if places[i] in places[:i]]:
        raise ValueError(f"{twice[0]} is given twice")
    return [Run.read(folder, name) for folder, name in zip(paths, short_names(places), strict=True)]


def short_names(folders: Iterable[Path]) -> list[str]:
    """For each of several different folders, the shortest end of its path that no other one has, such as ``a/grpo`` and
    ``b/grpo``."""
    parts = [folder.parts for folder in folders]
    length = 1
    while len({p[-length:] for p in parts}) < len(parts):
        length += 1
    return ["/".join(p[-length:]) for p in parts]


def flag_names(runs: Sequence[Run]) -> list[str]:
    """The fields of the runs' configurations that are flags, including the flags of other versions of slimelite and of
    plugins."""
    flags = all_flags(Args)
    inner = {f.name for f in fields(Args) if f.name not in flags} - {"sglang_overrides", "custom_config"}
    return list(dict.fromkeys(name for run in runs for name in run.config if name not in inner))


def differing_flags(runs: Sequence[Run]) -> dict[str, list[object]]:
    """Flag -> its value in each run, for flags that differ. The value is None in a run that does not have the flag, for
    example because only another run uses the flag's plugin.

    Two kinds of flags are left out: (1) flags that only name the source of arguments or the run folder; (2) flags whose
    value every run derived from other flags.
    """
    differing = {}
    for name in [name for name in flag_names(runs) if name not in SOURCES]:
        there = [run for run in runs if name in run.config]
        derived = all(name in run.derivations for run in there)
        if not derived and any(run.config[name] != there[0].config[name] for run in there[1:]):
            differing["--" + name.replace("_", "-")] = [run.config.get(name) for run in runs]
    return differing


# two runs with different seeds never agree in these metrics to the last digit
MEASURED = ("rollout/raw_reward", "rollout/response_len/mean", "train/loss", "train/grad_norm")


def same_runs(runs: Sequence[Run]) -> list[list[Run]]:
    """Groups of runs whose rewards, lengths, losses, gradient norms and scores are equal to the last digit."""
    groups: dict[object, list[Run]] = {}
    for run in runs:
        names = [name for name in (*MEASURED, *run.scores) if name in run.series]
        measured = tuple((name, run.series[name][0].tobytes(), run.series[name][1].tobytes()) for name in names)
        if measured:
            groups.setdefault(measured, []).append(run)
    return [group for group in groups.values() if len(group) > 1]


def same_notes(runs: Sequence[Run]) -> list[str]:
    """One sentence for each group of equal runs (`same_runs`)."""
    notes = []
    for group in same_runs(runs):
        *first, last = (run.name for run in group)
        names, seeds = f"{', '.join(first)} and {last}", {str(run.config.get("rollout_seed")) for run in group}
        why = f"same seeds (--rollout-seed {min(seeds)})" if len(seeds) == 1 else "although their seeds differ"
        notes.append(f"runs {names} are the same to the last digit: {why}. Count them as one run, not {len(group)}.")
    return notes
