"""`Tracker` records a run, and owns the run folder, the console and the metric writers."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Any

import numpy as np

import slimelite
from slimelite.arguments import Args, DebugArgs
from slimelite.base import trace
from slimelite.base.files import write_text
from slimelite.base.guard import nearest
from slimelite.base.lifecycle import WITHOUT_A_WORD, RolloutError, Stopped, read_status, start_module, this_process
from slimelite.base.restarts import OUTSIDE
from slimelite.models.checkpoints import MARKER, read_json
from slimelite.samples.table import SampleTable, TokenStats
from slimelite.tracking.alarms import Alarm, Alarms
from slimelite.tracking.console import (
    PERF_NAMES,
    Console,
    Phase,
    Timer,
    duration,
    eval_text,
    method,
    progress,
    run_facts,
    samples_table,
    summary,
    unit_of,
    when,
)
from slimelite.tracking.metrics_file import Kind, axis_of, eval_metrics, read_metrics
from slimelite.tracking.noise import log_to_file, quiet_transformers, stderr_to_file
from slimelite.tracking.panels import LABELS
from slimelite.tracking.run_folder import RunFolder, config_dict, versions
from slimelite.tracking.writers import Writer, open_writers

logger = logging.getLogger(__name__)
# slime's tolerance: runs with another parallel layout must reproduce the recorded gradient norms
GRAD_NORM_TOLERANCE = 0.03
# drawing the curves during a run takes at most about this share of the run's time
DRAWING_SHARE = 0.02


@dataclass(slots=True)
class _Rollout:
    """The metrics and samples of the current rollout."""

    row: dict[str, float] = field(default_factory=dict)  # every metric
    perf: dict[str, float] = field(default_factory=dict)  # metrics that are written when the rollout is over
    table: SampleTable | None = None
    scores: list[str] = field(default_factory=list)  # names of the scores of a new evaluation
    answers: dict[str, SampleTable] = field(default_factory=dict)


class Drawing:
    """Draws ``curves.png`` of the run folder at ``path``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._process: subprocess.Popen[str] | None = None
        self._began, self._took = time.monotonic(), 1.0

    @property
    def due(self) -> bool:
        """Whether enough time has passed since the last drawing (for the first drawing: since the start)."""
        return self._process is None and time.monotonic() - self._began > self._took / DRAWING_SHARE

    def begin(self) -> None:
        """Draw the present content of the folder, after a drawing in progress has ended."""
        self.finish()
        self._began = time.monotonic()
        silent = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        self._process = start_module("slimelite.tracking.plot", str(self._path), text=True, **silent)

    def look(self) -> None:
        """Check whether the drawing in progress has ended."""
        if self._process is not None and self._process.poll() is not None:
            self.finish()

    def finish(self) -> None:
        """Wait for a drawing in progress. If the drawing failed, log a warning with the reason."""
        if self._process is None:
            return
        _, errors = self._process.communicate()
        if self._process.returncode:
            logger.warning("the curves were not drawn: %s", (errors.strip().splitlines() or ["killed"])[-1])
        self._took = time.monotonic() - self._began
        self._process = None


