"""The handle of a run: its verbs, over objects that may be anywhere."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
from torch import Tensor

from slimelite.arguments import Args
from slimelite.checkpoints import REMEDY, ROLLOUT_STATE, find_checkpoint, folder_of, read_json, writing
from slimelite.cluster.remote import POLL_S, ClusterError, Pending, Progress, Remote, Turns
from slimelite.cluster.workers import RolloutWorker, TrainerWorker, disagreement
from slimelite.engines.protocol import WeightSyncError
from slimelite.engines.registry import ENGINES
from slimelite.rollout.manager import CANCEL_S, EvalOutput, RolloutOutput
from slimelite.table import SampleTable
from slimelite.training.loss import engine_threshold

P = ParamSpec("P")
R = TypeVar("R")
logger = logging.getLogger(__name__)
MOVED_ON = (
    "every engine died while a rollout was generated ahead of training, whose weights have moved on: go on from the "
    "last checkpoint with --load"
)
# in a checkpoint: the table of the rollout that was generated ahead
AHEAD = "ahead.parquet"


class TrainOutput(NamedTuple):
    """What training on a rollout gave.

    ``metrics``: of the rollout, reduced over ranks; ``steps``: ``train/*`` of each optimizer step; ``advantages``: of
    tokens, see `Trainer.own_advantages`.
    """

    metrics: dict[str, float]
    steps: list[dict[str, float]]
    advantages: np.ndarray | None


class Cluster:
    """The verbs of a run. Each returns a future at once; what they do is as if each had waited for the one before::

        with launch(parse_args()) as cluster:
            cluster.sync(0)
            rollout = cluster.generate(0).result()
            cluster.train(0, rollout.table)
            cluster.sync(1)

    Verbs that need the trainers run one after the other, on a thread of the handle; with ``--launcher local`` in the
    caller's thread, where a debugger is. `generate` and `evaluate` run beside them: they begin at once, unless a verb
    before them still uses the engines (`sync`, `save`, another `generate`), and such a verb waits for them in turn.

    After an error nothing is done any more: queued verbs have the same error, new ones raise it, and so does leaving
    the ``with``, until `Pending.result` has raised it to somebody. ``args``: complete, with ``start_rollout_id`` and
    ``num_rollout``. The other arguments are those of `Workers`.
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
        self._rollout, self._trainers, self._engines, self._others = rollout, trainers, engines, others
        self._turns = Turns(inline=args.launcher == "local")
        # by id, those that may be asked for once more, or be in a checkpoint
        self._rollouts: dict[int, Pending[RolloutOutput]] = {}
        self._ahead: dict[int, RolloutOutput] = {}  # of the checkpoint that was loaded, until it is asked for
        self._last_use: Future[Any] | None = None  # of the engines
        self._version = 0  # of the engines' weights
        self._moved = False  # whether the trainers' weights are newer
        self._order = threading.RLock()  # of what trainers are asked, the same for every rank
        self._memory: dict[str, Future[float]] = {}

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        whole = False
        try:
            if error is not None:
                self._turns.stop()
            else:
                self._turns.finish()
                whole = True
        finally:
            self._turns.close()
            # what nobody waits for; workers of their own processes end with these
            if self._last_use is not None and not self._last_use.done() and (whole or self._turns.inline):
                self._rollout.ask(RolloutWorker.cancel)
                wait([self._last_use], CANCEL_S)

    def generate(self, rollout_id: int) -> Pending[RolloutOutput]:
        """Begin a rollout: its scored table of samples and its metrics. One that has begun, and whose result nobody
        has, is not begun again.
        """
        begun = self._rollouts.get(rollout_id)
        if begun is not None and not begun.taken:
            return begun

        def work() -> RolloutOutput:
            if (loaded := self._ahead.pop(rollout_id, None)) is not None:
                return loaded
            with self._memory_of("rollout"):
                return self._rollout.ask(RolloutWorker.generate, rollout_id)

        pending = self._begin(work)
        later = {other: rollout for other, rollout in self._rollouts.items() if other >= rollout_id - 1}
        self._rollouts = later | {rollout_id: pending}
        return pending

    def evaluate(self, rollout_id: int) -> Pending[EvalOutput]:
        """All eval datasets under the engines' weights."""
        return self._begin(lambda: self._rollout.ask(RolloutWorker.evaluate, rollout_id))

    def train(self, rollout_id: int, table: SampleTable) -> Pending[TrainOutput]:
        """Train on a whole rollout, one optimizer step for every ``--global-batch-size`` of it; see `Trainer.train`."""

        def work() -> TrainOutput:
            with self._memory_of("train"):
                metrics = self._change(TrainerWorker.train, rollout_id, self._shared(table))
            first = self._trainers[0]
            return TrainOutput(metrics, first.ask(TrainerWorker.step_metrics), first.ask(TrainerWorker.own_advantages))

        return self._take(work)

    def forward_backward(self, table: SampleTable) -> Pending[dict[str, float]]:
        """Add the gradient of one optimizer step's ``table`` to that of earlier calls; its metrics."""
        return self._take(lambda: self._all(TrainerWorker.forward_backward, self._shared(table))[0])

    def optim_step(self) -> Pending[dict[str, float]]:
        """Update the weights with the gradient; its norm and the learning rates."""
        return self._take(lambda: self._change(TrainerWorker.optim_step))

    def sync(self, version: int) -> Pending[dict[str, float]]:
        """Trainers' weights into every engine, stamped ``version``; metrics of the way there."""

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
        """A checkpoint after ``rollout_id``, in `checkpoints.folder_of` ``--save``: the trainers, where the rollout's
        side stands, and the rollout that was generated ahead, if there is one.
        """
        # those of now: one that begins later waits for this
        begun = {later: rollout for later, rollout in self._rollouts.items() if later > rollout_id}

        def work() -> Path:
            if self.args.save is None:
                raise ValueError("save: name a folder for checkpoints with --save")
            ahead = {later: Future.result(rollout) for later, rollout in begun.items()}
            ahead |= {later: rollout for later, rollout in self._ahead.items() if later > rollout_id}
            if len(ahead) > 1:
                raise ValueError(f"save: rollouts {', '.join(map(str, ahead))} are ahead; a checkpoint holds one")
            final, size = folder_of(self.args.save, rollout_id), max(self._all(TrainerWorker.checkpoint_size))
            with writing(final, size, self.args.save_retain_interval) as (directory, checksums):
                state = self._rollout.ask(RolloutWorker.state_dict)
                for number, output in ahead.items():
                    output.table.to_parquet(directory / AHEAD)
                    state["ahead"] = {"rollout_id": number, "metrics": output.metrics}
                for part in self._all(TrainerWorker.save, str(directory), rollout_id):
                    checksums.update(part)
                (directory / ROLLOUT_STATE).write_text(json.dumps(state))
            return final

        return self._take(work, engines=True)

    def load(self, folder: str | Path, step: int | None = None) -> Pending[int]:
        """Go on from the newest checkpoint in ``folder``, or from that of rollout ``step``; the next rollout's id.

        The engines have its weights after the next `sync`.
        """
        if not self.args.finetune:
            self._rollouts = {}

        def work() -> int:
            found, why = find_checkpoint(folder, step)
            if found is None:
                raise ValueError(f"load: {folder}: {why}")
            return self._load(found)

        return self._take(work, engines=True)

    def save_hf(self, rollout_id: int) -> Pending[Path]:
        """A Hugging Face folder at the ``--save-hf`` template."""

        def work() -> Path:
            if self.args.save_hf is None:
                raise ValueError("save_hf: name a folder for the model with --save-hf")
            directory = Path(self.args.save_hf.format(rollout_id=rollout_id)).absolute()
            self._all(TrainerWorker.save_hf, str(directory))
            return directory

        return self._take(work)

    def get_weights(self) -> Pending[dict[str, Tensor]]:
        """All weights of the trainers by Hugging Face name, on the CPU."""
        return self._take(lambda: self._all(TrainerWorker.get_weights)[0])

    def offload_trainers(self) -> Pending[None]:
        """Trainers give their device memory back."""
        return self._move(TrainerWorker.offload, "sleep")

    def onload_trainers(self) -> Pending[None]:
        """Trainers take their device memory again."""
        return self._move(TrainerWorker.onload, "wake_up")

    def release_engines(self) -> Pending[None]:
        """Engines give back all the device memory that they can."""
        return self._take(lambda: self._rollout.ask(RolloutWorker.release_memory), engines=True)

    def resume_engines(self, *tags: str) -> Pending[None]:
        """Engines take the memory of ``tags`` again; see `slimelite.engines.protocol.MEMORY_TAGS`."""
        return self._take(lambda: self._rollout.ask(RolloutWorker.resume_memory, tags), engines=True)

    def resources(self) -> Pending[dict[str, float]]:
        """What the run has used.

        ``perf/cpu_seconds``: CPU time of this process and of all workers since they began [s]; Ray's own daemons are
        not in it. ``perf/memory_{phase}_{before,after}``: of rank 0 around the last of each phase [GB].
        """

        def work() -> dict[str, float]:
            workers: list[Remote[Any]] = [self._rollout, *self._trainers, *self._others]
            used = [worker.cpu_seconds() for worker in workers]
            memory = {name: future.result() for name, future in list(self._memory.items())}
            return {"perf/cpu_seconds": time.process_time() + sum(future.result() for future in used), **memory}

        return self._take(work)

    def complete_args(self) -> None:
        """Fill in what only start-up can know: the first rollout id and the number of rollouts. Loads ``--load``."""
        args = self.args
        resumed = self._load(Path(args.resume_directory)) if args.resume_directory else 0
        start = resumed if args.start_rollout_id is None else args.start_rollout_id
        num_rollout = args.num_rollout
        if num_rollout is None:
            per_epoch = max(1, self._rollout.ask(RolloutWorker.num_prompts) // args.rollout_batch_size)
            num_rollout = per_epoch * (args.num_epoch or 1)
        self.args = replace(args, start_rollout_id=start, num_rollout=num_rollout)
        if self._trainers:
            self._all(TrainerWorker.set_num_rollout, num_rollout)
        self._rollout.ask(RolloutWorker.complete_args, start, num_rollout)

    def _begin(self, work: Callable[[], R]) -> Pending[R]:
        """Start a verb on a thread of its own, when nothing else uses the engines."""
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
        """Let a verb have its turn; one that uses the ``engines`` waits for those before it, which may be running."""
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

    def _move(self, method: Callable[[TrainerWorker], dict[str, float]], phase: str) -> Pending[None]:
        def work() -> None:
            with self._memory_of(phase):
                self._all(method)

        return self._take(work)

    def _attend(self, progress: Progress | None) -> None:
        if progress is not None:
            progress(*self._rollout.ask(RolloutWorker.progress))
        self._keep_weights()

    def _keep_weights(self) -> None:
        """When every engine died and was started anew, generation waits for the weights that it began with."""
        if not self.args.use_fault_tolerance:
            return
        with self._order:
            if not self._rollout.ask(RolloutWorker.needs_weights):
                return
            if self._moved:
                raise ClusterError(MOVED_ON)
            logger.warning("every engine was started anew: sending weights %d again", self._version)
            self._push(self._version)

    def _push(self, version: int) -> dict[str, float]:
        """Weights into every engine; once more when one died of it and has started anew."""
        self._version, self._moved = version, False
        if not ENGINES[self.args.rollout_backend].server:
            return self._all(TrainerWorker.push_to, self._engines, version)[0]
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

    def _check_engines(self, version: int) -> float:
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

    def _load(self, directory: Path) -> int:
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
            self._ahead = {}
            if "ahead" in state:
                output = RolloutOutput(_read_ahead(directory / AHEAD), state["ahead"]["metrics"])
                self._ahead[int(state["ahead"]["rollout_id"])] = output
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{directory / ROLLOUT_STATE}: is damaged ({type(error).__name__}: {error}); {REMEDY}"
            ) from error
        return saved + 1

    def _change(self, method: Callable[Concatenate[TrainerWorker, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """What rank 0 returns; the trainers' weights are newer than the engines' from now on."""
        with self._order:
            self._moved = True
        return self._all(method, *args, **kwargs)[0]

    def _all(self, method: Callable[Concatenate[TrainerWorker, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        if not self._trainers:
            raise ValueError(f"{method.__name__}: there is no trainer; leave --debug-rollout-only out")
        with self._order:
            futures = [trainer.submit(method, *args, **kwargs) for trainer in self._trainers]
        # one that fails leaves the others waiting in a collective: its error is the one to show
        finished, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in finished:
            future.result()
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
            self._memory[f"perf/memory_{moment}"] = self._trainers[0].submit(TrainerWorker.memory_used)


def _read_ahead(file: Path) -> SampleTable:
    try:
        return SampleTable.from_parquet(file)
    except (ValueError, LookupError, OSError) as error:
        raise ValueError(f"{file}: is missing, damaged or cut short ({error}); {REMEDY}") from error
