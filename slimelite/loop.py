"""The steps of train.py's loop that call several methods of `Cluster`, and the decisions after an evaluation."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from slimelite.arguments import Args, CheckpointArgs, EvalArgs
from slimelite.arguments.evaluation import seeks_best
from slimelite.base.files import write_text
from slimelite.models.checkpoints import (
    BEST_MARKER,
    EVALUATIONS,
    best_of,
    folder_of,
    mark_best,
    model_folder,
    read_json,
)
from slimelite.models.hub import push
from slimelite.tracking.console import unit_of, when

if TYPE_CHECKING:
    from slimelite.cluster import Cluster
    from slimelite.tracking.tracker import Tracker


def due(interval: int | None, rollout_id: int, num_rollout: int, *, last: bool = False) -> bool:
    """Whether something is due after rollout ``rollout_id``. It is due every ``interval`` rollouts, and after the last
    rollout. ``last``: it is due after the last rollout even without an interval."""
    if rollout_id + 1 == num_rollout:
        return interval is not None or last
    return interval is not None and (rollout_id + 1) % interval == 0


class Saves:
    """Decides after which rollouts a checkpoint is due, by ``--save-interval`` and ``--save-interval-minutes``. A
    checkpoint is always due after the last rollout."""

    def __init__(self, args: CheckpointArgs, num_rollout: int) -> None:
        self._args, self._num_rollout = args, num_rollout
        self._last = time.monotonic()

    def due(self, rollout_id: int) -> bool:
        """Whether a checkpoint is due now. If it is, the minutes start again from 0."""
        interval, minutes = self._args.save_interval, self._args.save_interval_minutes
        now = due(interval, rollout_id, self._num_rollout, last=minutes is not None)
        now |= minutes is not None and time.monotonic() - self._last >= 60 * minutes
        if now:
            self._last = time.monotonic()
        return now


class Evaluations:
    """The value of ``--early-stop-metric`` after each evaluation, by rollout (-1: before training).

    ``evaluations.json`` in the folder of ``--save`` has these values. A resumed run reads the values up to its
    checkpoint. So the best evaluation and the patience are the same as without the interruption. Without
    ``--early-stop-patience`` and ``--save-best``, no values are kept.
    """

    def __init__(self, args: EvalArgs) -> None:
        self._args = args
        self._watched = seeks_best(args)
        self._values = {each: value for each, value in read_evaluations(args).items() if each < args.start_rollout_id}
        if args.save_best and args.save is not None and best_of(args.save) not in self._values:
            # the marker belongs to another run in this folder, or to a rollout that this run will repeat
            Path(args.save, BEST_MARKER).unlink(missing_ok=True)

    def due_at_start(self) -> bool:
        """Whether the run begins with an evaluation. A new run may evaluate before training. A resumed run evaluates
        its checkpoint if the earlier run ended before this evaluation."""
        args, done = self._args, self._args.start_rollout_id - 1
        if done < 0:
            return args.eval_interval is not None and not args.skip_eval_before_train
        return self._watched and done not in self._values and due(args.eval_interval, done, args.num_rollout)

    def note(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """Keep the value of an evaluation.

        Raises:
            ValueError: the evaluation did not measure ``--early-stop-metric``.
        """
        if not self._watched:
            return
        name = str(self._args.early_stop_metric)
        if name not in metrics:
            there = ", ".join(sorted(each for each in metrics if each.startswith("eval/")))
            raise ValueError(f"--early-stop-metric {name}: the evaluation did not measure it; choose one of: {there}")
        self._values[rollout_id] = float(metrics[name])

    def write(self) -> None:
        """Write the values to the folder of ``--save``. After an evaluation, checkpoints and models may be saved, such
        as the best ones. Call this method only after they are saved."""
        if self._watched and self._args.save is not None:
            rows = [{"rollout_id": rollout_id, "value": value} for rollout_id, value in sorted(self._values.items())]
            content = {"metric": self._args.early_stop_metric, "evaluations": rows}
            write_text(Path(self._args.save) / EVALUATIONS, json.dumps(content, indent=1))

    @property
    def best(self) -> int | None:
        """The rollout of the best evaluation, or of the first one if several are equal. None without evaluations."""
        sign = 1 if self._args.early_stop_mode == "max" else -1
        numbers = [rollout_id for rollout_id, value in sorted(self._values.items()) if value == value]
        return max(numbers, key=lambda rollout_id: sign * self._values[rollout_id], default=None)

    @property
    def stop(self) -> str | None:
        """The reason why the run ends early; None if the run continues."""
        best, patience = -1 if self.best is None else self.best, self._args.early_stop_patience
        since = sum(rollout_id > best for rollout_id in self._values)
        if patience is None or since < patience:
            return None
        return f"{'1 evaluation was' if since == 1 else f'{since} evaluations were'} no better than {self._best_text()}"

    def improved(self, rollout_id: int) -> bool:
        """Whether ``--save-best`` keeps the weights after ``rollout_id``. It does if their evaluation is the best so
        far."""
        return self._args.save_best and rollout_id == self.best and rollout_id >= 0

    def mark(self, rollout_id: int) -> None:
        """Note that the checkpoint of ``rollout_id`` is the best; see `mark_best`."""
        args = self._args
        if args.save is not None:
            mark_best(folder_of(args.save, rollout_id), args.save_interval, args.save_retain_interval)

    @property
    def ended_after(self) -> int:
        """The last rollout of the run."""
        return max(self._values) if self.stop else self._args.num_rollout - 1

    def facts(self) -> dict[str, str]:
        """The console's line about the best evaluation at the end of the run; empty without ``--save-best``."""
        if not self._args.save_best or self.best is None:
            return {}
        if self.best < 0:
            return {"best": f"{self._best_text()}; no model was kept, because no later evaluation was better"}
        save, template = self._args.save, self._args.save_hf
        places = [folder_of(save, self.best)] if save and best_of(save) == self.best else []
        places += [model_folder(template, "best")] if template else []
        kept = ", ".join(str(place) for place in places if place.is_dir())
        # the best evaluation may come from an earlier run with another --save, or without --save-best
        where = f": {kept}" if kept else "; this was before the resume, and the model was not kept"
        return {"best": f"{self._best_text()}{where}"}

    def _best_text(self) -> str:
        if self.best is None:
            return f"nothing: {self._args.early_stop_metric} was never a number"
        at = when(self.best, unit_of(self._args.job))
        return f"{self._args.early_stop_metric} {self._values[self.best]:.3f} {at}"