class Tracker:
    """Records a run inside a ``with`` block.

    ::

        with Tracker(args) as tracker:
            tracker.banner(args)
            with tracker.phase("generate") as phase:
                ... phase.update(done, total, note)
            tracker.log_rollout(rollout_id, table, metrics)
            ...
            tracker.finish_rollout(rollout_id)  # the line on the console

    An error that leaves the block is recorded in status.json and log.txt, and is raised again.
    """

    def __init__(self, args: Args) -> None:
        self.args = args
        self.folder = RunFolder(args.run_dir, args.rollouts_kept)
        always = ["eval"] if args.eval_interval and args.eval_datasets else []
        self.console = Console(always=always, unit=unit_of(args.job))
        self.timer = Timer()
        self._stack = ExitStack()
        self._writers: list[Writer] = []
        self._began = time.time()
        self._looping = False  # whether the first rollout has begun
        self._finished: int | None = None  # the last rollout that is over
        self._early: str | None = None  # why the run ends before its last rollout
        self._facts: dict[str, str] = {}  # facts for the console at the end of the run
        self._now = _Rollout()
        self._best = float("-inf")
        self._step_times: deque[float] = deque(maxlen=20)
        self._alarms = Alarms()
        self._changed: list[Alarm] = []  # alarms that began or ended in the current rollout
        self._checks = RunChecks(args)
        self._drawing = Drawing(self.folder.path)
        self._drawn = False  # whether the last drawing has every metric

    def __enter__(self) -> Tracker:
        try:
            self._open()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        failure = None if isinstance(error, SystemExit) and not error.code else error
        with self._stack:
            if failure is not None:
                self.record_failure(kind, error, tb)
                if isinstance(failure, RolloutError):
                    self._write("rollout", failure.metrics)
                    self._changed += self._alarms.judge()
                    self._report_alarms()
                self._explain(failure)
            if self._finished is not None and not self._drawn:
                self._drawing.begin()
            self._drawing.finish()
            for writer in self._writers:
                writer.close(failure is not None)
            if failure is None:
                self._summarize()

    def record_failure(
        self, _kind: type[BaseException] | None, error: BaseException | None, _tb: TracebackType | None
    ) -> None:
        """Write an error to status.json before the run is shut down. This method has the parameters of ``__exit__``."""
        if error is not None:
            name = "" if isinstance(error, Stopped) else f"{type(error).__name__}: "
            self._save_status(_status_of(error), f"{name}{error}".removesuffix(": "))

    def banner(self, args: Args) -> None:
        """Print the facts of the run. ``args`` must have the number of rollouts and the id of the first rollout."""
        self.args = args
        self.folder.save_config(args)
        first = args.start_rollout_id or 0
        self.folder.forget(first, ahead=args.async_rollout)
        self._write("start", {"rollout/step": first, "eval/step": first - 1})
        self._remember_alarms()
        if args.num_rollout not in (None, 0) and args.start_rollout_id >= args.num_rollout:
            done = f"the checkpoint of --load already has all {args.num_rollout} rollouts; to continue, raise"
            if args.load is None:
                done = f"the first rollout is number {args.start_rollout_id} of --num-rollout {args.num_rollout}: raise"
            self.console.line(f"nothing is left to do: {done} --num-rollout (or --num-epoch)", "bold")
        self.console.facts({**run_facts(args), **{w.name: w.where for w in self._writers}})
        for note in args.notes:
            self.console.line(f"  note: {note}", "dim")
        if args.no_effect:
            names = ", ".join(name for name, _ in args.no_effect)
            self.console.line(f"  no effect here: {names} (config.yaml has the reasons)", "dim")

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Measure the time of a phase of the loop, and show its progress. The metric is ``perf/{name}_time``, and for
        generate ``perf/rollout_time``.

        ``name``: generate, train, update_weights, save_model, eval, or another name. `Phase.update` reports the
        progress.
        """
        if name == "generate" and not self._looping:
            # metrics and times from before the first rollout do not belong to it
            self._looping = True
            self._now = _Rollout()
            self.timer.restart()
        label = name.replace("_", " ")
        if self._looping:
            rollout_id = (self.args.start_rollout_id or 0) if self._finished is None else self._finished + 1
            of = "" if self.args.num_rollout is None else f" of {self.args.num_rollout}"
            label = f"{unit_of(self.args.job)} {rollout_id + 1}{of}, {label}"
        timed = self.timer(PERF_NAMES.get(name, name))
        with trace.span("driver", "phases", name), timed, Phase(self.console, label) as phase:
            yield phase

    def log_rollout(self, rollout_id: int, table: SampleTable, metrics: Mapping[str, float]) -> None:
        """Record the samples of a rollout and the metrics of their generation."""
        self.folder.save_rollout(rollout_id, table)
        self._now.table = table
        from_table = {
            "rollout/raw_reward": float(table.reward.mean()),
            "rollout/response_len/mean": float(table.response_lengths.mean()),
        }
        numbers = {"rollout/step": rollout_id, **from_table, **metrics}
        if not self.args.job.sampled:
            del numbers["rollout/raw_reward"]  # there is no reward, and zeros would look like a bad one
        self._write("rollout", numbers)

    def log_train(
        self,
        rollout_id: int,
        metrics: Mapping[str, float],
        steps: Sequence[Mapping[str, float]] = (),
        columns: Mapping[str, np.ndarray] | None = None,
        token_stats: TokenStats | None = None,
    ) -> None:
        """Record the metrics of training. ``steps``: the ``train/`` metrics of each optimizer step, if known.

        ``columns``: columns that training adds to the saved rollout, name -> [response tokens]. ``token_stats``: the
        trainer's statistics of the rollout's tokens, which are written to a separate file.
        """
        if token_stats is not None:
            self.folder.save_token_stats(rollout_id, token_stats)
        if columns and self._now.table is not None:
            vars(self._now.table).update(columns)
            self.folder.save_rollout(rollout_id, self._now.table)
        first = rollout_id * self.args.num_steps_per_rollout
        last = first + (len(steps) or self.args.num_steps_per_rollout) - 1
        for i, step in enumerate(steps):
            self._write("train", {"rollout/step": rollout_id, "train/step": first + i, **step})
            if "train/grad_norm" in step:
                self._checks.note_grad_norm(rollout_id, i, step["train/grad_norm"])
        whole = {k: v for k, v in metrics.items() if not (steps and k.startswith("train/"))}
        self._write("train", {"rollout/step": rollout_id, "train/step": last, **whole})
        self._now.row |= metrics

    def log_perf(self, metrics: Mapping[str, float]) -> None:
        """Record other metrics of the current rollout, such as the metrics of a weight sync."""
        self._now.perf |= metrics

    def log_eval(self, rollout_id: int, metrics: Mapping[str, float], tables: Mapping[str, SampleTable]) -> None:
        """Record an evaluation after rollout ``rollout_id`` (-1: before training). ``tables``: answers by dataset."""
        for name, table in tables.items():
            self.folder.save_eval(name, rollout_id, table)
        perf = {name: value for name, value in metrics.items() if axis_of(name) != "eval/step"}
        self._now.perf |= perf
        self._write("eval", {"eval/step": rollout_id, **{k: v for k, v in metrics.items() if k not in perf}})
        self._now.answers = dict(tables)
        self._now.scores = eval_metrics([metrics])
        if not self._looping:
            self._note_score(self._now.row)
        if len(self._now.scores) > self._looping:  # the row of a rollout has space for only one score
            at = "" if self.args.num_rollout == 0 else f" {when(rollout_id, unit_of(self.args.job))}:"
            self.console.line(f"  eval{at} {eval_text(metrics)}")

    def finish_rollout(self, rollout_id: int) -> None:
        """End a turn of the loop and print its line. From time to time, also show samples and redraw the curves."""
        times = self.timer.finish_step()
        perf = {name: value for name, value in (times | self._now.perf).items() if name not in self._now.row}
        self._write("perf", {"rollout/step": rollout_id, **perf})
        first, self._finished = self._finished is None, rollout_id
        self._save_status("running")
        self._print_row(rollout_id, times)
        self._report_alarms()
        if first or self._now.scores:
            self._show_samples(rollout_id)
        self._drawing.look()
        last = rollout_id + 1 == self.args.num_rollout
        if last or (self._now.scores and self._drawing.due):
            self._drawing.begin()  # draw a last time while the workers end
            self._drawn = True
        self._now = _Rollout()
        if last:
            self._checks.finish()

    def finish_early(self, why: str) -> None:
        """Note the reason ``why`` the run ends before ``--num-rollout``. Such an early end is not a failure."""
        self._early = f"finished early: {why}"
        self._checks.finish()

    def log_facts(self, facts: Mapping[str, str]) -> None:
        """Show ``facts``, name -> value, on the console at the end of the run."""
        self._facts |= facts

    def _open(self) -> None:
        before = read_status(self.folder.path)
        self._save_status("running")
        if self.args.trace:
            trace.begin(self.folder.path / trace.FILE, driver=True)
            self._stack.callback(trace.finish)
        self._stack.enter_context(log_to_file(self.folder.path / "log.txt"))
        self._stack.enter_context(stderr_to_file(self.folder.path / "stderr.txt"))
        self._stack.enter_context(self.console.warnings())
        self.console.line(f"slimelite {slimelite.__version__}, run folder {self.args.run_dir}", "bold")
        if before.get("status") == WITHOUT_A_WORD:
            done = progress(before["rollouts_done"], before["num_rollout"], unit_of(self.args.job))
            self.console.line(f"  the run before this one {WITHOUT_A_WORD} {done}: {before['message']}")
        if self.args.job.local or "transformers" in sys.modules:
            quiet_transformers()
        self.folder.save_config(self.args)
        self.folder.save_json("versions.json", versions(self.args.device))
        self._writers = open_writers(self.args, config_dict(self.args))

    def _write(self, kind: Kind, metrics: Mapping[str, object]) -> None:
        numbers = {name: _number(name, value) for name, value in metrics.items()}
        self._changed += self._alarms.note({"kind": kind, **numbers})
        if kind == "perf":
            numbers["alarms/active"] = self._alarms.active
        self._now.row |= numbers
        self._drawn = False
        self._checks.note(numbers)
        for writer in self._writers:
            writer.write(kind, numbers)

    def _print_row(self, rollout_id: int, times: Mapping[str, float]) -> None:
        row, seconds = dict(self._now.row), times["perf/step_time"]
        phases = {label: times[key] for name, label in LABELS.items() if (key := f"perf/{name}_time") in times}
        if self.args.job.sampled and self.args.job.engines:
            # divide by rollout_time, since the phase "generate" only waits for a rollout that was generated ahead
            tokens = row.get("perf/generated_tokens", 0.0)
            row["tokens_per_sec"] = tokens / row["perf/rollout_time"] if tokens else 0.0
        if failed := row.get("rollout/reward_errors"):
            row["errors"] = failed  # the first error adds the column
        self._step_times.append(seconds)
        last = rollout_id if self.args.num_rollout is None else self.args.num_rollout - 1
        if left := last - rollout_id:
            row["eta"] = fmean(self._step_times) * left
        best = self._note_score(row)
        self.console.row(f"{rollout_id + 1} of {last + 1}", row, seconds, phases, best=best)

    def _note_score(self, row: dict[str, float]) -> bool:
        """Add the new score of the first eval dataset, if any, to ``row``. Returns whether the score is the best so
        far."""
        if not self._now.scores:
            return False
        name = self._now.scores[0]
        row["eval"] = row[name]
        if (error := row.get(f"{name}-stderr")) is not None:
            row["eval-stderr"] = error
        sign = -1 if name == "eval/bpb" else 1  # fewer bits are better
        best, self._best = sign * row["eval"] > self._best, max(sign * row["eval"], self._best)
        return best

    def _remember_alarms(self) -> None:
        """Load the alarms of a resumed run, so that they are not announced again."""
        self._alarms = Alarms()
        for record in read_metrics(self.folder.path):
            self._alarms.note(record)
        self.folder.save_alarms(self._alarms.all)

    def _report_alarms(self) -> None:
        for alarm in self._changed:
            if alarm.ended is None:
                logger.warning("%s:\n  %s", alarm.title, alarm.text)
            else:
                self.console.line(f"  {alarm.title}", "dim")
            for writer in self._writers:
                writer.write_alarm(alarm.title, alarm.text, alarm.rollout_id if alarm.ended is None else alarm.ended)
        if self._changed:
            self.folder.save_alarms(self._alarms.all)
            self._changed = []

    def _show_samples(self, rollout_id: int) -> None:
        name, table = next(iter(self._now.answers.items()), (None, self._now.table))
        if table is not None and len(table):
            # the row above counts from 1, and files count from 0
            of = f" of {self.args.num_rollout}" if self.args.num_rollout else ""
            at = f"{rollout_id + 1}{of} ({unit_of(self.args.job)} {rollout_id} in files)"
            title = f"answers to {name} after {at}" if name else f"samples of {at}"
            self.console.block(samples_table(title, table, None if name else self.args.loss))

    def _save_status(self, status: str, message: str | None = None) -> None:
        done = None if self._finished is None else self._finished + 1
        progress = {"status": status, "rollouts_done": done, "num_rollout": self.args.num_rollout, "message": message}
        progress["method"] = method(self.args)
        times = {"began": self._began, "updated": time.time()}
        self.folder.save_json("status.json", progress | times | this_process())

    def _explain(self, error: BaseException) -> None:
        logging.getLogger("slimelite.console").info("traceback", exc_info=error)
        status = _status_of(error)
        finished = None if self._finished is None else self._finished + 1
        done = progress(finished, self.args.num_rollout, unit_of(self.args.job), self.args.start_rollout_id or 0)
        took = duration(time.time() - self._began)
        where = f"log.txt and stderr.txt of {self.args.run_dir}"
        apart = "" if status == "interrupted" else "\n"
        self.console.line(f"{apart}{status} {done}, {took} after the start; details are in {where}", "bold red")
        if hint := self._way_on(error):
            self.console.line(hint)

    def _way_on(self, error: BaseException) -> str | None:
        """The advice on how to continue after a machine, Ray or a worker was lost; None if there is no checkpoint."""
        save = self.args.save
        lost = f"{type(error).__name__}:" in OUTSIDE
        if not (lost and save and (Path(save) / MARKER).is_file()) or self.args.max_restarts:
            return None
        return (
            f"to continue from the newest checkpoint, give the same command with --run-dir {self.args.run_dir} "
            f"--load {save}; with --max-restarts 10 the command restarts by itself"
        )

    def _summarize(self) -> None:
        self._save_status("finished", self._early)
        records = read_metrics(self.folder.path)
        ended = "" if self._early is None else f"{self._early}\n"
        self.console.line(f"\n{ended}done in {duration(time.time() - self._began)}", "bold")
        curves = {"curves": f"{self.args.run_dir}/curves.png"} if self._finished is not None else {}
        page = {"run folder": self.args.run_dir, "look at it": f"slimelite view {self.args.run_dir}"}
        if self.args.num_rollout != 0:  # a run that only evaluated has already shown its scores
            self.console.facts({**summary(records, unit_of(self.args.job)), **self._facts, **curves, **page})


def _status_of(error: BaseException) -> str:
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"


def _number(name: str, value: Any) -> float:
    try:
        return value if isinstance(value, int) else float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"metric {name} is {value!r:.100}, not a number") from error


class RunChecks:
    """Collects the values that the checks need during a run.

    A grad-norm file is a JSON object ``{"rollout/step": norm}``. Steps are counted from 0 within a rollout.
    """

    def __init__(self, args: DebugArgs) -> None:
        self._key, self._threshold = args.ci_metric_checker_key, args.ci_metric_checker_threshold
        self._best: float | None = None
        self._logged: set[str] = set()
        self._save = args.ci_save_grad_norm
        self._norms: dict[str, float] = {}
        self._expected: dict[str, float] | None = None
        if args.ci_load_grad_norm is not None:
            self._expected = read_json(Path(args.ci_load_grad_norm))

    def note(self, metrics: Mapping[str, float]) -> None:
        """Remember the names of all metrics, and the best value of the checked metric if ``metrics`` has it."""
        self._logged.update(metrics)
        if self._key is not None and self._key in metrics:
            self._best = max(metrics[self._key], -math.inf if self._best is None else self._best)

    def note_grad_norm(self, rollout_id: int, step: int, norm: float) -> None:
        """Record the gradient norm of an optimizer step, and compare it with the norm in ``--ci-load-grad-norm``.

        Raises:
            AssertionError: the norm differs by more than 3 %, or the record has no such step.
        """
        name = f"{rollout_id}/{step}"
        if self._save is not None:
            self._norms[name] = norm
            Path(self._save).parent.mkdir(parents=True, exist_ok=True)
            write_text(Path(self._save), json.dumps(self._norms))
        if self._expected is None:
            return
        recorded = self._expected.get(name)
        if recorded is None or not math.isclose(norm, recorded, rel_tol=GRAD_NORM_TOLERANCE):
            raise AssertionError(
                f"--ci-load-grad-norm: step {name} (rollout/step) has the gradient norm {norm:.6g}, and "
                f"{'none' if recorded is None else f'{recorded:.6g}'} was recorded"
            )

    def finish(self) -> None:
        """Check the metric after the last rollout.

        Raises:
            AssertionError: the checked metric was never logged, or never reached its threshold.
        """
        if self._key is None:
            return
        if self._best is None:
            raise AssertionError(
                f"--ci-metric-checker-key {self._key} was never logged{nearest(self._key, self._logged)}"
            )
        if self._best < (self._threshold or 0.0):
            raise AssertionError(
                f"--ci-metric-checker-key {self._key} reached at most {self._best:g}, not {self._threshold}"
            )
