"""The run as people see it: `Tracker` owns the run folder, the console and the metric writers."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType

import slimelite
from slimelite.arguments import Args
from slimelite.table import SampleTable
from slimelite.tracking.banner import run_facts
from slimelite.tracking.console import Console, ConsoleHandler, duration
from slimelite.tracking.metrics_file import Kind, read_metrics, series
from slimelite.tracking.noise import log_to_file, quiet_transformers, stderr_to_file
from slimelite.tracking.progress import Phase
from slimelite.tracking.run_folder import RunFolder, config_dict
from slimelite.tracking.samples import samples_table
from slimelite.tracking.timer import PHASES, Timer
from slimelite.tracking.versions import versions
from slimelite.tracking.writers import Writer, open_writers

logger = logging.getLogger(__name__)

MISMATCH = "train/train_rollout_logprob_abs_diff"
MISMATCH_LIMIT = 0.02
MISMATCH_WARNING = (
    "the trainer and the engine disagree about the same tokens: mean |log-prob difference| is {:.3f} (above {:g}), so the "
    "policy gradient is off-policy without knowing it. Usual causes: weights that did not reach the engine; samples from older "
    "weights (partial rollouts, kept surplus); an engine that computes in lower precision or with quantised weights or cache; "
    "top-p, top-k or penalties in sampling; text that was tokenised again instead of keeping the engine's tokens; different "
    "expert routing. --use-tis corrects small differences."
)
# redrawing the curves may take this share of the time
DRAWING_SHARE = 0.02


class Tracker:
    """Context manager around a run.

    ::

        with Tracker(args) as tracker:
            tracker.banner(args)
            with tracker.phase("generate") as phase:
                ... phase.update(done, total, note)
            tracker.log_rollout(rollout_id, table, metrics)
            ...
            tracker.finish_rollout(rollout_id)  # the line on the console

    An error that leaves the block is recorded in status.json and log.txt, and goes on.
    """

    def __init__(self, args: Args) -> None:
        self.args = args
        self.folder = RunFolder(args.run_dir)
        self.console = Console(always=["eval"] if args.eval_interval and args.eval_datasets else [])
        self.timer = Timer()
        self._stack = ExitStack()
        self._writers: list[Writer] = []
        self._began = time.time()
        self._rollout_id: int | None = None  # the last one that was finished
        self._row: dict[str, float] = {}  # every metric of the current rollout
        self._perf: dict[str, float] = {}  # those that are logged when it is finished
        self._table: SampleTable | None = None
        self._evals: dict[str, SampleTable] = {}
        self._best: dict[str, float] = {}
        self._step_times: deque[float] = deque(maxlen=20)
        self._warned_at = MISMATCH_LIMIT / 2
        self._drawn_at, self._drawing_took = time.monotonic(), 1.0

    def __enter__(self) -> Tracker:
        try:
            self._open()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        failed = not (error is None or (isinstance(error, SystemExit) and not error.code))
        with self._stack:
            for writer in self._writers:
                writer.close(failed)
            if self._rollout_id is not None:
                self._draw()
            self._say_goodbye(error if failed else None)

    def banner(self, args: Args, facts: Mapping[str, str] | None = None) -> None:
        """Say what this run is; ``args`` are complete now (number of rollouts, first rollout), ``facts`` are added."""
        self.args = args
        self.folder.save_config(args)
        outside = {type(w).__name__.removesuffix("Writer").lower(): w.where for w in self._writers if w.where}
        self.console.facts({**run_facts(args), **(facts or {}), **outside})
        for note in args.notes:
            self.console.line(f"  note: {note}", "dim")
        if args.no_effect:
            self.console.line(f"  no effect here: {', '.join(n for n, _ in args.no_effect)} (config.yaml says why)", "dim")
        self._write("start", {"rollout/step": args.start_rollout_id or 0})

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Phase]:
        """A phase of the loop, by a name of ``PHASES`` or one of your own: timed, its progress shown.

        ``total``: how many units it has; `Phase.update` tells how far it is.
        """
        if name == "generate" and not self._looping:
            # what came before the first rollout is no part of it
            self._looping = True
            self._row, self._perf = {}, {}
            self.timer.restart()
        with self.timer(PHASES.get(name, name)), Phase(self.console, name, total) as phase:
            yield phase

    def log_rollout(self, rollout_id: int, table: SampleTable, metrics: Mapping[str, float]) -> None:
        """The samples of a rollout, and what was measured while they were generated."""
        self.folder.save_rollout(rollout_id, table)
        self._table = table
        from_table = {
            "rollout/raw_reward": float(table.reward.mean()),
            "rollout/response_len/mean": float(table.response_lengths.mean()),
        }
        self._write("rollout", {"rollout/step": rollout_id, **from_table, **metrics})

    def log_train(
        self, rollout_id: int, metrics: Mapping[str, float], steps: Sequence[Mapping[str, float]] | None = None
    ) -> None:
        """What training on a rollout gave; ``steps``: the ``train/`` metrics of each optimizer step, if they are known."""
        first = rollout_id * self.args.num_steps_per_rollout
        for i, step in enumerate(steps or ()):
            self._write("train", {"rollout/step": rollout_id, "train/step": first + i, **step})
        last = first + (len(steps) if steps else self.args.num_steps_per_rollout) - 1
        rest = {k: v for k, v in metrics.items() if not (steps and k.startswith("train/"))}
        self._write("train", {"rollout/step": rollout_id, "train/step": last, **rest})
        self._row |= metrics

    def log_perf(self, metrics: Mapping[str, float]) -> None:
        """Metrics of the current rollout that come from elsewhere: those of a weight sync, for one."""
        self._perf |= metrics

    def log_eval(self, rollout_id: int, metrics: Mapping[str, float], tables: Mapping[str, SampleTable]) -> None:
        """An evaluation after rollout ``rollout_id`` (-1: before training); ``tables``: the answers, by dataset."""
        step = rollout_id + 1
        for name, table in tables.items():
            self.folder.save_eval(name, step, table)
        self._write("eval", {"eval/step": step, **metrics})
        self._evals = dict(tables)
        if not self._looping or len(tables) > 1:
            when = f"after {step} rollouts" if step else "before training"
            self.console.line(f"  eval {when}: {eval_text(metrics, list(tables))}")

    def finish_rollout(self, rollout_id: int) -> None:
        """A turn of the loop is over: its line on the console, and now and then samples and curves."""
        times = self.timer.finish_step()
        perf = {name: value for name, value in (times | self._perf).items() if name not in self._row}
        self._write("perf", {"rollout/step": rollout_id, **perf})
        first = self._rollout_id is None
        self._rollout_id = rollout_id
        self._status("running")
        self._print_row(rollout_id, times)
        self._warn_of_mismatch(self._row.get(MISMATCH, 0.0))
        if first or self._evals:
            self._show_samples(rollout_id)
        if self._evals and time.monotonic() - self._drawn_at > self._drawing_took / DRAWING_SHARE:
            self._draw()
        self._row, self._perf, self._evals, self._table = {}, {}, {}, None

    def _open(self) -> None:
        self.console.line(f"slimelite {slimelite.__version__}, run folder {self.args.run_dir}", "bold")
        self._status("running")
        enter = self._stack.enter_context
        enter(log_to_file(self.folder.path / "log.txt"))
        enter(stderr_to_file(self.folder.path / "stderr.txt"))
        enter(self.console.warnings())
        if self.args.launcher == "local" or "transformers" in sys.modules:
            quiet_transformers()
        self.folder.save_config(self.args)
        self.folder.save_json("versions.json", versions(self.args.device))
        self._writers = open_writers(self.args, config_dict(self.args))

    def _write(self, kind: Kind, metrics: Mapping[str, Any]) -> None:
        numbers = {name: as_number(name, value) for name, value in metrics.items()}
        self._row |= numbers
        for writer in self._writers:
            writer.write(kind, numbers)

    def _print_row(self, rollout_id: int, times: Mapping[str, float]) -> None:
        row, step_time = dict(self._row), times["perf/step_time"]
        phases = {label: times[key] for name, label in LABELS.items() if (key := f"perf/{name}_time") in times}
        if self._table is not None and not self.args.debug_train_only and self.args.loss_type != "sft_loss":
            row["tokens_per_sec"] = float(self._table.response_lengths.sum()) / max(phases.get("gen", 0.0), 1e-9)
        self._step_times.append(step_time)
        count = self.args.num_rollout or rollout_id + 1
        row["eta"] = mean(self._step_times) * (count - rollout_id - 1)
        scores = [row[f"eval/{name}"] for name in self._evals if f"eval/{name}" in row]
        best = bool(scores) and scores[0] > self._best
        if scores:
            row["eval"], self._best = scores[0], max(scores[0], self._best)
        self.console.row(f"{rollout_id + 1}/{count}", row, step_time, phases, best=best)

    def _warn_of_mismatch(self, difference: float) -> None:
        """Once in full, then briefly each time it doubles."""
        if difference <= 2 * self._warned_at:
            return
        first = self._warned_at < MISMATCH_LIMIT
        self._warned_at = difference
        logger.warning(MISMATCH_WARNING if first else "trainer and engine drift apart: %s is now %.3f", *...)
