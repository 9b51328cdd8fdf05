"""The class `Cluster`, the handle of a run. `Cluster` has a verb (method) for each operation of trainers and
engines."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar, cast

import numpy as np

from slimelite.arguments import Args
from slimelite.cluster.remote import (
    POLL_S,
    SILENCE,
    ClusterError,
    Names,
    Pending,
    Progress,
    Remote,
    RemoteSink,
    Turns,
    check_number,
    check_table,
    with_memory,
)
from slimelite.cluster.saving import Saving
from slimelite.cluster.workers import Target, TrainOutput
from slimelite.engines.protocol import MEMORY_TAGS, WeightSyncError
from slimelite.models.checkpoints import (
    REMEDY,
    ROLLOUT_SEED,
    ROLLOUT_STATE,
    find_checkpoint,
    folder_of,
    model_folder,
    read_json,
    writing,
)
from slimelite.rollout.manager import CANCEL_S, EvalOutput, RolloutManager, RolloutOutput, disagreement
from slimelite.samples.table import SampleTable

if TYPE_CHECKING:
    from torch import Tensor

    from slimelite.training.trainer import Trainer
else:
    Trainer = Names()  # importing the class imports torch, and this process does not need torch

P = ParamSpec("P")
R = TypeVar("R")
logger = logging.getLogger(__name__)
MOVED_ON = (
    "every engine died while a rollout was generated ahead of training, and the trainer's weights have changed "
    "since then: resume from the last checkpoint with --load"
)
# if a rank gets no answer from another rank in a collective, wait this time for Ray to report a dead rank [s]
VERDICT_S = 5.0
# file in a checkpoint with the table of a rollout that was generated ahead
AHEAD = "ahead.parquet"


class Cluster:
    """The handle of a run. Its verbs are methods such as `generate`, `train` and `save`. Each verb returns a future
    immediately. The results are the same as if each verb waited for the verb before it::

        with launch(parse_args()) as cluster:
            cluster.sync(0)
            rollout = cluster.generate(0).result()
            cluster.train(0, rollout.table)
            cluster.sync(1)

    Verbs that need the trainers run one after the other, on a thread of the handle. With ``--launcher local`` these
    verbs run in the caller's thread, so a debugger can follow them. `generate` and `evaluate` run in parallel to the
    trainers. `generate` and `evaluate` begin immediately, unless an earlier verb still uses the engines (`sync`,
    `save`, another `generate`). Later verbs that use the engines wait for `generate` and `evaluate`.

    If a verb fails, queued verbs fail with the same error. New verbs raise this error, and so does the end of the
    ``with`` block. After `Pending.result` has raised this error to the caller, new verbs can run. After
    `complete_args`, ``args`` has values for ``start_rollout_id`` and ``num_rollout``. All constructor arguments except
    ``args`` are the fields of `Workers`.
    """

    def __init__(
        self,
        args: Args,
        rollout: Remote[RolloutManager],
        trainers: Sequence[Remote[Trainer]],
        engines: Sequence[Target],
        others: Sequence[Remote[object]] = (),
    ) -> None:
        self.args = args
        self._rollout, self._trainers, self._engines, self._others = rollout, trainers, engines, others
        self._turns = Turns(inline=args.job.local, explained=partial(with_memory, args=args))
        # id -> rollout; `generate` may return these rollouts again, and a checkpoint may include them
        self._rollouts: dict[int, Pending[RolloutOutput]] = {}
        self._ahead: dict[int, RolloutOutput] = {}  # rollouts from the loaded checkpoint, until `generate` takes them
        self._last_use: Future[Any] | None = None  # the last verb that uses the engines
        self._version = 0  # the version of the engines' weights
        self._moved = False  # whether the trainers' weights are newer than the engines' weights
        self._released: set[str] = set()  # tags of the engines' memory that is released
        self._order = threading.RLock()  # ensures the same order of calls on every rank
        self._memory: dict[str, Future[float]] = {}
        self._saving: Saving | None = None  # the checkpoint that is being written
        self.last_saved: int | None = None  # the rollout after which this run saved its last checkpoint

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        whole = False
        try:
            if error is not None:
                self._turns.stop()
                if self._saving is not None:
                    self._saving.drop()
            else:
                self._turns.finish()
                self._finish_saving()
                whole = True
        finally:
            self._turns.close()
            # cancel a rollout that nobody waits for; this is not needed after an error, because then worker processes
            # are killed
            if self._last_use is not None and not self._last_use.done() and (whole or self._turns.inline):
                self._rollout.ask(RolloutManager.cancel)
                wait([self._last_use], CANCEL_S)

    def generate(self, rollout_id: int) -> Pending[RolloutOutput]:
        """Begin a rollout. The result has the table of scored samples and the metrics. If rollout ``rollout_id`` has
        already begun, and nobody has read its result yet, the method returns the future of this rollout.
        """
        check_number("generate", "rollout_id", rollout_id)
        begun = self._rollouts.get(rollout_id)
        if begun is not None and not begun.taken:
            return begun
        self._need_memory("generate")

        def work() -> RolloutOutput:
            if (loaded := self._ahead.pop(rollout_id, None)) is not None:
                return loaded
            with self._memory_of("rollout"):
                return self._rollout.ask(RolloutManager.generate, rollout_id)

        pending = self._begin(work)
        later = {other: rollout for other, rollout in self._rollouts.items() if other >= rollout_id - 1}
        self._rollouts = later | {rollout_id: pending}
        return pending

    def evaluate(self, rollout_id: int, names: Sequence[str] = ()) -> Pending[EvalOutput]:
        """Evaluate eval datasets with the engines' current weights. ``names``: evaluate only these datasets. If
        ``names`` is empty, evaluate all datasets."""
        if rollout_id != -1:  # -1 means before the first rollout
            check_number("evaluate", "rollout_id", rollout_id)
        self._need_memory("evaluate")
        if not self.args.job.engines:
            return self._begin(lambda: EvalOutput({}, {}))
        return self._begin(lambda: self._rollout.ask(RolloutManager.evaluate, rollout_id, names))

    def bits_per_byte(self) -> Pending[dict[str, float]]:
        """Compute ``eval/bpb``, the bits per byte of the texts of ``--eval-bpb`` with the trainers' weights. The bits
        for the end of each document count too, because a decoder needs them. Without ``--eval-bpb``, the dict is empty.
        """

        def work() -> dict[str, float]:
            nats, size = 0.0, 0
            while self.args.eval_bpb and (part := self._rollout.ask(RolloutManager.held_out)) is not None:
                log_probs = self._all(Trainer.log_probs, self._shared(part[0]), 1.0)[0]
                nats -= float(log_probs.sum(dtype=np.float64))
                size += part[1]
            return {"eval/bpb": nats / math.log(2) / size} if size else {}

        return self._take(work)

    def train(self, rollout_id: int, table: SampleTable) -> Pending[TrainOutput]:
        """Train on a whole rollout, with one optimizer step for every ``--global-batch-size`` samples (see
        `Trainer.train`)."""
        check_number("train", "rollout_id", rollout_id)
        check_table("train", table)

        def work() -> TrainOutput:
            if self._saving is not None and self._saving.failed:
                self._finish_saving()  # raises the error of the last save
            with self._memory_of("train"):
                metrics = self._change(Trainer.train, rollout_id, self._shared(table))
            return TrainOutput(metrics, *self._trainers[0].ask(Trainer.outcome))

        return self._take(work)

    def forward_backward(self, table: SampleTable) -> Pending[dict[str, float]]:
        """Add the gradient of ``table`` to the gradient of earlier calls. The whole table counts as one optimizer step.
        Returns the metrics."""
        check_table("forward_backward", table)
        return self._take(lambda: self._all(Trainer.forward_backward, self._shared(table))[0])

    def optim_step(self) -> Pending[dict[str, float]]:
        """Update the weights with the gradient. Returns the gradient norm and the learning rates."""
        return self._take(lambda: self._change(Trainer.optim_step))

    def sync(self, version: int) -> Pending[dict[str, float]]:
        """Send the trainers' weights to every engine as weight version ``version``. Returns the metrics of the
        transport."""
        check_number("sync", "version", version)

        def work() -> dict[str, float]:
            if not self._engines:
                return {}
            with self._memory_of("update_weights"):
                metrics = self._push(version)
            if self.args.check_weight_update_equal:
                metrics["perf/update_weights_logprob_abs_diff"] = self._check_engines(version)
            return metrics

        return self._take(work, engines=True)

    def save(self, rollout_id: int) -> Pending[Path]:
        """Save a checkpoint after rollout ``rollout_id`` in the folder ``--save``. `checkpoints.folder_of` gives the
        folder's name. The checkpoint has the state of the trainers and of the rollout side. The checkpoint also has the
        next rollout if this rollout has already been generated.
        """
        check_number("save", "rollout_id", rollout_id)
        # read this now, because a rollout that begins later must wait for this save
        begun = {
            later: r for later, r in self._rollouts.items() if later > rollout_id and not (r.taken and r.exception())
        }

        def work() -> Path:
            if self.args.save is None:
                raise ValueError("save: name a folder for checkpoints with --save")
            ahead = {later: Future.result(rollout) for later, rollout in begun.items()}
            ahead |= {later: rollout for later, rollout in self._ahead.items() if later > rollout_id}
            if len(ahead) > 1:
                raise ValueError(
                    f"save: rollouts {', '.join(map(str, ahead))} were generated ahead of training, but a checkpoint "
                    "can contain only one such rollout"
                )
            self._finish_saving()
            final, size = folder_of(self.args.save, rollout_id), max(self._all(Trainer.checkpoint_size))
            retain = self.args.save_retain_interval
            if self.args.async_save:
                self._saving = saving = Saving(final, size, retain, len(self._trainers))
                try:
                    self._write_state(saving.directory(), ahead)
                    self._all(Trainer.begin_save, str(saving.directory()), rollout_id)
                except BaseException:
                    self._saving = None
                    saving.drop()
                    raise
                saving.begin()
            else:
                with writing(final, size, retain) as (directory, checksums):
                    self._write_state(directory, ahead)
                    for part in self._all(Trainer.save, str(directory), rollout_id):
                        checksums.update(part)
            self.last_saved = rollout_id
            return final

        return self._take(work, engines=True)

    def finish_saving(self) -> Pending[None]:
        """Wait until the checkpoint of ``--async-save`` is completely written."""
        return self._take(self._finish_saving)

    def _finish_saving(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.finish()

    def _write_state(self, directory: Path, ahead: Mapping[int, RolloutOutput]) -> None:
        """Write the part of a checkpoint that belongs to the rollout side."""
        state = {**self._rollout.ask(RolloutManager.state_dict), ROLLOUT_SEED: self.args.rollout_seed}
        for number, output in ahead.items():
            output.table.to_parquet(directory / AHEAD)
            state["ahead"] = {"rollout_id": number, "metrics": output.metrics}
        (directory / ROLLOUT_STATE).write_text(json.dumps(state))

    def load(self, folder: str | Path, step: int | None = None) -> Pending[int]:
        """Load the newest checkpoint in ``folder``, or the checkpoint of rollout ``step``. Returns the id of the next
        rollout.

        The engines get the checkpoint's weights at the next `sync`.
        """
        if not self.args.finetune:
            self._rollouts = {}

        def work() -> int:
            checkpoint, why = find_checkpoint(folder, step)
            if checkpoint is None:
                raise ValueError(f"load: {folder}: {why}")
            return self._load(checkpoint)

        return self._take(work, engines=True)

    def save_hf(self, rollout_id: int | Literal["best"]) -> Pending[Path]:
        """Save the model as a Hugging Face folder in ``--save-hf``. `checkpoints.model_folder` gives the folder's
        name."""
        if rollout_id != "best":
            check_number("save_hf", "rollout_id", rollout_id)

        def work() -> Path:
            if self.args.save_hf is None:
                raise ValueError("save_hf: name a folder for the model with --save-hf")
            directory = model_folder(self.args.save_hf, rollout_id)
            self._all(Trainer.save_hf, str(directory))
            return directory

        return self._take(work)

    def get_weights(self) -> Pending[dict[str, Tensor]]:
        """Return all weights of the trainers as CPU tensors, by their Hugging Face names."""
        return self._take(lambda: self._all(Trainer.get_weights)[0])

    def offload_trainers(self) -> Pending[None]:
        """Move the trainers' state off their devices."""
        return self._move(Trainer.offload, "sleep")

    def onload_trainers(self) -> Pending[None]:
        """Move the trainers' state back to their devices."""
        return self._move(Trainer.onload, "wake_up")

    def release_engines(self) -> Pending[None]:
        """Let the engines release as much device memory as possible. The engines can generate again after
        `resume_engines` has resumed every tag."""
        pending = self._take(lambda: self._rollout.ask(RolloutManager.release_memory), engines=True)
        self._released = set(MEMORY_TAGS)
        return pending

    def resume_engines(self, *tags: str) -> Pending[None]:
        """Let the engines allocate the memory of ``tags`` again (see `slimelite.engines.protocol.MEMORY_TAGS`)."""
        pending = self._take(lambda: self._rollout.ask(RolloutManager.resume_memory, tags), engines=True)
        self._released -= set(tags)
        return pending

    def resources(self) -> Pending[dict[str, float]]:
        """Return the CPU time and the memory that the run has used, as metrics:

        ``perf/cpu_seconds``: CPU time of this process and of all workers since their start, without Ray's daemons [s].
        ``perf/memory_{phase}_{before,after}``: device memory of rank 0 when a phase last began and ended [GB].
        """

        def work() -> dict[str, float]:
            workers: list[Remote[object]] = [self._rollout, *self._trainers]
            used = [worker.cpu_seconds() for worker in workers]
            others = [worker.cpu_seconds() for worker in self._others]  # an engine may be dead and restart later
            memory = {name: future.result() for name, future in list(self._memory.items())}
            seconds = sum(future.result() for future in used)
            seconds += sum(future.result() for future in others if future.exception() is None)
            return {"perf/cpu_seconds": time.process_time() + seconds, **memory}

        return self._take(work)

    def complete_args(self) -> None:
        """Load the checkpoint of ``--load``, and set the first rollout id and the number of rollouts in ``args``."""
        args = self.args
        resumed = self._load(Path(args.resume_directory)) if args.resume_directory else 0
        start = resumed if args.start_rollout_id is None else args.start_rollout_id
        num_rollout = args.num_rollout
        if num_rollout is None:
            per_epoch = max(1, self._rollout.ask(RolloutManager.num_prompts) // args.rollout_batch_size)
            num_rollout = per_epoch * (args.num_epoch or 1)
        self.args = replace(args, start_rollout_id=start, num_rollout=num_rollout)
        if self._trainers:
            self._all(Trainer.set_num_rollout, num_rollout)
        self._rollout.ask(RolloutManager.complete_args, start, num_rollout)

    def _need_memory(self, verb: str) -> None:
        if self._released:
            tags = ", ".join(repr(tag) for tag in MEMORY_TAGS if tag in self._released)
            raise ValueError(
                f"{verb}: release_engines has released the engines' memory; call resume_engines({tags}) first"
            )

    def _begin(self, work: Callable[[], R]) -> Pending[R]:
        """Start a verb on its own thread. The verb waits until no earlier verb uses the engines."""
        self._turns.check()
        pending: Pending[R] = Pending(self._turns, self._attend)
        before, self._last_use = self._last_use, pending

        def wait_and_work() -> R:
            if before is not None:
                wait([before])
                self._turns.check(pending)
            return work()

        threading.Thread(target=self._turns.run, args=(pending, wait_and_work), daemon=True).start()
        return pending

    def _take(self, work: Callable[[], R], *, engines: bool = False) -> Pending[R]:
        """Run a verb after all earlier verbs of this thread. A verb that uses the ``engines`` also waits for earlier
        verbs on other threads."""
        self._turns.check()
        pending: Pending[R] = Pending(self._turns)
        if not engines:
            return self._turns.take(pending, work)
        before, self._last_use = self._last_use, pending

        def wait_and_work() -> R:
            while before is not None and not before.done():
                self._keep_weights()
                wait([before], POLL_S)
            self._turns.check(pending)
            return work()

        return self._turns.take(pending, wait_and_work)

    def _move(self, method: Callable[[Trainer], dict[str, float]], phase: str) -> Pending[None]:
        def work() -> None:
            with self._memory_of(phase):
                self._all(method)

        return self._take(work)

    def _attend(self, progress: Progress | None) -> None:
        if progress is not None:
            progress(*self._rollout.ask(RolloutManager.progress))
        self._keep_weights()

    def _keep_weights(self) -> None:
        """Send the current weights again if every engine died and was restarted. Generation waits for these weights."""
        if not self.args.job.revives:
            return
        with self._order:
            if not self._rollout.ask(RolloutManager.needs_weights):
                return
            if self._moved:
                raise ClusterError(MOVED_ON)
            logger.warning("every engine was restarted, so weight version %d is sent again", self._version)
            self._push(self._version)

    def _push(self, version: int) -> dict[str, float]:
        """Send the weights to every engine. If an engine died and can be restarted, send them once more."""
        self._version, self._moved = version, False
        engines = cast("Sequence[Any]", self._engines)
        sink = engines if self.args.job.servers else RemoteSink(engines)
        retries = int(self.args.job.revives)
        while True:
            if self.args.job.servers or retries < self.args.job.revives:
                self._rollout.ask(RolloutManager.settle_engines)
            try:
                return self._all(Trainer.push_weights, sink, version)[0]
            except WeightSyncError as error:
                if not retries:
                    raise ClusterError(str(error)) from error
                retries -= 1
                logger.warning("%s; waiting until every engine is alive, then sending the weights again", error)

    def _check_engines(self, version: int) -> float:
        from slimelite.training.loss import engine_threshold  # imports torch

        table = self._rollout.ask(RolloutManager.probe)
        gaps = disagreement(table, self._all(Trainer.log_probs, self._trainers[0].share(table))[0], version)
        limit = engine_threshold(self.args, exact=not self.args.job.gpus)
        if not (gaps <= limit).all():
            raise ClusterError(
                f"--check-weight-update-equal: after sync {version}, the log-probs of some engine differ too much from "
                f"the trainer's. Mean difference of each engine: {', '.join(f'{gap:.2e}' for gap in gaps)} (inf: the "
                f"engine still has another version). If it is above {limit}, the engine does not have the trainer's "
                "weights"
            )
        return float(gaps.max())

    def _load(self, directory: Path) -> int:
        if not self.args.job.trains:
            raise ValueError(
                "--load with --debug-rollout-only: this run has no trainer, and only a trainer can read a checkpoint; "
                "in a run with a trainer, write the model with --save-hf, and give its folder as --hf-checkpoint"
            )
        saved = self._all(Trainer.load, str(directory))[0]
        if self.args.finetune:
            return 0
        try:
            state = read_json(directory / ROLLOUT_STATE)
            self._rollout.ask(RolloutManager.load_state_dict, state)
            self._ahead = {}
            if "ahead" in state:
                output = RolloutOutput(_read_ahead(directory / AHEAD), state["ahead"]["metrics"])
                self._ahead[int(state["ahead"]["rollout_id"])] = output
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{directory / ROLLOUT_STATE}: is damaged ({type(error).__name__}: {error}); {REMEDY}"
            ) from error
        return saved + 1

    def _change(self, method: Callable[Concatenate[Trainer, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call ``method`` on every rank and return rank 0's result. After this, the engines' weights are out of
        date."""
        with self._order:
            self._moved = True
        return self._all(method, *args, **kwargs)[0]

    def _all(self, method: Callable[Concatenate[Trainer, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        if not self._trainers:
            raise ValueError(f"{method.__name__}: there is no trainer; leave out --debug-rollout-only")
        with self._order:
            futures = [trainer.submit(method, *args, **kwargs) for trainer in self._trainers]
        # if one rank fails, the other ranks hang in a collective, so raise the error without waiting for them
        finished, left = wait(futures, return_when=FIRST_EXCEPTION)
        errors = [error for future in finished if (error := future.exception()) is not None]
        if errors and left and SILENCE.search(str(errors[0])):  # the other rank may be dead
            later = wait(left, VERDICT_S, return_when=FIRST_EXCEPTION).done
            errors = [*(error for future in later if isinstance(error := future.exception(), ClusterError)), *errors]
        if errors:
            raise errors[0]
        return [future.result() for future in futures]

    def _shared(self, table: SampleTable) -> SampleTable:
        return self._trainers[0].share(table.without_text()) if self._trainers else table

    @contextmanager
    def _memory_of(self, phase: str) -> Iterator[None]:
        self._note_memory(f"{phase}_before")
        yield
        self._note_memory(f"{phase}_after")

    def _note_memory(self, moment: str) -> None:
        if self._trainers:
            self._memory[f"perf/memory_{moment}"] = self._trainers[0].submit(Trainer.memory_used)


def _read_ahead(file: Path) -> SampleTable:
    try:
        return SampleTable.from_parquet(file)
    except (ValueError, LookupError, OSError) as error:
        raise ValueError(f"{file}: is missing, damaged or cut short ({error}); {REMEDY}") from error
