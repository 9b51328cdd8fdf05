"""Metric writers in addition to ``metrics.jsonl``: Weights & Biases, TensorBoard and Prometheus."""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import slimelite
from slimelite.arguments import TrackingArgs
from slimelite.arguments.secret import masked_words
from slimelite.base.files import write_text
from slimelite.tracking.metrics_file import AXES, DEFAULT_AXIS, Kind, MetricsFile, axis_of

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from wandb import Run

logger = logging.getLogger(__name__)


class Writer(Protocol):
    """A destination of metrics. ``where``: the path or URL of the destination, which the console shows."""

    name: str
    where: str

    def write(self, kind: Kind, metrics: Mapping[str, float], /) -> None:
        """Write metrics that belong together. ``metrics`` includes their position on the x-axis, such as
        ``rollout/step`` (see `AXES`)."""
        ...

    def write_alarm(self, title: str, text: str, rollout_id: int, /) -> None:
        """Report an alarm that began or ended in a rollout."""
        ...

    def close(self, failed: bool, /) -> None:
        """Close the writer at the end of the run."""
        ...


def open_writers(args: TrackingArgs, config: Mapping[str, object]) -> list[Writer]:
    """The writer of ``metrics.jsonl``, and the writers for ``--use-wandb``, ``--use-tensorboard`` and
    ``--use-prometheus``.

    ``config``: the resolved arguments, which wandb shows next to the curves.

    Raises:
        ValueError: wandb refuses the run, or the port of ``--use-prometheus`` is taken.
    """
    writers: list[Writer] = [MetricsFile(Path(args.run_dir))]
    if args.use_wandb and args.wandb_mode != "disabled":
        writers.append(WandbWriter(args, config))
    if args.use_tensorboard:
        writers.append(TensorboardWriter(tensorboard_directory(args)))
    if args.use_prometheus:
        writers.append(PrometheusWriter(args))
    return writers


class WandbWriter:
    """Writes to Weights & Biases. A resumed run folder continues its earlier wandb run.

    Raises:
        ValueError: wandb refuses the run, for example because there is no key.
    """

    name = "wandb"

    def __init__(self, args: TrackingArgs, config: Mapping[str, object]) -> None:
        import wandb

        # with --wandb-always-use-train-step, the step of a rollout is its first train step, not its id
        self._steps_per_rollout = args.num_steps_per_rollout if args.wandb_always_use_train_step else 1
        identity = _wandb_identity(args)
        directory = Path(args.wandb_dir or args.run_dir)
        directory.mkdir(parents=True, exist_ok=True)
        keys = (("base_url", args.wandb_host), ("api_key", args.wandb_key))
        account = {name: value for name, value in keys if value is not None}
        try:
            with _command_line_masked():
                run = wandb.init(
                    project=args.wandb_project or "slimelite",
                    entity=args.wandb_team,
                    mode=args.wandb_mode,
                    dir=str(directory),
                    config=dict(config),
                    resume="allow",
                    settings=wandb.Settings(silent=True, console="off", **account),
                    id=identity["id"],
                    group=identity["group"],
                    name=identity["name"],
                )
        except wandb.Error as error:  # no key, a wrong one, or a server that does not answer
            remedy = "log in with `wandb login`, set $WANDB_API_KEY, or keep the run here with --wandb-mode offline"
            raise ValueError(f"--use-wandb: {str(error).rstrip('.')}: {remedy}") from error
        self._run: Run | None = run
        self.where = run.url or f"offline: wandb sync {Path(run.dir).parent}"
        for axis in (DEFAULT_AXIS, *AXES.values()):
            run.define_metric(axis)
        for prefix in ("rollout/", "perf/", "multi_turn/", "passrate/", "alarms/", *AXES):
            run.define_metric(prefix + "*", step_metric=axis_of(prefix))

    def write(self, kind: Kind, metrics: Mapping[str, float], /) -> None:
        """Log one row of the wandb run's history."""
        if kind == "start":
            return
        axes = [axis for axis in (DEFAULT_AXIS, "eval/step") if axis in metrics]
        row = {**metrics, **{axis: metrics[axis] * self._steps_per_rollout for axis in axes}}
        self._ask(lambda run: run.log(row))

    def write_alarm(self, title: str, text: str, _rollout_id: int, /) -> None:
        """Send an alert. wandb forwards the alert by mail or Slack, as the user has set in wandb."""
        self._ask(lambda run: run.alert(title=title, text=text, level="WARN"))

    def close(self, failed: bool, /) -> None:
        """Upload the remaining data.

        After a failure, the watchdog kills every process of the run. wandb's process must end earlier: otherwise wandb
        raises an error when Python exits.
        """
        self._ask(lambda run: run.finish(exit_code=int(failed)))
        if failed and self._run is not None:
            self._forget()

    def _ask(self, call: Callable[[Run], object]) -> None:
        """Call a function on the run of wandb. If the call fails, the training run continues without wandb."""
        if self._run is None:
            return
        try:
            call(self._run)
        except Exception as error:
            logger.error(
                "wandb failed (%s: %s), so the run continues without wandb; metrics.jsonl has all metrics, and "
                "the next start of the run continues in wandb",
                *(type(error).__name__, error),
            )
            self._run = None
            with suppress(Exception):  # fails if wandb's process is gone
                self._forget()

    def _forget(self) -> None:
        import wandb

        wandb.teardown()