def read_evaluations(args: EvalArgs) -> dict[int, float]:
    """The values in the folder of the checkpoint that the run resumes from. The dict is empty if the run does not need
    them, or if they belong to another metric.

    Raises:
        ValueError: the file is damaged.
    """
    if not seeks_best(args) or args.resume_directory is None or args.finetune:
        return {}
    file = Path(args.resume_directory).parent / EVALUATIONS
    if not file.is_file():
        return {}
    try:
        content = read_json(file)
        values = {int(each["rollout_id"]): float(each["value"]) for each in content["evaluations"]}
        return values if content["metric"] == args.early_stop_metric else {}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{file}: is damaged ({type(error).__name__}: {error}): remove the file; the run then chooses the best "
            "of the later evaluations"
        ) from error


def sync(cluster: Cluster, tracker: Tracker, version: int) -> None:
    """Send the trainers' weights to the engines. If trainers and engines take turns on the GPUs, the trainers release
    their memory before the engines allocate weights. The engines allocate the KV cache last, after the buckets of
    weights are freed (slime's order). A run without trainers or without engines sends nothing."""
    args = cluster.args
    if not args.job.syncs:
        return
    if args.offload_train:
        cluster.offload_trainers().result()
    if args.offload_rollout:
        cluster.resume_engines("weights").result()
    with tracker.phase("update_weights"):
        tracker.log_perf(cluster.sync(version).result())
    if args.offload_rollout:
        cluster.resume_engines("kv_cache", "cuda_graph").result()


def evaluate(cluster: Cluster, tracker: Tracker, evaluations: Evaluations, rollout_id: int) -> None:
    """Evaluate all eval datasets, and save weights if needed. ``rollout_id`` -1 means before training.

    With ``--save-best``, the weights are saved if they are the best so far. If the run ends early, this also saves
    everything that is due after the last rollout.
    """
    args = cluster.args
    with tracker.phase("eval") as phase:
        result = cluster.evaluate(rollout_id).result(progress=phase.update)
        metrics = {**result.metrics, **cluster.bits_per_byte().result()}
    tracker.log_eval(rollout_id, metrics, result.tables)
    evaluations.note(rollout_id, metrics)
    best, last = evaluations.improved(rollout_id), evaluations.stop is not None
    # the loop may have saved this rollout already; before an evaluation at the start of a resumed run, it has not
    checkpoint = args.save is not None and cluster.last_saved != rollout_id and (best or last)
    models: list[int | Literal["best"]] = []
    if args.save_hf is not None:
        models += ["best"] * best
        models += [rollout_id] * (last and not due(args.save_interval, rollout_id, args.num_rollout, last=True))
    if checkpoint or models:
        if args.offload_rollout:
            cluster.release_engines().result()
        if args.offload_train:
            cluster.onload_trainers().result()
        with tracker.phase("save_model"):
            if checkpoint:
                cluster.save(rollout_id).result()
            for name in models:
                cluster.save_hf(name).result()
        if args.offload_rollout or args.offload_train:
            sync(cluster, tracker, version=rollout_id + 1)
    if args.save_hf is not None and rollout_id >= 0:
        from slimelite.tracking.card import add_scores  # --help does not need its imports

        if args.job.trains and due(args.save_interval, rollout_id, args.num_rollout, last=True):
            models.append(rollout_id)  # the loop has saved this model
        for name in models:
            add_scores(model_folder(args.save_hf, name), args, rollout_id)
    if best:
        cluster.finish_saving().result()
        evaluations.mark(rollout_id)
    evaluations.write()


def publish(args: Args, tracker: Tracker, evaluations: Evaluations) -> None:
    """Upload the model for ``--push-to-hub``. If the upload fails, the run only reports this at its end. The run has
    not failed, because its model is on disk."""
    if args.push_to_hub is None or args.save_hf is None:
        return
    last = evaluations.ended_after
    folder, best = model_folder(args.save_hf, last), model_folder(args.save_hf, "best")
    message = f"{Path(args.run_dir).name}, after rollout {last}"
    if args.save_best and best.is_dir():
        folder, message = best, f"{Path(args.run_dir).name}, its best evaluation"
    with tracker.phase("push"):
        try:
            address = push(folder, args.push_to_hub, private=args.hub_private, message=message)
        except ValueError as error:
            address = f"NOT uploaded, because {error}; slimelite push {folder} {args.push_to_hub} uploads it"
    tracker.log_facts({"hub": address})
