"""The verbs of the loop (generate, train, sync, save, evaluate) over workers that may be anywhere."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from slimelite.arguments import Args
from slimelite.checkpoints import CHECKSUMS, MARKER, REMEDY, ROLLOUT_STATE, Checksums, checksums, read_json
from slimelite.cluster.remote import ClusterError, Progress, Remote
from slimelite.cluster.workers import RolloutWorker, TrainerWorker, disagreement
from slimelite.engines.registry import ENGINES
from slimelite.files import free_space, in_units, whole
from slimelite.rollout.manager import EvalOutput, RolloutOutput
from slimelite.table import SampleTable

P = ParamSpec("P")
R = TypeVar("R")
logger = logging.getLogger(__name__)
MOVED_ON = (
    "every engine died while a rollout was generated ahead of training, whose weights have moved on: go on from the "
    "last checkpoint with --load"
)
# in a checkpoint: the table of the rollout that was generated ahead
AHEAD = "ahead.parquet"


class Cluster:
    """The loop's verbs. Every method blocks until all workers concerned are done.

    ``rollout``, ``trainers``, ``engines``, ``others``: see `Workers`.
    """

    def __init__(
        self,
        args: Args,
        rollout: Remote[RolloutWorker],
        trainers: Sequence[Remote[TrainerWorker]],
        engines: Sequence[Any],
        others: Sequence[Remote[Any]] = (),
    ) -> None:
        self.args = args
        self._rollout = rollout
        self._trainers = list(trainers)
        self._engines = engines
        self._others = list(others)
        # rollouts that are generated ahead of their turn
        self._ahead: dict[int, Future[RolloutOutput]] = {}
        self._version = 0  # of the engines' weights
        self._moved = False  # whether the trainers' weights are newer
        self._memory: dict[str, float] = {}

    def complete_args(self) -> Args:
        """Fill in what only start-up can know: the first rollout id and the number of rollouts. Loads ``--load``."""
        args = self.args
        resumed = self._load() if args.resume_directory else 0
        start = resumed if args.start_rollout_id is None else args.start_rollout_id
        num_rollout = args.num_rollout
        if num_rollout is None:
            per_epoch = max(1, self._rollout.ask(RolloutWorker.num_prompts) // args.rollout_batch_size)
            num_rollout = per_epoch * (args.num_epoch or 1)
        self.args = replace(args, start_rollout_id=start, num_rollout=num_rollout)
        self._all(TrainerWorker.set_num_rollout, num_rollout)
        self._rollout.ask(RolloutWorker.complete_args, start, num_rollout)
        return self.args

    def generate(self, rollout_id: int, progress: Progress | None = None) -> RolloutOutput:
        """One rollout: the scored table of samples and its metrics."""
        self.start_generate(rollout_id)
        with self._memory_of("rollout"):
            return self._wait(self._ahead.pop(rollout_id), progress)

    def start_generate(self, rollout_id: int) -> None:
        """Begin `generate`, unless it has begun; the weights stay what they are until it is done."""
        if rollout_id not in self._ahead:
            self._ahead[rollout_id] = self._rollout.submit(RolloutWorker.generate, rollout_id)

    def evaluate(self, rollout_id: int, progress: Progress | None = None) -> EvalOutput:
        """All eval datasets under the engines' current weights."""
        self._finish_ahead()
        return self._wait(self._rollout.submit(RolloutWorker.evaluate, rollout_id), progress)

    def train(
        self, rollout_id: int, table: SampleTable
    ) -> tuple[dict[str, float], list[dict[str, float]], np.ndarray | None]:
        """Train on one rollout.

        Returns:
            metrics of the rollout, reduced over ranks; ``train/*`` of each optimizer step; the advantages of tokens,
            see `Trainer.own_advantages`.
        """
        self._moved = True
        with self._memory_of("train"):
            metrics = self._all(TrainerWorker.train, rollout_id, self._trainers[0].share(table.without_text()))[0]
        first = self._trainers[0]
        return metrics, first.ask(TrainerWorker.step_metrics), first.ask(TrainerWorker.own_advantages)

    def sync(self, version: int) -> dict[str, float]:
        """Trainers' weights into every engine, stamped ``version``; a rollout generated ahead ends first."""
        if not self._engines:
            return {}
        self._finish_ahead()
        with self._memory_of("update_weights"):
            metrics = self._push(version)
        if self.args.check_weight_update_equal:
            metrics["perf/update_weights_logprob_abs_diff"] = self._check_engines(version)
        return metrics

    def _push(self, version: int) -> dict[str, float]:
        """Weights into every engine; once more when one died of it and has started anew."""
        self._version, self._moved = version, False
        if not ENGINES[self.args.rollout_backend].server:
            return self._all(TrainerWorker.push_to, self._engines, version)[0]
        from slimelite.engines.protocol import WeightSyncError

        retries = int(self.args.use_fault_tolerance)
        while True:
            self._rollout.ask(RolloutWorker.settle_engines)
            try:
                return self._all(TrainerWorker.push_to, self._engines, version)[0]
            except WeightSyncError as error:
                if not retries:
                    raise ClusterError(str(error)) from error
                retries -= 1
                logger.warning("%s; once more, with every engine alive", error)

    def save(self, rollout_id: int) -> Path:
        """Checkpoint of trainers and rollout state, with what was generated ahead; the marker file is written last.

        It gets its name when it is whole: one of an earlier run under that name is good until then.

        Returns:
            the checkpoint's folder.

        Raises:
            OSError: it cannot be written; nothing of it is left, and the message has what it needs and what is free.
        """
        root = Path(str(self.args.save)).absolute()
        final = root / f"iter_{rollout_id:07d}"
        directory, replaced = (final.with_name(final.name + end) for end in (".partial", ".replaced"))
        # a save that was cut short leaves the first, and just before its end also the second
        if replaced.is_dir() and not final.is_dir():
            replaced.rename(final)
        for left in (*root.glob("iter_*.partial"), replaced):
            if left.is_dir():
                shutil.rmtree(left)
        self._finish_ahead()
        size = max(self._all(TrainerWorker.checkpoint_size), default=0)
        try:
            self._write_checkpoint(directory, rollout_id)
        except BaseException as error:  # also when the run is ended meanwhile
            # it would fill the disk for whoever comes next
            shutil.rmtree(directory, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            raise OSError(
                f"{final}: the checkpoint cannot be written ({error.strerror or error}); it takes about "
                f"{in_units(size)}, and {free_space(root)} are free there, now that what was written of it is removed: "
                "make room or give --save another place, and go on from the last checkpoint with --load"
            ) from error
        if final.is_dir():
            final.rename(replaced)
        directory.rename(final)
        before = (root / MARKER).read_text().strip() if (root / MARKER).is_file() else ""
        write_text(root / MARKER, str(rollout_id))
        keep = self.args.save_retain_interval
        if keep is not None and before.isdigit() and int(before) < rollout_id and (int(before) + 1) % keep:
            shutil.rmtree(root / f"iter_{int(before):07d}", ignore_errors=True)
        if replaced.is_dir():
            shutil.rmtree(replaced)
        return final

    def _write_checkpoint(self, directory: Path, rollout_id: int) -> None:
        """All files of a checkpoint, the checksums of the others last."""
        directory.mkdir(parents=True)
        state = self._rollout.ask(RolloutWorker.state_dict)
        for ahead, future in self._ahead.items():
            future.result().table.to_parquet(directory / AHEAD)
            state["ahead"] = {"rollout_id": ahead, "metrics": future.result().metrics}
        written: Checksums = {}
        for part in self._all(TrainerWorker.save, str(directory), rollout_id):
            written |= part
        write_text(directory / ROLLOUT_STATE, json.dumps(state))
        rest = (path for path in directory.rglob("*") if path.is_file())
        written |= checksums(directory, (path for path in rest if str(path.relative_to(directory)) not in written))
        write_text(directory / CHECKSUMS, json.dumps({"files": written}, indent=1))

    def save_hf(self, rollout_id: int) -> Path:
        """A Hugging Face folder at the ``--save-hf`` template."""
        directory = Path(str(self.args.save_hf).format(rollout_id=rollout_id)).absolute()
        self._all(TrainerWorker.save_hf, str(directory))
        return directory

    def resources(self) -> dict[str, float]:
        """What the run has used.

        Returns:
            ``perf/cpu_seconds``: CPU time of this process and of all workers since they began [s]; Ray's own daemons
            are not in it. ``perf/memory_{phase}_{before,after}``: of rank 0 around the last of each phase [GB].
        """
        workers: list[Remote[Any]] = [self._rollout, *self._trainers, *self._others]
        seconds = time.process_time() + sum(future.result() for future in [each.cpu_seconds() for each in workers])
        return {"perf/cpu_seconds": seconds, **self._memory}

    def offload_trainers(self) -> None:
        """Trainers give their device memory back."""
        with self._memory_of("sleep"):
            self._all(TrainerWorker.offload)

    def onload_trainers(self) -> None:
        """Trainers take their device memory again."""
        with self._memory_of("wake_up"):
            self._all(TrainerWorker.onload)

    def release_engines(self) -> None:
        """Engines give back all the device memory that they can."""
        self._rollout.ask(RolloutWorker.release_memory)

    def resume_engines(self, *tags: str) -> None:
        """Engines take the memory of ``tags`` again; see `slimelite.engines.protocol.MEMORY_TAGS`."""
        self._rollout.ask(RolloutWorker.resume_memory, tags)

    @contextmanager
    def _memory_of(self, phase: str) -> Iterator[None]:
        self._note_memory(f"{phase}_before")
        yield
        self._note_memory(f"{phase}_after")

    def _note_memory(self, moment: str) -> None:
        if self._trainers:
            self._memory[f"perf/memory_{moment}"] = self._trainers[0].ask(TrainerWorker.memory_used)

    def _check_engines(self, version: int) -> float:
        from slimelite.training.loss import engine_threshold

        table = self._rollout.ask(RolloutWorker.probe)
        gaps = disagreement(table, self._all(TrainerWorker.log_probs, self._trainers[0].share(table))[0], version)
        limit = engine_threshold(self.args, exact=self.args.device == "cpu")
        if not (gaps <= limit).all():
            raise ClusterError(
                f"--check-weight-update-equal: after sync {version} the log-probs of engines and trainer differ by "
                f"{', '.join(f'{gap:.2e}' for gap in gaps)} (mean, each engine; inf: the engine still has another "
                f"version), more than {limit}: an engine does not have the trainer's weights"
            )
        return float(gaps.max())

    def _load(self) -> int:
        directory = Path(str(self.args.resume_directory))
        if self.args.debug_rollout_only:
            raise ValueError(
                "--load with --debug-rollout-only: without a trainer nobody reads the checkpoint; write the model with "
                "--save-hf and give that folder as --hf-checkpoint"
            )
        saved = self._all(TrainerWorker.load, str(directory))[0]
        if self.args.finetune:
            return 0
        try:
            state = read_json(directory / ROLLOUT_STATE)
            self._rollout.ask(RolloutWorker.load_state_dict, state)
            if "ahead" in state:
                done: Future[RolloutOutput] = Future()
                done.set_result(RolloutOutput(_read_ahead(directory / AHEAD), state["ahead"]["metrics"]))
                self._ahead[int(state["ahead"]["rollout_id"])] = done
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{directory / ROLLOUT_STATE}: is damaged ({type(error).__name__}: {error}); {REMEDY}"
            ) from error
        return saved + 1

    def _finish_ahead(self) -> None:
        """Wait for rollouts that are being generated: weights do not change under them, evals do not mix with them."""
        for future in self._ahead.values():
            while self.args.use_fault_tolerance and not future.done():
                wait([future], timeout=0.5)
                if not future.done() and self._rollout.ask(RolloutWorker.needs_weights):
                    raise ClusterError(MOVED_ON)
            future.result()

    def _all(self, method: Callable[Concatenate[TrainerWorker, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        futures = [trainer.submit(method, *args, **kwargs) for trainer in self._trainers]
        # one that fails leaves the others waiting in a collective: its error is the one to show
        finished, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in finished:
            future.result()
        return [future.result() for future in futures]

    def _wait(self, future: Future[R], progress: Progress | None) -> R:
        while progress is not None and not future.done():
            try:
                return future.result(timeout=0.5)
            except FutureTimeout:
                progress(*self._rollout.submit(RolloutWorker.progress).result())
                self._send_weights_if_lost()
        return future.result()

    def _send_weights_if_lost(self) -> None:
        """When every engine died and was started anew, generation waits for the weights that it began with."""
        if not (self.args.use_fault_tolerance and self._rollout.ask(RolloutWorker.needs_weights)):
            return
        if self._moved:
            raise ClusterError(MOVED_ON)
        if self.args.offload_train:
            raise ClusterError(
                "every engine died, and the trainers, who have the weights, are offloaded: go on from the last "
                "checkpoint with --load"
            )
        logger.warning("every engine was started anew: sending weights %d again", self._version)
        self._push(self._version)


def _read_ahead(file: Path) -> SampleTable:
    try:
        return SampleTable.from_parquet(file)
    except (ValueError, LookupError, OSError) as error:
        raise ValueError(f"{file}: is missing, damaged or cut short ({error}); {REMEDY}") from error


def write_text(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old text or the new, never half."""
    with whole(path) as partial:
        partial.write_text(text)
