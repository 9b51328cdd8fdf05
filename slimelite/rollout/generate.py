"""Generates one training rollout: turns prompts into ``--rollout-batch-size`` scored groups.

Groups are generated concurrently. When a group is complete, the filter decides whether it is accepted or dropped. If a
group is dropped or fails, a group with a new prompt replaces it. Metrics count every group that is not used. A group
that becomes complete when the batch is already full is surplus. Surplus groups go back to the data source, and come
first in the next rollout. Incomplete groups also go back, as prompts without a response. With ``--partial-rollout``
they go back with the tokens generated so far, and groups of agents are paused (`rollout.sessions`).

With ``--deterministic-mode`` the groups are sent to the engines in waves: group i of a wave goes to engine i mod n (of
n engines). When all groups of a wave are complete, they are accepted or dropped in the order in which they were sent.
So the same weights and seeds give a bit-identical rollout.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from slimelite.engines.params import SamplingParams
from slimelite.rollout.context import PluginArgs, RolloutFnEvalOutput, RolloutFnTrainOutput, load_plugin
from slimelite.rollout.evaluation import evaluate_datasets
from slimelite.rollout.filters import NO_REWARD, DroppedGroups, DynamicFilterOutput, verdict
from slimelite.rollout.groups import GroupGenerator, is_finished, restart, without_dropped
from slimelite.rollout.pool import Outcome, WaitingGroup
from slimelite.samples.sample import Sample

if TYPE_CHECKING:
    from slimelite.rollout.sessions import PooledSessions

logger = logging.getLogger(__name__)

# time limit for requests in flight to end after the batch is full [s]
STOP_SECONDS = 600.0
# time between two checks of requests that are about to end [s]
SHORTLY = 0.01
# counters that every rollout logs as rollout/<name>
COUNTS = (
    "submitted_groups",
    "dropped_groups",
    "failed_groups",
    "reused_groups",  # finished in an earlier rollout
    "resumed_groups",
    "stale_groups",
    "surplus_groups",
    "unfinished_groups",
)


def generate_rollout(
    args: PluginArgs, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """The default function of ``--rollout-function-path``. A custom rollout function may call this function and change
    its result."""
    context = args.rollout_context
    if evaluation:
        return context.thread.run(evaluate_datasets(context, args.eval_datasets, rollout_id))
    return context.thread.run(Collection(args, rollout_id, data_source).collect())


def offline_rollout(
    args: PluginArgs, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Read ``--rollout-batch-size`` conversations (SFT) or pairs (DPO) from the data, without an engine.

    With ``evaluation``, this function generates responses and scores them, as `generate_rollout` does.

    Raises:
        ValueError: a prompt is not a conversation, a sample has no pair, or the chat template refuses the messages.
    """
    if evaluation:
        return generate_rollout(args, rollout_id, data_source, evaluation=True)
    from slimelite.data.conversations import ChatReader  # only supervised runs need it

    settings = (args.loss_mask_type, args.apply_chat_template_kwargs, args.rollout_max_context_len)
    chat = ChatReader(args.rollout_context.tokenizer, *settings)
    groups = data_source.get_samples(args.rollout_batch_size)
    samples = [s for group in groups for s in group]
    if args.job.loss == "paired":
        pairs = [(chat.scored_pair if args.loss.scores else chat.pair)(sample) for sample in samples]
        untrained = sum(chosen.remove_sample for chosen, _ in pairs)
        if untrained:
            logger.warning("%d of %d pairs have a reply without a token to train on", untrained, len(pairs))
        return RolloutFnTrainOutput(pairs, {"rollout/untrained_pairs": float(untrained)})
    for sample in samples:
        (chat.judge if args.loss.judged else chat.fill)(sample)
    untrained = sum(s.remove_sample for s in samples)
    if untrained:
        logger.warning("%d of %d conversations have no token to train on", untrained, len(samples))
    return RolloutFnTrainOutput(groups, {"rollout/untrained_samples": float(untrained)})


