"""The rollout side of a run. Its methods generate rollouts, evaluate the model, and save and load the state. Each
method returns when its work is done."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slimelite.algorithms.groups import group_advantages
from slimelite.arguments import Args
from slimelite.base.heap import return_freed_memory
from slimelite.base.threads import LoopThread
from slimelite.data.tokenizer import TOKENIZER, check_same, end_texts, fingerprint
from slimelite.engines.protocol import MEMORY_TAGS, Engine, GenerateRequest, SamplingParams
from slimelite.rewards.grader import Grader
from slimelite.rollout.context import (
    Plugin,
    PluginArgs,
    RolloutContext,
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
    build_source,
    load_plugin,
    train_output,
)
from slimelite.rollout.generate import BUILT_IN, generate_rollout
from slimelite.rollout.groups import check_scored, stamp_versions
from slimelite.rollout.metrics import eval_metrics, perf_metrics, prefixed, rollout_metrics, table_metrics
from slimelite.rollout.pool import EnginePool
from slimelite.samples.sample import Sample, Status
from slimelite.samples.table import SampleTable
from slimelite.sandbox.registry import open_sandbox

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    from slimelite.data.documents import Documents


logger = logging.getLogger(__name__)
# for --check-weight-update-equal: prompts for each engine, tokens of a prompt, and tokens to generate
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 8, 16
# time limit for cancelled tasks to end [s]
CANCEL_S = 5.0
# freed memory of samples that stays allocated for the next samples [bytes]
SAMPLES_BYTES = 2**26


@dataclass(slots=True)
class RolloutOutput:
    """The result of one rollout: a table of scored samples with their advantages, and a dict from full metric names to
    values."""

    table: SampleTable
    metrics: dict[str, float]


@dataclass(slots=True)
class EvalOutput:
    """The result of one evaluation: a dict from full metric names to values, and a table of samples for each
    dataset."""

    metrics: dict[str, float]
    tables: dict[str, SampleTable]


class RolloutManager:
    """Owns the data source, the grader, and one thread. The event loop of this thread runs all coroutines of the
    rollout.

    ``engines`` may be empty if nothing is generated, as in SFT, in DPO, and in training on saved rollouts.
    """

    def __init__(
        self,
        args: Args,
        engines: Sequence[Engine],
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        """Read the prompts and load every plugin.

        Raises:
            ValueError: a plugin cannot be loaded, or the prompts cannot be read.
        """
        self._done = (0, 0, "")
        self._fingerprint: dict[str, str] | None = None
        self._thread = LoopThread("rollout")
        pool = EnginePool(
            engines,
            args.sglang_server_concurrency,
            restarts=args.job.revives,
            interval=args.rollout_health_check_interval,
            # a slow engine counts as dead only if the engines are servers and --use-fault-tolerance is set
            timeout=args.rollout_health_check_timeout if args.job.servers and args.use_fault_tolerance else math.inf,
            syncs=args.job.trains,
        )
        grader = Grader(args, ends=end_texts(str(args.tokenizer), tokenizer) if args.job.engines else ())
        self._context = RolloutContext(args, tokenizer, pool, grader, self._thread, self._note)
        self._context.grader.plugin_args = self._plugin_args()
        if args.use_opd:
            from slimelite.rollout.teacher import Teacher

            self._context.teacher = Teacher.of(args)
        if args.environment is not None and args.job.engines:
            from slimelite.environments.hosts import Host

            self._context.environment = Host(
                args.environment,
                processes=args.environment_processes,
                call_seconds=args.environment_call_timeout,
                seconds=args.environment_timeout,
                sandbox=args.sandbox,
            )
        if args.agent_command is not None:
            from slimelite.environments.program import Programs

            limits = args.agent_programs, args.agent_timeout
            logs = Path(args.run_dir) / "agents"
            self._context.programs = Programs(args.agent_command, *limits, logs, open_sandbox(args.sandbox))
        rollout = load_plugin(args.rollout_function_path, "--rollout-function-path")
        self._rollout_function: Plugin = rollout or generate_rollout
        self._eval_function = load_plugin(args.eval_function_path, "--eval-function-path") or self._rollout_function
        self._post_process = load_plugin(args.custom_reward_post_process_path, "--custom-reward-post-process-path")
        self._log = load_plugin(args.custom_rollout_log_function_path, "--custom-rollout-log-function-path")
        self._eval_log = load_plugin(
            args.custom_eval_rollout_log_function_path, "--custom-eval-rollout-log-function-path"
        )
        # a run on saved rollouts has no prompts, and neither has a run that only evaluates
        needs_prompts = args.job.saved is None and args.num_rollout != 0
        self._documents: Documents | None = None
        if args.job.documents or args.eval_bpb:
            from slimelite.data.documents import Documents  # only pretraining needs it

            self._documents = Documents(args, str(args.tokenizer))
        self._held_out: Iterator[tuple[SampleTable, int]] | None = None
        self.source: Any = self._documents if args.job.documents else None
        if needs_prompts and not args.job.documents:
            self.source = build_source(args.data_source_path, self._plugin_args(), tokenizer)
        self._warned_of_old_weights = False
        # imported modules and models stay in memory, so the garbage collector should not walk their million objects
        # again
        gc.freeze()

    @property
    def args(self) -> Args:
        """The arguments of the run."""
        return self._context.args

    def complete_args(self, start_rollout_id: int, num_rollout: int) -> None:
        """Set the two arguments that are known only after the run has started. Plugins may read these arguments."""
        self._context.args = replace(self.args, start_rollout_id=start_rollout_id, num_rollout=num_rollout)
        self._context.grader.plugin_args = self._plugin_args()

    def generate(self, rollout_id: int) -> RolloutOutput:
        """Generate one rollout. Returns the rollout's table of samples, including advantages, and the rollout's
        metrics.

        Raises:
            ValueError: the rollout failed (see `generate.Collection`), every reward failed, or the file of a saved
                rollout does not exist.
        """
        self._note(0, 0, "")
        output = self._scored(rollout_id)
        if not self.args.job.local:  # this process has no other use for the memory of the samples
            return_freed_memory(above=SAMPLES_BYTES)
        return output

    def _scored(self, rollout_id: int) -> RolloutOutput:
        started = time.monotonic()
        if self.args.job.documents and self.args.job.saved is None:
            assert self._documents is not None
            table, metrics = self._documents.take(self.args.rollout_batch_size)
            self._save(table, rollout_id)
            return RolloutOutput(table, {**metrics, "perf/rollout_time": time.monotonic() - started})
        if self.args.job.saved is None:
            output, reward_key = self._generated(rollout_id), self.args.reward_key
            table = SampleTable.from_samples(output.samples, reward_key)
            metrics = output.metrics | self._shape(table, output.flat)
        else:
            table = self._saved(rollout_id)
            output, reward_key = RolloutFnTrainOutput(table.to_samples()), None
            metrics = {}
        seconds = time.monotonic() - started
        samples = output.flat
        metrics |= self._compare_groups(table, samples)
        version = self._context.version_trained_on(rollout_id) if self._context.engines.infos else None
        self._warn_of_old_weights(table, version)
        self._save(table, rollout_id)
        if self._log and self._log(rollout_id, self._plugin_args(), samples, metrics, seconds):
            return RolloutOutput(table, {})
        sampled = self._metrics(output, table, reward_key, version, seconds)
        return RolloutOutput(table, {**sampled, **table_metrics(table), **metrics})

    def _generated(self, rollout_id: int) -> RolloutFnTrainOutput:
        """Call the rollout function. Then check that at least one sample has a reward, and give each token a weight
        version."""
        function, engines = self._rollout_function, self._context.engines
        with self._watched():
            if function not in BUILT_IN and engines.engines:
                self._thread.run(engines.refresh())  # built-in functions refresh the engines themselves
            output = train_output(function(self._plugin_args(function), rollout_id, self.source))
        if engines.infos and self.args.job.sampled:
            for sample in output.flat:
                stamp_versions(sample, engines.weight_version)
        check_scored(output.flat, f"rollout {rollout_id}")
        return output

    def evaluate(self, rollout_id: int, names: Sequence[str] = ()) -> EvalOutput:
        """Evaluate the eval datasets in ``names`` with the engines' current weights. If ``names`` is empty, evaluate
        all eval datasets.

        Raises:
            ValueError: a dataset is empty, or none of its prompts got a scored response.
        """
        started = time.monotonic()
        self._note(0, 0, "")
        function = self._eval_function
        datasets = tuple(d for d in self.args.eval_datasets if not names or d.name in names)

        def plugin_args(function: Plugin | None = None) -> PluginArgs:
            args = self._plugin_args(function)
            args.eval_datasets, args.keeps_ids = datasets, False
            return args

        with self._watched():
            output: Any = function(plugin_args(function), rollout_id, self.source, evaluation=True)
        if not isinstance(output, RolloutFnEvalOutput):
            output = RolloutFnEvalOutput(output)
        key = self._context.eval_reward_key
        tables, metrics = {}, dict(output.metrics or {})
        for name, results in output.data.items():
            if results.get("samples"):
                tables[name] = SampleTable.from_samples([results["samples"]], key)
                self._save(tables[name], f"eval_{rollout_id}_{name}")
        if self._eval_log and self._eval_log(rollout_id, plugin_args(), output.data, metrics):
            return EvalOutput({}, tables)
        more_k = {dataset.name: dataset.pass_at_k for dataset in self.args.eval_datasets}
        for name, results in output.data.items():
            metrics |= eval_metrics(name, results, key, tables.get(name), more_k.get(name, ()))
        errors = self._context.grader.metrics()
        metrics |= {name.replace("rollout/", "eval/"): value for name, value in errors.items()}
        metrics["perf/eval_time"] = time.monotonic() - started
        return EvalOutput(metrics, tables)

    def held_out(self) -> tuple[SampleTable, int] | None:
        """The next part of the documents of ``--eval-bpb`` (see `Documents.held_out`). Returns None after the last
        part; the next call then returns the first part again."""
        if self._held_out is None:
            assert self._documents is not None, "--eval-bpb"
            self._held_out = self._documents.held_out()
        part = next(self._held_out, None)
        if part is None:
            self._held_out = None
        return part

    def progress(self) -> tuple[int, int, str]:
        """The progress of the current rollout or evaluation: (number of groups that are done, total number, note).
        Other threads may call this method."""
        return self._done

    def _note(self, done: int, total: int, note: str) -> None:
        self._done = (done, total, note)

    def probe(self) -> SampleTable:
        """Call the function `probe` with this run's engines, and return its result."""
        engines, vocab_size = self._context.engines.engines, len(self._context.tokenizer)
        return self._thread.run(probe(engines, vocab_size, self.args.rollout_temperature))

    def state_dict(self) -> dict[str, object]:
        """The manager's state as plain JSON values: the position of the data source, the groups that were returned to
        the data source, and a fingerprint of the tokenizer."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self._context.tokenizer)
        state: dict[str, object] = {TOKENIZER: self._fingerprint}
        if self.source is None:
            return state
        if not hasattr(self.source, "state_dict"):
            logger.warning(
                "%s has no state_dict, so its position is not saved in the checkpoint", type(self.source).__name__
            )
            return state
        return {**state, "data_source": self.source.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, which an earlier `state_dict` returned.

        Raises:
            ValueError: the state was saved with another tokenizer or with other data, or does not contain the position
                in the data.
        """
        check_same(state.get(TOKENIZER, {}), self._context.tokenizer)
        if self.source is None or not hasattr(self.source, "load_state_dict"):
            return
        if "data_source" not in state:
            raise ValueError(
                "the checkpoint's rollout_state.json does not contain the position in the data: it is damaged, or "
                "from a run without prompts; use another checkpoint with --ckpt-step, or load only its weights with "
                "--finetune"
            )
        self.source.load_state_dict(state["data_source"])

    def num_prompts(self) -> int:
        """The number of prompts in the data source, or 0 if there is no data source."""
        return 0 if self.source is None else len(self.source)

    def cancel(self) -> None:
        """Cancel all generation that is in progress, also on the engines. Callers that wait for its results get a
        ``CancelledError``."""

        async def cancel() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                if not task.cancelling():  # a cancelled task may still wait for its child tasks
                    task.cancel()
            if tasks:  # with a timeout, because a plugin's task may ignore the cancellation
                await asyncio.wait(tasks, timeout=CANCEL_S)

        self._thread.run(cancel())

    def close(self) -> None:
        """End the grader's workers and the event loop. The engines stay open: the caller must close them."""
        gc.unfreeze()
        if self._context.agents is not None:  # agents that wait for a next rollout would never end
            self.cancel()
        if self._context.environment is not None:
            self._thread.run(self._context.environment.close())
        if self._context.server is not None:
            self._thread.run(self._context.server.stop())
        if self._context.programs is not None:
            self._context.programs.close()
        self._context.grader.close()
        self._thread.close()

    def release_memory(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Wait until every engine answers, then release the kinds of memory in ``tags`` (such as ``kv_cache``) on all
        engines."""
        self._thread.run(self._on_each_engine(lambda engine: engine.release_memory(tags)))

    def resume_memory(self, tags: Sequence[str]) -> None:
        """Wait until every engine answers, then allocate the kinds of memory in ``tags`` (such as ``kv_cache``) again
        on all engines."""
        self._thread.run(self._on_each_engine(lambda engine: engine.resume_memory(tags)))

    async def _on_each_engine(self, ask: Callable[[Engine], Awaitable[None]]) -> None:
        await self._context.engines.settle()
        await asyncio.gather(*(ask(engine) for engine in self._context.engines.engines))

    def settle_engines(self) -> None:
        """Wait until every engine answers. Engines that have died are restarted.

        Raises:
            ValueError: an engine cannot be restarted.
        """
        self._thread.run(self._context.engines.settle())

    def needs_weights(self) -> bool:
        """Whether a rollout waits for a weight sync. This is so if no engine can be used and a restarted engine lacks
        current weights."""
        return self._context.engines.needs_weights

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Check the health of the engines periodically inside this block."""
        if not self.args.use_fault_tolerance:
            yield
            return
        self._thread.run(self._context.engines.watch())
        try:
            yield
        finally:
            self._thread.run(self._context.engines.rest())

    def _plugin_args(self, function: Plugin | None = None) -> PluginArgs:
        # built-in rollout functions do not need an engine's HTTP address, but a user's function may need it
        http = function is not None and function not in BUILT_IN and self._context.engines.engines
        return self._thread.run(self._context.plugin_args(0 if http else None))

    def _saved(self, rollout_id: int) -> SampleTable:
        """Load the saved rollout from ``--load-debug-rollout-data``. With a subsample, only its first groups are
        loaded."""
        template, share = self.args.job.saved, self.args.load_debug_rollout_data_subsample
        assert template is not None
        table = SampleTable.from_parquet(template.format(rollout_id=rollout_id))
        if share is not None:
            groups = list(dict.fromkeys(table.group_id.tolist()))
            kept = groups[: max(1, round(share * len(groups)))]
            table = table.select(np.flatnonzero(np.isin(table.group_id, kept)))
        # these values are from the run that saved the rollout; this run computes its own loss weights and advantages
        table.loss_weights = None
        if table.advantages is not None:
            table.advantages, table.advantage = None, np.zeros(len(table))
        return table

    def _shape(self, table: SampleTable, samples: list[Sample]) -> dict[str, float]:
        """Add shaping terms to the table's rewards. The samples do not change, so pass rates and raw_reward do not
        change either."""
        args, grader = self.args, self._context.grader
        if not args.job.sampled or not (args.format_reward_coef or args.overlong_buffer_len is not None):
            return {}
        added, metrics = self._thread.run(grader.shaping(samples, args.rollout_max_response_len))
        table.reward += np.asarray(added)
        return metrics

    def _compare_groups(self, table: SampleTable, samples: list[Sample]) -> dict[str, float]:
        """Set the advantage of each row. Later `TokenColumns.spread_advantages` computes the tokens' advantages from
        these values."""
        args = self.args
        if self._post_process is not None:
            raw, rewards = self._post_process(self._plugin_args(), samples)
            table.reward, table.advantage = np.asarray(raw, np.float64), np.asarray(rewards, np.float64)
            return _largest(table)
        if not (args.job.sampled and args.compute_advantages_and_returns):
            return {}
        table.advantage, metrics = group_advantages(
            table.reward,
            *table.compared(),
            args.advantage_estimator,
            std_normalization=args.grpo_std_normalization,
            normalize=args.rewards_normalization,
        )
        return prefixed("rollout/", metrics) | _largest(table)

    def _warn_of_old_weights(self, table: SampleTable, version: int | None) -> None:
        """Warn once if tokens from older weights are trained on without a correction."""
        args = self.args
        corrected = args.correction != "none" or args.use_opsm or args.use_rollout_logprobs
        trained = args.job.loss == "policy" and args.job.trains
        if self._warned_of_old_weights or corrected or not trained or version is None:
            return
        old = int(np.count_nonzero((table.weight_versions < version) & table.loss_mask))
        if old:
            self._warned_of_old_weights = True
            logger.warning(
                "%d of %d response tokens to train on were sampled with older weights than the trainer's, and no flag "
                "corrects for this. Consider --correction tis, --use-opsm, --max-weight-staleness or "
                "--mask-offpolicy-in-partial-rollout. This warning is logged only once. The metrics "
                "rollout/weight_staleness/* report for each rollout how old the weights were",
                old,
                int(np.count_nonzero(table.loss_mask)),
            )

    def _metrics(
        self,
        output: RolloutFnTrainOutput,
        table: SampleTable,
        reward_key: str | None,
        version: int | None,
        seconds: float,
    ) -> dict[str, float]:
        metrics = rollout_metrics(self.args, output.samples, reward_key, version, table)
        if not self.args.job.sampled:
            return {**metrics, "perf/rollout_time": seconds}
        if self.args.job.saved is None:
            metrics |= perf_metrics(self.args.rollout_num_gpus, output.generated or [], seconds)
            metrics["rollout/engine_deaths"] = float(self._context.engines.deaths.total())
        return {**metrics, **self._context.grader.metrics()}

    def _save(self, table: SampleTable, rollout_id: int | str) -> None:
        template = self.args.save_debug_rollout_data
        # a path without {rollout_id} is one file for all rollouts, and evaluations must not overwrite it
        if template is not None and ("{rollout_id" in template or isinstance(rollout_id, int)):
            table.to_parquet(template.format(rollout_id=rollout_id))


def _largest(table: SampleTable) -> dict[str, float]:
    """The largest absolute advantage of a row. This advantage is huge if the standard deviation of a group is almost
    zero."""
    return {"rollout/advantages_abs_max": float(np.abs(table.advantage).max())} if len(table) else {}


async def probe(engines: Sequence[Engine], vocab_size: int, temperature: float) -> SampleTable:
    """Let each engine generate one response to each of ``PROMPTS`` fixed prompts. Each response is a row of the
    returned table, and its ``group_id`` is the number of the engine."""
    prompts = [
        [(7919 * (p * PROMPT_TOKENS + i + 1)) % vocab_size for i in range(PROMPT_TOKENS)] for p in range(PROMPTS)
    ]
    params, groups = SamplingParams(NEW_TOKENS, temperature, ignore_eos=True), list[list[Sample]]()
    for number, engine in enumerate(engines):
        requests = [GenerateRequest(f"probe-{number}-{i}", tuple(p), params) for i, p in enumerate(prompts)]
        groups.append([])
        for i, result in enumerate(await engine.generate(requests)):
            row = Sample(group_index=number, index=number * PROMPTS + i, tokens=list(prompts[i]), reward=0.0)
            row.append_response_tokens(result.output_ids, result.log_probs, weight_versions=result.weight_versions)
            row.status = Status.COMPLETED
            groups[-1].append(row)
    return SampleTable.from_samples(groups)


def disagreement(table: SampleTable, log_probs: np.ndarray, version: int) -> np.ndarray:
    """[engines] how much each engine disagrees with the trainer: the mean absolute difference between their log-probs,
    in nats. The mean is over the tokens of the engine's responses in ``table`` (from `probe`). The value is inf if one
    of these tokens has another weight version than ``version``.

    ``log_probs``: the trainer's log-probs, [response tokens of the table].
    """
    gap = np.where(table.weight_versions == version, np.abs(table.rollout_log_probs - log_probs), np.inf)
    engine_of_token = np.repeat(table.group_id, table.response_lengths)
    return np.array([gap[engine_of_token == number].mean() for number in np.unique(table.group_id)])
