"""One rank of training: it takes a table of samples, and updates the weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Thread

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from slimelite.algorithms.packed import select
from slimelite.arguments import Args, CriticArgs
from slimelite.base.heap import keep_freed_memory, return_freed_memory
from slimelite.engines.protocol import Transport
from slimelite.engines.registry import ServerAddress
from slimelite.models.checkpoints import Checksums
from slimelite.plan.devices import recognized
from slimelite.samples.table import SampleTable, TokenStats
from slimelite.tracking.card import write_card, writes_adapter
from slimelite.training import checkpoint, weights
from slimelite.training.batch import MicroBatch
from slimelite.training.columns import TokenColumns, normalizes, passes
from slimelite.training.critic import FOLDER, Critic, FrozenPolicy, build_reference
from slimelite.training.learner import Learner, MetricSums, PassTimer, Scores, table_scores
from slimelite.training.loading import build_policy, build_scorer, loading_minutes
from slimelite.training.lora import peft_config
from slimelite.training.loss import check_first_step, micro_batch_loss, reads_entropy
from slimelite.training.model import LanguageModel, PolicyModel
from slimelite.training.offload import HostMemory
from slimelite.training.parallel import be_deterministic, join_world
from slimelite.training.planning import PackingLimits, Step, deal, split_steps
from slimelite.training.profiling import Profiler

logger = logging.getLogger(__name__)


class Trainer(Learner[PolicyModel]):
    """Trains one policy with FSDP2. Methods are collective: every rank calls them with the same arguments.

    Args:
        args: resolved arguments.
        rank, world_size: this trainer's rank, and the number of training ranks.
        store: the store with which several ranks form a process group; see `join_world`.

    After training on a rollout, the trainer has these attributes, which are equal on every rank. ``step_metrics``: the
    ``train/*`` metrics of each optimizer step. ``trained_columns``: see `TokenColumns.trained`. ``token_stats``: the
    log-probs and entropies of the response tokens; None with ``--token-stats none``.

    Raises:
        ValueError: the arguments do not name a model, or need something that training does not support.
    """

    def __init__(self, args: Args, *, rank: int = 0, world_size: int = 1, store: dist.Store | None = None) -> None:
        _check(args)
        world = join_world(args, rank, world_size, store)
        world.wait_at_most(loading_minutes(args))
        torch.manual_seed(args.seed + rank)
        if args.deterministic_mode:
            be_deterministic()
        if world.device.type == "cpu":
            keep_freed_memory(tight=bool(args.gradient_checkpointing))
        build = build_scorer if args.loss.scores else build_policy
        super().__init__(args, world, build(args, world, args.hf_checkpoint, trainable=True))
        self.reference = build_reference(args, self.world, self.model) if args.use_reference else None
        teaches = args.use_opd and args.opd_type == "trainer"
        self.teacher = FrozenPolicy(args, self.world, args.opd_teacher_load) if teaches else None
        self.critic = Critic(args, self.world) if args.use_critic else None
        world.wait_at_most(args.distributed_timeout_minutes)
        self.learners: list[Learner[LanguageModel]] = [self, *([self.critic] if self.critic else [])]
        self.memory = HostMemory(lambda: chain.from_iterable(each.tensors() for each in self.learners), world.device)
        # for `begin_save`: its copies in host memory, and a process group of its own, because training also runs
        # collectives
        pinned = world.device.type == "cuda"
        staging = StagingOptions(
            use_pinned_memory=pinned, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=pinned
        )
        self._stager = DefaultStager(staging) if args.async_save else None
        self._writers = dist.new_group(backend="gloo") if args.async_save else None
        # if training updates the reference, checkpoints include it
        self._saved_reference = self.reference if args.ref_update_interval else None
        if args.num_rollout is not None:
            self.set_num_rollout(args.num_rollout)
        self.timed = PassTimer(f"trainer_{rank}")
        # peak rate of matrix products on the device, from its data sheet [1/s]
        gpu = recognized(torch.cuda.get_device_name(world.device)) if world.device.type == "cuda" else None
        self._rate = None if gpu is None else gpu.rate
        self._profiler = Profiler(args, rank) if args.use_pytorch_profiler or args.record_memory_history else None
        if args.use_pytorch_profiler and self._profiler is not None:
            self.timed.around = self._profiler.of_pass
        self.servers: Transport | None = None  # sends weights to engines that are servers
        self.step_metrics: list[dict[str, float]] = []
        self.trained_columns: dict[str, np.ndarray] = {}
        self.token_stats: TokenStats | None = None
        # losses of `forward_backward`, kept until `optim_step`
        self._losses: list[Tensor] = []
        self.temperature = args.rollout_temperature if args.job.sampled else 1.0
        parts = [part for part in (self, self.reference, self.teacher, self.critic) if part is not None]
        leaking = {part.model.hf.config.model_type for part in parts if not part.model.packed}
        self._packed = not leaking
        readers = [part.model for part in (self, self.teacher, self.critic) if part is not None]
        self._vocab_size = min(model.hf.config.get_text_config().vocab_size for model in readers)
        # all models use the same plan of micro-batches
        self._shares = all(part.model.shares for part in parts)
        limits = PackingLimits(args.max_tokens_per_gpu if args.use_dynamic_batch_size else None, args.micro_batch_size)
        self.limits = PackingLimits(None, 1) if leaking else limits
        if leaking and self.world.rank == 0:
            logger.warning(
                "%s is trained on one sequence per forward pass, because its layers may mix packed sequences. The "
                "results are correct, but training is slower, and --micro-batch-size and --max-tokens-per-gpu have no "
                "effect",
                " and ".join(sorted(leaking)),
            )

    def set_num_rollout(self, num_rollout: int) -> None:
        """Set the run's number of rollouts. The learning-rate schedules end after this number."""
        self.args = replace(self.args, num_rollout=num_rollout)
        steps, waits = self.args.num_steps_per_rollout, 0
        if self.critic is not None:
            self.critic.run_steps = num_rollout * steps
            waits = self.args.num_critic_only_steps
        self.run_steps = max(num_rollout - waits, 0) * steps

    def train(self, rollout_id: int, table: SampleTable) -> dict[str, float]:
        """Train on a rollout: one optimizer step for every ``--global-batch-size`` rollouts of the table.

        If there is a critic, only the critic is trained in the first ``--num-critic-only-steps`` rollouts.

        Returns:
            the metrics ``train/*`` (means over the steps), ``rollout/*`` and ``perf/*``, equal on every rank.

        Raises:
            ValueError: a row cannot be trained on.
            FloatingPointError: see `Optimizers.step`.
        """
        self._check_no_gradient("train")
        with self._profiler.rollout(rollout_id) if self._profiler else nullcontext():
            self.timed.restart()
            table = self._as_sampled(table)
            if self.args.reset_optimizer_states:
                self.optimizers.reset()
            steps = split_steps(table.rollout_id, table.unit_id, self.args.global_batch_size)
            columns, sums = self._columns(table, steps), MetricSums(self.world)
            trains = self.critic is None or rollout_id >= self.args.num_critic_only_steps
            computed = columns.rows_to_compute(self.args, checked=self._checked) & trains
            self._fill(columns, passes(self.args, columns, computed, checked=self._checked), alike=self.args.ci_test)
            if self.critic is not None:
                schedule = self._schedule(columns, table.mask_sums > 0)
                with self.timed(
                    "critic_train", self.critic.model, table, chain(*(step.micro_batches for step in schedule))
                ):
                    self.critic.train(columns, schedule, sums)
            if trains:
                self._train_policy(columns, computed, sums, partial(self.update, sums))
            self.progress.rollout_id = rollout_id
            if self._saved_reference is not None and (rollout_id + 1) % (self.args.ref_update_interval or 1) == 0:
                self._saved_reference.copy_from(self.model)
            return self._metrics(columns, computed, sums)

    def forward_backward(self, table: SampleTable) -> dict[str, float]:
        """Add the gradient of ``table`` to the gradient of earlier calls. `optim_step` updates the weights with the
        sum. The whole table counts as one optimizer step, and ``--global-batch-size`` has no effect.

        Returns:
            the metrics of `train`, except those that `optim_step` returns.

        Raises:
            ValueError: a row cannot be trained on, or a flag of the run only works with whole rollouts.
        """
        _check_splits(self.args)
        self.timed.restart()
        table = self._as_sampled(table)
        steps = split_steps(table.rollout_id, table.unit_id, len(table))
        columns, sums = self._columns(table, steps), MetricSums(self.world)
        computed = columns.rows_to_compute(self.args, checked=self._checked)
        self._fill(columns, passes(self.args, columns, computed, checked=self._checked), alike=self.args.ci_test)
        self._train_policy(columns, computed, sums, self._losses.append)
        return self._metrics(columns, computed, sums)

    def optim_step(self) -> dict[str, float]:
        """Clip the gradient of `forward_backward`, and update the weights.

        Returns:
            ``train/grad_norm``, ``train/skipped_steps`` and the learning rates, equal on every rank.

        Raises:
            ValueError: `forward_backward` has not been called since the last call of `optim_step`.
            FloatingPointError: see `Optimizers.step`.
        """
        if not self._losses:
            raise ValueError("optim_step: there is no gradient; call forward_backward(table) first")
        losses, self._losses = self._losses, []
        sums = MetricSums(self.world)
        self.update(sums, torch.stack(losses).sum())
        return {f"train/{name}": value for name, value in sums.means()[0].items()}

    def _train_policy(
        self,
        columns: TokenColumns,
        computed: np.ndarray,
        sums: MetricSums,
        then: Callable[[Tensor], None],
    ) -> None:
        """Compute the policy's gradient of each step, then call ``then`` with the step's loss (see `gradient`).

        ``computed``: [n] bool, the rows that are computed.
        """
        checked, schedule = self._checked, self._schedule(columns, computed)
        if normalizes(self.args):
            columns.normalize_correction(self.args)
        with self.timed("actor_train", self.model, columns.table, chain(*(step.micro_batches for step in schedule))):
            for sums.step, step in enumerate(schedule):
                # before the first step the weights do not change, so its pass also gives the missing old log-probs
                scores = Scores(len(columns.mask), self.world) if sums.step == 0 else None
                then(self.gradient(columns, step, sums, scores, checked=checked and sums.step == 0))
                if scores is not None:
                    columns.fill("log_probs", scores.gather())
        if self._weights.parts:
            (columns.loss_weights,) = self._weights.gather()
        # if the first step had no trained token, nothing was checked. Then the next rollout's first step is checked
        self._fresh = self._fresh and not columns.table.mask_sums[columns.steps[0]].any()

    @property
    def _checked(self) -> bool:
        """Whether --ci-test checks this rollout."""
        return self.args.ci_test and self._fresh

    def _check_no_gradient(self, verb: str) -> None:
        if self._losses:
            raise ValueError(f"{verb}: the gradient of forward_backward would be lost; call optim_step first")

    def outcome(self) -> tuple[list[dict[str, float]], dict[str, np.ndarray], TokenStats | None]:
        """``step_metrics``, ``trained_columns`` and ``token_stats`` of the last rollout that was trained on."""
        return self.step_metrics, self.trained_columns, self.token_stats

    def gradient(
        self,
        columns: TokenColumns,
        step: Step,
        sums: MetricSums,
        scores: Scores | None = None,
        *,
        checked: bool = False,
    ) -> Tensor:
        """Compute the gradients of one optimizer step with `Learner.accumulate`, and return its result, the loss.

        The metrics are added to ``sums``. ``scores``: collects the log-probs and entropies that no earlier pass has
        computed; None after the rollout's first step. ``checked``: run `check_first_step`, which may raise
        AssertionError, on each micro-batch.
        """

        if self.args.loss.judged:
            columns.mismatch_kl = self._mismatch_kl(columns, step.rows)
            sums.note("mismatch_kl", columns.mismatch_kl)

        def share(batch: MicroBatch) -> Tensor:
            log_probs, entropy = self.model(batch, self.temperature, entropy_grad=reads_entropy(self.args))
            if scores is not None:
                unknown = batch.old.isnan()
                scores.add(batch, log_probs.where(unknown, torch.nan), entropy.where(unknown, torch.nan))
                batch.old = torch.where(unknown, log_probs.detach(), batch.old)
            loss = micro_batch_loss(self.args, batch, log_probs, entropy)
            sums.add_all(loss.metrics)
            if loss.weights is not None:
                self._weights.add(batch, loss.weights)
            for name, value in loss.shares.items():
                sums.add_share(name, value)
            if checked:
                check_first_step(self.args, self.world, batch, log_probs, loss, initial=self.progress.steps == 0)
            return loss.total

        total = self.accumulate(columns, step, share)
        sums.add("global_batch_size", len(np.unique(columns.table.rollout_id[step.rows])), 1)
        return total

    def _mismatch_kl(self, columns: TokenColumns, rows: np.ndarray) -> float:
        """The mean log-ratio between policy and reference [nats] of a step's replies (arXiv:2402.01306, 4.1).

        For this mean, each reply is paired with the prompt of the next row, and the last reply with the first prompt.
        Only replies with a trained token are used. If there is only one such reply, there is no other prompt. Then the
        result is 0, and a warning is logged.
        """
        rows = rows[columns.table.mask_sums[rows] > 0]
        if len(rows) == 1:
            logger.warning(
                "a step of --loss-type kto_loss has only one reply, and the KL needs the prompt of another reply, so "
                "the KL counts as 0; use a larger --global-batch-size"
            )
        if len(rows) < 2:
            return 0.0
        assert self.reference is not None
        table, others = columns.table.select(rows), columns.table.select(np.roll(rows, -1))
        swapped = vars(table) | {"prompt_tokens": others.prompt_tokens, "prompt_offsets": others.prompt_offsets}
        other = TokenColumns.from_table(SampleTable(**swapped))
        dealt = self._deal(other.table, np.arange(len(rows)), self.args.log_probs_max_tokens_per_gpu)
        policy = table_scores(self.model, other, dealt, self.world, self.temperature)[0]
        with self.reference.weights() as model:
            reference = table_scores(model, other, dealt, self.world, self.temperature)[0]
        return float(select(policy - reference, other.mask).double().sum() / len(rows))

    def log_probs(self, table: SampleTable, temperature: float | None = None) -> np.ndarray:
        """[response tokens of the table] the log-probs with the current weights, in the table's order. If
        ``temperature`` is None, the run's temperature is used.
        """
        table = self._as_sampled(table)
        columns, rows = TokenColumns.from_table(table), np.flatnonzero(table.response_lengths)
        dealt = self._deal(columns.table, rows, self.args.log_probs_max_tokens_per_gpu)
        temperature = self.temperature if temperature is None else temperature
        return table_scores(self.model, columns, dealt, self.world, temperature)[0].numpy()

    def push_weights(
        self, target: weights.WeightSink | Sequence[ServerAddress] | None, version: int
    ) -> dict[str, float]:
        """Send all weights to ``target``, a sink or servers, as weight version ``version``. The weights may be
        offloaded; see `weights.push`.
        """
        if isinstance(target, Sequence):
            assert self.servers is not None, "this run has no connection to servers"
            target = self.servers.to(target)
        self.progress.weight_version = version
        size, alone = self.args.update_weight_buffer_size, self.args.sends_adapter
        return weights.push(self.model, self.world, target, version, size, self.memory, adapter_alone=alone)

    def get_weights(self) -> dict[str, Tensor]:
        """All weights by Hugging Face name, on the CPU, in the dtype of the optimizer. Only rank 0 gets them; the
        result is empty on all other ranks."""
        everything: dict[str, Tensor] = {}
        size, model = self.args.update_weight_buffer_size, self.model
        for bucket in weights.buckets(model.named_weights(), size, memory=self.memory, filed=model.as_filed):
            if self.world.rank == 0:
                everything |= {name: tensor.cpu().clone() for name, tensor in bucket.tensors()}
        return everything

    def save(self, directory: str, rollout_id: int) -> Checksums:
        """Write a checkpoint. A run that loads it continues after rollout ``rollout_id``.

        Returns:
            the checksums of the files that this rank wrote.
        """
        with self._snapshots(rollout_id) as parts:
            return checkpoint.save_parts(Path(directory), parts)

    def begin_save(self, directory: str, rollout_id: int) -> None:
        """Copy the state to host memory. After the copy, a thread writes the checkpoint while training goes on
        (``--async-save``).

        When this rank has finished, it writes the file `checkpoints.part_file` in ``directory``.
        """
        assert self._stager is not None
        assert self._writers is not None
        with self._snapshots(rollout_id) as parts:
            copies = {folder: part.staged(self._stager) for folder, part in parts.items()}
        work = partial(checkpoint.save_and_tell, Path(directory), copies, self._writers)
        Thread(target=work, name="checkpoint", daemon=True).start()

    @contextmanager
    def _snapshots(self, rollout_id: int) -> Iterator[dict[str, checkpoint.Snapshot]]:
        """A context with the parts of a checkpoint, by their folder in the checkpoint. In this context the state must
        not change."""
        with self._reference_weights() as reference:
            self.progress.rollout_id = rollout_id
            parts = {"": checkpoint.snapshot(self, reference)}
            if self.critic is not None:
                self.critic.progress.rollout_id = rollout_id
                parts[FOLDER] = checkpoint.snapshot(self.critic)
            yield parts

    def checkpoint_size(self) -> int:
        """The approximate size of a checkpoint of `save` [bytes], with the parts of all ranks."""
        with self._reference_weights() as reference:
            size = checkpoint.size(self, reference)
        return size + (checkpoint.size(self.critic) if self.critic else 0)

    def load(self, directory: str) -> int:
        """Resume from a checkpoint, even if a different number of ranks wrote it. Returns the id of the rollout after
        which the checkpoint was saved."""
        with self._reference_weights() as reference:
            checkpoint.load(Path(directory), self, reference)
        if self.critic is not None:
            self.critic.load(directory)
        return self.progress.rollout_id

    def _reference_weights(self) -> AbstractContextManager[Mapping[str, Tensor] | None]:
        return self._saved_reference.state() if self._saved_reference else nullcontext()

    def save_hf(self, directory: str) -> None:
        """Write the policy as a Hugging Face folder, or its adapter as a peft folder; see `weights.save_hf`."""
        args = self.args
        adapter = peft_config(self.model.hf, args, args.hf_checkpoint) if writes_adapter(args) else None
        weights.save_hf(
            Path(directory),
            self.model,
            self.world,
            args.tokenizer if args.model_config is None else args.hf_checkpoint,
            partial(write_card, args=args, rollout_id=self.progress.rollout_id),
            adapter,
            dtype=weights.saved_dtype(args, self.world),
            chats=not args.loss.documents,
        )

    def offload(self) -> dict[str, float]:
        """Move the weights and the optimizer state to host memory. With ``--fsdp-cpu-offload`` or on a CPU, weights and
        state are already in host memory, and nothing is moved."""
        self._check_no_gradient("offload")
        return self._move("sleep", self.memory.offload)

    def onload(self) -> dict[str, float]:
        """Move the weights and the optimizer state back to the device."""
        return self._move("wake_up", self.memory.onload)

    def memory_used(self) -> float:
        """Memory in use [GB, 1e9 bytes]. With a GPU, the result is the GPU memory of all processes, including engines.
        With a CPU, the result is the resident memory of this process."""
        if self.world.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.world.device)
            return (total - free) / 1e9
        return float(psutil.Process().memory_info().rss) / 1e9

    def close(self) -> None:
        """Leave the process groups."""
        if self._profiler is not None:
            self._profiler.close()
        if self.servers is not None:
            self.servers.close()
        self.world.close()

    def _as_sampled(self, table: SampleTable) -> SampleTable:
        """The table with the columns that log-probs need. If the responses come from a data set, the result has no kept
        ids, because log-probs are then over the whole vocabulary.
        """
        return table if self.args.job.sampled else table.without_kept()

    def _columns(self, table: SampleTable, steps: list[np.ndarray]) -> TokenColumns:
        """The columns that are known before the first step, such as weights, reference log-probs and advantages."""
        columns = TokenColumns.from_table(table, steps)
        self._weights = Scores(len(table.response_tokens), self.world)
        if self.args.use_opd and self.teacher is None:
            columns.teacher = torch.from_numpy(table.teacher_log_probs)
        columns.check(self.args, self._vocab_size)
        columns.set_weights(self.args)
        self._fill(columns, passes(self.args, columns))
        if self.args.job.sampled and self.args.compute_advantages_and_returns:
            columns.spread_advantages(self.args)
        return columns

    def _fill(self, columns: TokenColumns, todo: dict[str, np.ndarray], *, alike: bool = False) -> None:
        """Run the passes ``todo`` (see `passes`). ``alike``: compute log-probs with the micro-batches of training. Then
        they are bitwise equal to those of the first step.
        """
        for name, rows in todo.items():
            if alike and name == "log_probs":
                parts = [self._deal(columns.table, step[np.isin(step, rows)]) for step in columns.steps]
                dealt = [list(chain(*of_rank)) for of_rank in zip(*parts, strict=True)]
            else:
                dealt = self._deal(columns.table, rows, self.args.log_probs_max_tokens_per_gpu)
            self._pass(name, columns, dealt)

    def _pass(self, name: str, columns: TokenColumns, dealt: list[list[np.ndarray]]) -> None:
        """Run the pass ``name`` on the micro-batches ``dealt`` to each rank, and fill its columns. `PassTimer` measures
        the pass."""
        others = {"ref_log_probs": self.reference, "teacher_log_probs": self.teacher, "values": self.critic}
        source = others.get(name, self)
        assert source is not None
        options = () if name == "values" else (self.temperature,)
        with source.weights() as model, self.timed(name, model, columns.table, dealt):
            columns.fill(name, table_scores(model, columns, dealt, self.world, *options))

    def _schedule(self, columns: TokenColumns, computed: np.ndarray) -> list[Step]:
        """The optimizer steps. In each step, the rows that ``computed`` [n] bool selects are distributed to ranks."""
        return [Step(rows, self._deal(columns.table, rows[computed[rows]])) for rows in columns.steps]

    def _deal(self, table: SampleTable, rows: np.ndarray, max_tokens: int | None = None) -> list[list[np.ndarray]]:
        limits = PackingLimits(max_tokens) if self._packed and max_tokens is not None else self.limits
        return deal(table, rows, self.world.dp_size, limits, shares=self._shares)

    def _metrics(self, columns: TokenColumns, computed: np.ndarray, sums: MetricSums) -> dict[str, float]:
        self.trained_columns = columns.trained()
        self.token_stats = None if self.args.token_stats == "none" else columns.token_stats()
        means, of_steps = sums.means()
        metrics, *self.step_metrics = [
            {f"train/{name}": value for name, value in each.items()} for each in (means, *of_steps)
        ]
        metrics |= columns.means(self.args, computed)
        metrics |= self.timed.metrics(self.world.ranks, self._rate)
        if seconds := metrics.get("perf/actor_train_time"):
            metrics["perf/actor_train_tok_per_s"] = int(columns.table.total_lengths[computed].sum()) / seconds
            metrics["perf/computed_rows_ratio"] = float(computed.mean())
        if (
            self.world.device.type == "cpu" and not self.args.job.local
        ):  # but not if the engine in this process uses the memory next
            return_freed_memory()
        return metrics

    def _move(self, phase: str, move: Callable[[], None]) -> dict[str, float]:
        self.timed.restart()
        with self.timed(phase):
            if self.world.device.type == "cuda" and not self.args.fsdp_cpu_offload:
                move()
        return self.timed.metrics(self.world.ranks)


def _check(args: CriticArgs) -> None:
    """Assert that ``use_reference`` and ``use_critic`` are True if the loss needs these models."""
    compares = args.job.sampled and (args.kl_coef or (args.use_kl_loss and args.kl_loss_coef))
    assert args.use_reference or not compares, "a KL coefficient needs a reference, but use_reference is False"
    needs_critic = args.job.loss == "policy" and args.estimator.needs_critic
    assert args.use_critic or not needs_critic, "the estimator needs a critic, but use_critic is False"


def _check_splits(args: Args) -> None:
    """Raise ValueError if `forward_backward` cannot be used, because a flag only works with whole rollouts."""
    flags = {
        "--advantage-estimator ppo": args.use_critic,
        "--ref-update-interval": args.ref_update_interval is not None,
        "--reset-optimizer-states": args.reset_optimizer_states,
    }
    if whole := [flag for flag, is_set in flags.items() if is_set]:
        raise ValueError(
            f"forward_backward: {' and '.join(whole)} needs whole rollouts: call train(rollout_id, table) instead"
        )