class TensorboardWriter:
    """Writes TensorBoard event files: one tag per metric, with the step on the metric's own axis."""

    name = "tensorboard"

    def __init__(self, directory: Path) -> None:
        # torch.utils.tensorboard wraps this class; the direct use avoids the import of torch
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.where = str(directory)
        self._events = EventFileWriter(str(directory))

    def write(self, _kind: Kind, metrics: Mapping[str, float], /) -> None:
        """Write one event for each metric that has a step."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        for name, value in metrics.items():
            step = metrics.get(axis_of(name))
            if step is None or name == axis_of(name):
                continue
            summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
            self._events.add_event(Event(wall_time=time.time(), step=int(step), summary=summary))
        self._events.flush()

    def write_alarm(self, title: str, text: str, rollout_id: int, /) -> None:
        """Write the alarm as text. TensorBoard shows this text as ``alarms`` under Text."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.util.tensor_util import make_tensor_proto

        tensor = make_tensor_proto(f"**{title}**: {text}")
        value = Summary.Value(tag="alarms", metadata=create_summary_metadata("alarms", ""), tensor=tensor)
        self._events.add_event(Event(wall_time=time.time(), step=rollout_id, summary=Summary(value=[value])))
        self._events.flush()

    def close(self, _failed: bool, /) -> None:
        """Flush and close the event file."""
        self._events.close()


class PrometheusWriter:
    """Answers ``/metrics`` with the newest value of every metric, from a thread of this process.

    A metric is a gauge under a name that Prometheus allows. The label ``metric`` has the metric's usual name, and the
    label ``run_name`` has the name of the run. The metric ``slimelite_run_info`` exists from the start.

    Raises:
        ValueError: the port is taken, or the host is not an address of this machine.
    """

    name = "prometheus"

    def __init__(self, args: TrackingArgs) -> None:
        # imported here, because the pre-flight uses this file and must load no library
        from prometheus_client import start_http_server

        from slimelite.base.prometheus import Collected

        self._run_name = prometheus_run_name(args)
        self._run_dir = args.run_dir
        self._values: dict[str, float] = {}
        self._updated = time.time()
        host = args.prometheus_host
        try:
            registry = Collected(self._collect).registry
            self._server, self._thread = start_http_server(args.prometheus_port, host, registry)
        except OSError as error:
            raise ValueError(port_problem(args, error)) from error
        address = f"[{host}]" if ":" in host else host
        self.where = f"http://{address}:{self._server.server_port}/metrics"

    def write(self, _kind: Kind, metrics: Mapping[str, float], /) -> None:
        """Keep the values for the next scrape."""
        # a scrape in another thread sees either the old dict or the new dict
        self._values = {**self._values, **metrics}
        self._updated = time.time()

    def write_alarm(self, title: str, text: str, rollout_id: int, /) -> None:
        """Write nothing, because the metric ``alarms/active`` counts the alarms."""

    def close(self, _failed: bool, /) -> None:
        """Stop answering, and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _collect(self) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        from slimelite.base.prometheus import metric_name

        info = GaugeMetricFamily("slimelite_run_info", "this run", labels=("run_name", "run_dir", "version"))
        info.add_metric((self._run_name, self._run_dir, slimelite.__version__), 1)
        updated = GaugeMetricFamily(
            "slimelite_updated_seconds", "time of the newest metric, in seconds since 1970", labels=("run_name",)
        )
        updated.add_metric((self._run_name,), self._updated)
        families = [info, updated]
        named: dict[str, GaugeMetricFamily] = {}  # two metrics may get the same name
        for metric, value in self._values.items():
            name = metric_name(metric)
            if name not in named:
                named[name] = GaugeMetricFamily(name, f"{metric}: docs/metrics.md", labels=("run_name", "metric"))
            named[name].add_metric((self._run_name, metric), value)
        yield from families
        yield from named.values()


def prometheus_run_name(args: TrackingArgs) -> str:
    """``--prometheus-run-name``, else ``--wandb-group``, else the name of the run folder."""
    return args.prometheus_run_name or args.wandb_group or Path(args.run_dir).name


def port_problem(args: TrackingArgs, error: OSError) -> str:
    """The message with the reason why ``/metrics`` cannot be served, and the remedy."""
    place = f"{args.prometheus_host}:{args.prometheus_port}"
    if error.errno == errno.EADDRINUSE:
        return f"--prometheus-port: {place} is taken: name another port, or 0 for a free one"
    return f"--prometheus-host, --prometheus-port: cannot listen on {place}: {error.strerror or error}"


@contextmanager
def _command_line_masked() -> Iterator[None]:
    """Mask secrets in ``sys.argv``, because wandb always saves the command line with the run."""
    before = sys.argv
    sys.argv = [before[0], *masked_words(before[1:])]
    try:
        yield
    finally:
        sys.argv = before


def tensorboard_directory(args: TrackingArgs) -> Path:
    """``--tensorboard-dir``, else slime's ``$TENSORBOARD_DIR``, else the run folder, with the names of project and
    experiment appended."""
    base = args.tensorboard_dir or os.environ.get("TENSORBOARD_DIR") or str(Path(args.run_dir) / "tensorboard")
    return Path(base, *filter(None, (args.tb_project_name, args.tb_experiment_name)))


def _wandb_identity(args: TrackingArgs) -> dict[str, str]:
    """id, group and name of the wandb run. The three values are saved in the run folder, so that a resumed run can
    continue the wandb run."""
    path = Path(args.run_dir) / "wandb_run.json"
    known: dict[str, str] = json.loads(path.read_text()) if path.is_file() else {}
    if not known or args.wandb_run_id not in (None, known["id"]):
        group = args.wandb_group or Path(args.run_dir).name
        if args.wandb_group and args.wandb_random_suffix:
            group += "_" + secrets.token_hex(3)
        known = {"id": args.wandb_run_id or secrets.token_hex(4), "group": group, "name": args.wandb_run_name or group}
        write_text(path, json.dumps(known))
    return known