BUILT_IN = (generate_rollout, offline_rollout)


class Collection:
    """One training rollout, while its batch is being filled with accepted groups."""

    def __init__(self, plugin_args: PluginArgs, rollout_id: int, data_source: Any) -> None:
        self.plugin_args, self.context = plugin_args, plugin_args.rollout_context
        self.args = self.context.args
        args = self.args
        self.rollout_id = rollout_id
        self.source = data_source
        self.target = args.rollout_batch_size
        self.filter = load_plugin(args.dynamic_sampling_filter_path, "--dynamic-sampling-filter-path")
        self.generator = GroupGenerator(
            self.context,
            "train",
            rollout_id,
            SamplingParams.of(args, "rollout"),
            max_context_len=args.rollout_max_context_len,
            generate_path=args.custom_generate_function_path,
            reward_key=args.reward_key,
        )
        self.accepted: list[list[Sample]] = []
        self.surplus: list[list[Sample]] = []
        self.finished: list[list[Sample]] = []  # all groups that this rollout finished, including dropped groups
        # task -> the groups as they were submitted; in the order of submission
        self.tasks: dict[asyncio.Task[list[Outcome]], list[list[Sample]]] = {}
        self.in_flight = 0
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self.dropped = DroppedGroups(args, rollout_id, self.counts)

    async def collect(self) -> RolloutFnTrainOutput:
        """Generate groups until the batch is full, then give all other groups back to the data source.

        Raises:
            RolloutError: too many groups are dropped or fail in a row.
            ValueError: the data source has no prompts.
        """
        await self.context.engines.refresh()
        if self.context.agents is not None:
            self.context.agents.admit()
        try:
            fresh = self._take(self.target)
            # over-sample only the missing groups; otherwise every second rollout would consist of surplus groups only
            wanted = math.ceil((self.target - len(self.accepted)) * self.args.over_sampling_batch_size / self.target)
            self._start(fresh + self._take(wanted - len(fresh)))
            while (missing := self.target - len(self.accepted)) > 0:
                if missing > self.in_flight:
                    self._start(self._take(missing - self.in_flight))
                else:
                    all_or_one = asyncio.ALL_COMPLETED if self.args.deterministic_mode else asyncio.FIRST_COMPLETED
                    self._judge_all(await self._done(all_or_one))
            unfinished = await self._stop()
        except BaseException:
            await self._cancel()
            raise
        finally:
            self.dropped.save()
        self.source.add_samples(self.surplus + unfinished)
        self.counts["surplus_groups"] = len(self.surplus)
        self.counts["unfinished_groups"] = len(unfinished)
        return self._output()

    def _take(self, number: int) -> list[list[Sample]]:
        """Take up to ``number`` groups to generate. Groups that an earlier rollout finished are judged immediately."""
        if number <= 0:
            return []
        groups = self.source.get_samples(number)
        if not groups and not self.tasks:
            raise ValueError("the data source returned no prompts; check --prompt-data or --data-source-path")
        fresh = []
        version = self.context.version_trained_on(self.rollout_id)
        for samples in groups:
            limit = self.args.max_weight_staleness
            age = max((version - int(v.min()) for s in samples if len(v := s.trained_versions)), default=0)
            waiting = self._waiting(samples, version)
            if waiting is not None:
                self.counts["resumed_groups"] += 1
                self._go_on(waiting)
                continue
            if limit is not None and age > limit:
                self.counts["stale_groups"] += 1
                self.dropped.keep(samples, "stale", f": {age} weight updates old")
                if len({s.index for s in samples}) < len(samples):  # a fan-out no longer contains its prompt
                    logger.warning(
                        "dropped all samples of prompt %s, because their tokens are older than --max-weight-staleness",
                        samples[0].group_index,
                    )
                    continue
                samples = [restart(s) for s in samples]
            if is_finished(samples) and all(s.reward is not None for s in samples):
                self.counts["reused_groups"] += 1
                self._judge(samples)
                continue
            self.counts["resumed_groups"] += any(s.response_length for s in samples)
            fresh.append(samples)
        return fresh

    def _start(self, groups: list[list[Sample]]) -> None:
        self.in_flight += len(groups)
        self.counts["submitted_groups"] += len(groups)
        for part in self.generator.parts(groups):
            self.tasks[asyncio.create_task(self.generator.generate(part))] = part

    def _waiting(self, samples: list[Sample], version: int) -> WaitingGroup | None:
        """The agent group of ``samples`` if it has waited since an earlier rollout, else None. If its tokens are too
        old, the group is cancelled."""
        agents, limit = self.context.agents, self.args.max_weight_staleness
        waiting = agents.waiting.pop(samples[0].group_index, None) if agents is not None else None
        if agents is None or waiting is None or limit is None:
            return waiting
        versions = [v for s in agents.of(map(self.generator.session_id, samples)) for v in s.weight_versions]
        if version - min(versions, default=version) <= limit:
            return waiting
        self.counts["stale_groups"] += 1
        waiting.cancel()
        return None

    def _go_on(self, waiting: WaitingGroup) -> None:
        waiting.go_on(self.rollout_id, self.generator.generated)
        self.in_flight += 1
        self.tasks[waiting.task] = [waiting.group]
        self.context.sessions().resume([self.generator.session_id(sample) for sample in waiting.group])

    async def _done(self, when: str, timeout: float | None = None) -> list[Outcome]:
        """Wait, then return the groups that are done, in submission order."""
        if not self.tasks:
            await asyncio.sleep(SHORTLY)
            return []
        done, pending = await asyncio.wait(self.tasks, timeout=timeout, return_when=when)
        # if result() raises, self.tasks still has every task, so _cancel ends all of them
        outcomes = [outcome for task in self.tasks if task in done for outcome in task.result()]
        self.tasks = {task: part for task, part in self.tasks.items() if task in pending}
        return outcomes

    def _judge_all(self, outcomes: list[Outcome]) -> None:
        for samples, error in outcomes:
            self.in_flight -= 1
            if error is None:
                self.finished.append(samples)
                self._judge(samples)
                continue
            self.counts["failed_groups"] += 1
            self.dropped.keep(samples, "failed", f": {error!r}")
            level = logging.INFO if self.counts["failed_groups"] > 1 else logging.ERROR
            logger.log(level, "gave up on prompt %s: %r", samples[0].group_index, error)
            self.dropped.failed(error)

    def _judge(self, graded: list[Sample]) -> None:
        """Put the group into the batch or into the surplus, or drop the group."""
        full = len(self.accepted) == self.target
        samples = without_dropped(graded, self.args)
        output = self._filter(samples)
        if not output.keep:
            if not output.keep_when_insufficient or len(self.accepted) + self.in_flight >= self.target:
                self.counts["dropped_groups"] += 1
                self.counts[f"dynamic_filter/drop_{output.reason}"] += 1
                self.dropped.keep(graded, str(output.reason))
                if not full:
                    self.dropped.dropped(graded, str(output.reason))
                note = f"dropped {self.counts['dropped_groups']} ({output.reason})"
                self.context.progress(len(self.accepted), self.target, note)
                return
            self.counts["kept_for_lack"] += 1
        self.dropped.accepted()
        (self.surplus if full else self.accepted).append(samples)
        self.context.progress(len(self.accepted), self.target, "")

    def _filter(self, samples: list[Sample]) -> DynamicFilterOutput:
        if not samples:
            return DynamicFilterOutput(False, NO_REWARD)
        if self.filter is None:
            return DynamicFilterOutput(True)
        path = self.args.dynamic_sampling_filter_path
        return verdict(self.filter(self.plugin_args, samples), f"--dynamic-sampling-filter-path {path}")

    async def _stop(self) -> list[list[Sample]]:
        """End the groups in flight. Groups that have finished are judged as usual. Unfinished groups are returned.

        Groups that have not ended after ``STOP_SECONDS`` are cancelled. The cancelled groups are returned as they were
        submitted.
        """
        self.generator.stopping = True
        agents = self.context.agents
        if agents is not None:
            agents.pause(f"{self.generator.stream}-")
        unfinished = []
        deadline = time.monotonic() + STOP_SECONDS
        while (self.tasks or (agents is not None and agents.running)) and time.monotonic() < deadline:
            # abort again in every turn, because a request may reach its engine after an earlier abort
            await self.context.engines.abort()
            unfinished += await self._leave(agents)
            for samples, error in await self._done(asyncio.ALL_COMPLETED, timeout=min(1.0, STOP_SECONDS)):
                if is_finished(samples):
                    self._judge_all([(samples, error)])
                else:
                    unfinished.append(samples)
        if self.tasks:
            stuck = [group for part in self.tasks.values() for group in part]
            names = ", ".join(str(group[0].group_index) for group in stuck)
            logger.error(
                "the groups of prompts %s did not stop within %g s (perhaps a custom generate function or a reward "
                "hangs); they are cancelled, and sampled again in the next rollout",
                names,
                STOP_SECONDS,
            )
            for task in self.tasks:
                task.cancel()
            await asyncio.wait(self.tasks, timeout=1.0)
            unfinished += stuck
        return unfinished

    async def _leave(self, agents: PooledSessions | None) -> list[list[Sample]]:
        """Remove the groups of agents from the tasks. These groups wait for the next rollout, or are cancelled. Returns
        the groups as they were submitted."""
        if agents is None:
            return []
        left = []
        ended = []
        for task, part in list(self.tasks.items()):
            ids = [self.generator.session_id(s) for group in part for s in group]
            if task.done() or next(agents.of(ids), None) is None:
                continue  # if its agents have not begun or are done, the group is treated as usual
            del self.tasks[task]
            left += part
            if self.args.partial_rollout and len(part) == 1:
                agents.waiting[part[0][0].group_index] = WaitingGroup(task, part[0], self.generator.go_on)
            else:
                task.cancel()
                ended.append(task)
        if ended:
            await asyncio.wait(ended, timeout=1.0)
        elif left:  # otherwise groups that wait for a free engine could not end
            self.context.engines.forget_load()
        return left

    async def _cancel(self) -> None:
        """Cancel all requests in flight after an error."""
        self.generator.stopping = True
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.context.engines.abort()

    def _output(self) -> RolloutFnTrainOutput:
        self.accepted.sort(key=lambda samples: samples[0].index or 0)
        if self.args.mask_offpolicy_in_partial_rollout:
            for sample in (s for samples in self.accepted for s in samples):
                values = vars(sample)
                current = np.asarray(values["weight_versions"]) == self.context.engines.weight_version
                mask = values["loss_mask"]
                sample.loss_mask = np.where(current, 1 if mask is None else np.asarray(mask), 0).tolist()
        args = self.args
        if choose := load_plugin(args.rollout_sample_filter_path, "--rollout-sample-filter-path"):
            choose(self.plugin_args, self.accepted)
        if see := load_plugin(args.rollout_all_samples_process_path, "--rollout-all-samples-process-path"):
            self.finished.sort(key=lambda samples: samples[0].index or 0)
            see(self.plugin_args, self.finished, self.source)
        metrics = {f"rollout/{name}": float(number) for name, number in self.counts.items()}
        if args.curriculum_threshold is not None:
            metrics |= self.source.heed(self.finished, args.reward_key)
        prompts, cached = self.generator.prompt_tokens, self.generator.cached_tokens
        if prompts:
            metrics["rollout/prefix_cache_hit_rate"] = cached / prompts
            metrics["rollout/avg_cached_tokens_per_sample"] = cached / self.generator.requests
        metrics["rollout/retries"] = float(self.generator.retries)
        return RolloutFnTrainOutput(self.accepted, metrics, self.generator.generated)
