"""Generates the responses of groups of samples (with retries), applies sample hooks, and grades the samples."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from slimelite.arguments import RewardArgs
from slimelite.arguments.rollout import EPISODE, PROGRAM
from slimelite.base.guard import PluginError, own_traceback
from slimelite.engines.protocol import GenerateRequest, GenerateResult, SamplingParams, stream_seed
from slimelite.rewards.grader import RewardError, route_of
from slimelite.rollout.context import Plugin, PluginArgs, RolloutContext, flatten
from slimelite.rollout.pool import IS_GONE, TELLS, AgentState, Outcome
from slimelite.samples.sample import FINISH_STATUS, UNSTAMPED, Generated, Sample, Status
from slimelite.slime.plugins import load_function

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

ATTEMPTS = 3
RETRY_SECONDS = 0.5
FINISHED = (Status.COMPLETED, Status.TRUNCATED, Status.FAILED)


def slime_params(params: SamplingParams, seed: int | None) -> dict[str, object]:
    """The sampling parameters as a dict with SGLang's names, for custom generate functions."""
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(params).items()}
    # slime calls the seed sampling_seed, and does not pass ignore_eos
    for unknown in ("seed", "ignore_eos", "kept", "calls", "grammar_after", "begun"):
        del values[unknown]
    seeded = {} if seed is None else {"sampling_seed": seed}
    return {**values, "no_stop_trim": True, "spaces_between_special_tokens": False, **seeded}


def remaining_params(sample: Sample, params: SamplingParams, max_context_len: int, seed: int | None) -> SamplingParams:
    """A copy of ``params`` with ``seed``. Its max_new_tokens is the number of tokens by which this response may still
    grow. It is 0 or less if the response may not grow."""
    return replace(params.after(sample.response_length, max_context_len - sample.total_length), seed=seed)


def add_result(sample: Sample, result: GenerateResult, tokenizer: PreTrainedTokenizerBase, skip_special: bool) -> None:
    """Append an engine's tokens to ``sample``. The whole response is decoded to text again, because one character may
    consist of several tokens."""
    ids, log_probs, versions = result.columns
    sample.append_response_tokens(
        ids, log_probs, weight_versions=versions, kept=result.kept, constrained=result.constrained
    )
    sample.response = str(tokenizer.decode(sample.response_ids, skip_special_tokens=skip_special))
    sample.status = FINISH_STATUS[result.finish_reason]


def stamp_versions(sample: Sample, version: int, before: Sample | None = None) -> None:
    """Give ``version``, the engines' current weight version, to all response tokens without a weight version.

    Some generate functions record no versions. slime's generate functions record one version for each call, not for
    each token.
    ``before``: the sample that the generate function continued. The tokens of ``before`` keep their versions.
    """
    stamps: Any = vars(sample)["weight_versions"]
    if isinstance(stamps, np.ndarray) and len(stamps) == sample.response_length:
        if (unknown := stamps == UNSTAMPED).any():
            stamps = np.where(unknown, np.int32(version), stamps)
            sample.weight_versions = stamps
        return
    if len(stamps) != sample.response_length:
        goes_on = before is not None and sample.tokens[: before.total_length] == before.tokens
        known = before.weight_versions if before is not None and goes_on else []
        stamps = [*known, *[UNSTAMPED] * (sample.response_length - len(known))]
    sample.weight_versions = [version if v == UNSTAMPED else int(v) for v in stamps]


def is_finished(samples: Sequence[Sample]) -> bool:
    """Whether every sample of a group has its complete response."""
    return all(s.status in FINISHED for s in samples)


def without_dropped(samples: Sequence[Sample], args: RewardArgs) -> list[Sample]:
    """Return all ``samples``, or with ``--reward-error drop`` only those whose reward did not fail."""
    return [s for s in samples if args.reward_error != "drop" or "reward_error" not in s.metadata]


def check_scored(samples: Sequence[Sample], what: str) -> None:
    """Raise an error if no sample has a valid reward, because then there is nothing to train on. This check does not
    depend on --reward-error.

    Raises:
        ValueError: the reward of every sample failed. The message contains ``what``, a name for the samples.
    """
    errors = [s.metadata["reward_error"] for s in samples if "reward_error" in s.metadata]
    if len(errors) == len(samples):
        raise ValueError(f"{what}: the reward of every sample failed ({len(errors)} samples); last error: {errors[-1]}")


def restart(sample: Sample) -> Sample:
    """A copy of the sample without its response."""
    return replace(
        sample,
        tokens=sample.tokens[: sample.prompt_length],
        response="",
        response_length=0,
        reward=None,
        loss_mask=None,
        rollout_log_probs=None,
        weight_versions=[],
        rollout_top_p_token_ids=None,
        rollout_top_p_token_offsets=None,
        teacher_log_probs=None,
        remove_sample=False,
        status=Status.PENDING,
        metadata={k: v for k, v in sample.metadata.items() if k != "reward_error"},
    )


@dataclass(slots=True)
class GroupGenerator:
    """Turns groups of unfinished samples into groups of finished, scored samples, for a training rollout or an
    evaluation.

    If a response was aborted, its group is returned as it was submitted. With ``--partial-rollout`` the returned group
    also contains the tokens that were generated before the abort.

    Args:
        stream: a name. The seeds of the samples are derived from this name and the run's seed.
        params: the sampling parameters of every request.
        max_context_len: the maximum number of tokens of prompt and response together. If it is None, the engine's limit
            applies.
        generate_path, rm_type: the generate function and the reward for samples that do not name their own.

    Attributes:
        stopping: to get unfinished groups back, set this to True and abort the engines' requests.
        requests, prompt_tokens, cached_tokens: totals over the engine's requests. Cached tokens are prompt tokens that
            needed no prefill.
        generated: one entry for each response that was generated, whether it was kept or not.
    """

    context: RolloutContext
    stream: str
    rollout_id: int
    params: SamplingParams
    max_context_len: int | None = None
    generate_path: str | None = None
    rm_type: str | None = None
    reward_key: str | None = None
    evaluation: bool = False
    stopping: bool = field(default=False, init=False)
    requests: int = field(default=0, init=False)
    prompt_tokens: int = field(default=0, init=False)
    cached_tokens: int = field(default=0, init=False)
    retries: int = field(default=0, init=False)
    generated: list[Generated] = field(default_factory=list, init=False)
    _logged: set[type[Exception]] = field(default_factory=set, init=False)
    _turns: defaultdict[int, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock), init=False)
    _hooks: list[Plugin] = field(init=False)
    _request_numbers: Iterator[int] = field(default_factory=count, init=False)

    def __post_init__(self) -> None:
        self._hooks = load_hooks(self.context.args.rollout_sample_hook_path)
        if self.context.args.keeps_ids and not self.evaluation:
            self.params = self.params.telling()

    def go_on(self, rollout_id: int, generated: list[Generated]) -> None:
        """Continue after `stopping` was set, in the later rollout ``rollout_id``. New responses are added to
        ``generated``, the later rollout's list."""
        self.stopping, self.rollout_id, self.generated = False, rollout_id, generated

    def parts(self, groups: list[list[Sample]]) -> list[list[list[Sample]]]:
        """Divide groups into parts; `generate` is called once for each part. Each group is a separate part, but with
        ``--deterministic-mode`` all groups together are one part."""
        together = groups and self.context.args.deterministic_mode
        return [groups] if together else [[group] for group in groups]

    async def generate(self, groups: list[list[Sample]]) -> list[Outcome]:
        """Generate the responses of ``groups``, which is one of the `parts`, and grade them.

        With ``--deterministic-mode`` group i goes to engine i mod n (of n engines). On each engine, a custom generate
        function is called for one group after the other. Grading starts when all groups have their responses. So
        repeated runs make all calls in the same order.

        Raises:
            ValueError: an engine refused a request (a retry would not help), or grading raised an error.
        """
        if not self.context.args.deterministic_mode:
            return [await self.generate_one(group) for group in groups]
        count = len(self.context.engines.engines)
        working = [asyncio.create_task(self._answer(group, i % count)) for i, group in enumerate(groups)]
        try:
            answers = await asyncio.gather(*working)
        finally:  # after an error, the other tasks end too
            for task in working:
                task.cancel()
        return list(await asyncio.gather(*(self._finish(*answer) for answer in answers)))

    async def generate_one(self, group: list[Sample]) -> Outcome:
        """Generate the responses of a group on the least loaded engine, and grade them."""
        return await self._finish(*await self._answer(group))

    async def _answer(self, group: list[Sample], engine: int | None = None) -> Outcome:
        """The group with its responses. Makes at most ``ATTEMPTS`` attempts. ``engine`` None: use the least loaded
        engine."""
        path = group[0].generate_function_path or self.generate_path
        turn = nullcontext() if engine is None or path is None else self._turns[engine]
        samples, error, used, due = group, None, None, 0.0
        for attempt in range(1, ATTEMPTS + 1):
            async with turn:  # a failed group is tried again after the others, so all failed groups wait together
                if attempt > 1:
                    await asyncio.sleep(due - time.monotonic())
                if is_finished(samples):
                    break
                waiting = sum(s.status not in FINISHED for s in samples)
                async with self.context.engines.lease(waiting, engine, avoid=used) as used:
                    if self.stopping:
                        break
                    if path is None:
                        error = await self._ask_engine(samples, used)
                    else:
                        samples, error = await self._ask_plugin(samples, path, used)
                if error is None or self.stopping:
                    break
                await self.context.engines.check(used)
                self.retries += 1
                self._tell(
                    error, f"attempt {attempt} to answer prompt {group[0].group_index} failed", plugin=path is not None
                )
                due = time.monotonic() + RETRY_SECONDS * attempt
        kept = is_finished(samples) or self.context.args.partial_rollout
        return samples if kept else group, error

    def _tell(self, error: Exception, what: str, *, plugin: bool) -> None:
        """Log an error. If a plugin raised it, the log has the plugin's traceback. Only the first error of each type is
        a warning."""
        level = logging.INFO if type(error) in self._logged else logging.WARNING
        self._logged.add(type(error))
        logger.log(level, "%s: %s", what, own_traceback(error) if plugin else repr(error))

    async def _ask_engine(self, samples: list[Sample], engine: int) -> Exception | None:
        """Add the engine's responses to the unfinished ``samples``. Returns the error if this fails and another attempt
        may succeed.
        """
        try:
            await self._sample(samples, engine)
        except ValueError:
            raise
        except Exception as error:
            return error
        return None

    async def _sample(self, samples: list[Sample], engine: int) -> None:
        info = self.context.engines.infos[engine]
        longest = min(info.max_context_len, self.max_context_len or info.max_context_len)
        unfinished: list[Sample] = []
        requests: list[GenerateRequest] = []
        for sample in samples:
            if sample.status in FINISHED:
                continue
            params = remaining_params(sample, self.params, longest, self._seed(sample) if info.seeds else None)
            if params.max_new_tokens <= 0:
                sample.status = Status.TRUNCATED
                continue
            unfinished.append(sample)
            requests.append(self._request(sample, params))
        results = await self.context.engines.generate(engine, requests)
        self.requests += len(requests)
        self.prompt_tokens += sum(len(r.input_ids) for r in requests)
        self.cached_tokens += sum(r.cached_tokens for r in results)
        self.generated += [Generated(r.length, r.length) for r in results]
        if self.context.args.partial_rollout or all(r.finish_reason != "abort" for r in results):
            for sample, result in zip(unfinished, results, strict=True):
                add_result(sample, result, self.context.tokenizer, self.params.skip_special_tokens)

    def _request(self, sample: Sample, params: SamplingParams) -> GenerateRequest:
        return GenerateRequest(
            request_id=f"{self.stream}-{sample.index}-{next(self._request_numbers)}",
            input_ids=tuple(sample.tokens),
            params=params,
            prefix_key=f"{self.stream}-{sample.group_index}",
            position=sample.response_length,
        )

    def _seed(self, sample: Sample) -> int:
        assert sample.index is not None
        return stream_seed(self.context.args.rollout_seed, f"{self.stream}/{sample.group_index}", sample.index)

    def session_id(self, sample: Sample) -> str:
        """The id of a sample's session. A generate function may open a session with this id."""
        return sample.session_id or f"{self.stream}-{sample.index}".replace("/", "-")

    async def _ask_plugin(self, samples: list[Sample], path: str, engine: int) -> Outcome:
        """Replace each unfinished sample by the plugin's result. If the plugin fails for a sample, this sample does not
        change."""
        function, ours = load_function(path), path in (EPISODE, PROGRAM)  # these two do not need an engine's address
        args = await self.context.plugin_args(None if ours else engine, evaluation=self.evaluation)
        pending = [s for s in samples if s.status not in FINISHED]
        answers = await self.context.each(self._attempt(function, args, s, engine) for s in pending)
        error = next((a for a in answers if isinstance(a, Exception)), None)
        made = {id(s): a for s, a in zip(pending, answers, strict=True) if not isinstance(a, Exception)}
        return [s for sample in samples for s in made.get(id(sample), [sample])], error

    async def _attempt(
        self, function: Plugin, args: PluginArgs, sample: Sample, engine: int
    ) -> list[Sample] | Exception:
        session_id = self.session_id(sample)
        state = self.context.states[session_id] = AgentState(engine, args.keeps_ids)
        TELLS.set(args.keeps_ids)
        # the engines belong to the rollout's event loop, but the plugin may run on another event loop
        IS_GONE.set(lambda: self.context.thread.result(self.context.engines.is_gone(engine)))
        try:
            return await self._call(function, args, sample, state)
        except (PluginError, RewardError):
            raise  # these errors end the run
        except Exception as error:
            return error
        finally:
            self.context.states.pop(session_id, None)

    async def _call(self, function: Plugin, args: PluginArgs, sample: Sample, state: AgentState) -> list[Sample]:
        # requests with the same seed draw the same numbers, so only deterministic mode passes a seed, as in slime
        seed = self._seed(sample) if self.context.args.deterministic_mode else None
        copied = Sample.from_dict(sample.to_dict())  # a failing plugin must not change the original
        copied.session_id = self.session_id(sample)
        extra = {"evaluation": self.evaluation} if "evaluation" in inspect.signature(function).parameters else {}
        answer = function(args, copied, slime_params(self.params, seed), **extra)
        returned = await self._within(self.context.args.generate_timeout, answer, state)
        made = flatten([returned])
        if not made:
            raise ValueError("the custom generate function returned no sample")
        for s in made:
            s.group_index = sample.group_index
            s.index = sample.index if s.index is None else s.index
            s.status = Status.COMPLETED if s.status == Status.PENDING else s.status
            stamp_versions(s, self.context.engines.weight_version, sample)
            s.check_aligned()
        self.generated += [s.generated_since(sample) for s in made]
        if any(s.status == Status.ABORTED for s in made):
            # a single unfinished response can be continued, but the interrupted position in a fan-out is unknown
            return made if self.context.args.partial_rollout and isinstance(returned, Sample) else [sample]
        return made

    async def _within(self, seconds: float, answer: Awaitable[object], state: AgentState) -> object:
        """Wait for the answer for at most ``seconds``, then raise TimeoutError. Unlike `asyncio.wait_for`, this ends
        even if the coroutine ignores cancellation.

        The time during which the agent is paused does not count.
        """
        task, end = asyncio.ensure_future(answer), time.monotonic() + seconds
        try:
            while not (done := task.done()) and (left := end + state.paused - time.monotonic()) > 0:
                await asyncio.wait([task], timeout=left)
        finally:
            task.cancel()  # does nothing if the task is done
        if not done:
            raise TimeoutError(f"the custom generate function took longer than --generate-timeout {seconds:g} s")
        return task.result()

    async def _finish(self, samples: list[Sample], error: Exception | None) -> Outcome:
        """Run the sample hooks on a group with responses, and grade it."""
        if not is_finished(samples):
            return samples, error
        if self._hooks:
            args = await self.context.plugin_args()
            offered = {"rollout_id": self.rollout_id, "evaluation": self.evaluation}
            samples = [await hooked(self._hooks, args, s, **offered) for s in samples]
        teacher = None if self.evaluation else self.context.teacher
        if teacher is None:
            await self._grade(samples)
        else:
            await asyncio.gather(self._grade(samples), teacher.score(samples))
        return samples, error

    async def _grade(self, samples: list[Sample]) -> None:
        key = self.reward_key
        if self.context.args.group_rm:
            await self.context.grader.grade(samples, rm_type=self.rm_type, reward_key=key)
            return
        self.context.grader.check([s for s in samples if s.reward is not None], reward_key=key)
        families: dict[int | None, list[Sample]] = {}
        for sample in samples:
            if sample.reward is None:
                families.setdefault(sample.index if sample.rollout_id is None else sample.rollout_id, []).append(sample)
        # siblings of a fan-out are graded as a group; all other samples are graded one by one, concurrently
        single: list[list[Sample]] = []
        several: list[list[Sample]] = []
        for family in families.values():
            (single if len(family) == 1 or self._is_conversation(family) else several).append(family)
        parts = [([family[-1] for family in single], False), *((family, True) for family in several)]
        for part, together in parts:
            await self.context.grader.grade(part, rm_type=self.rm_type, group_rm=together, reward_key=key)
        for *earlier, last in single:
            for branch in earlier:
                branch.reward = last.reward

    def _is_conversation(self, family: list[Sample]) -> bool:
        """Whether a rule scores the branches of one session. If so, the answer is in the last branch of the session."""
        args, last = self.context.args, family[-1]
        custom = args.custom_rm_path if self.rm_type is None else None
        if "turns" not in last.metadata or vars(last).get("role"):  # each player has its own answer
            return False
        return not route_of(last, custom, self.rm_type or args.rm_type).custom


def load_hooks(paths: Iterable[str]) -> list[Plugin]:
    """Load the functions at ``paths``, the value of ``--rollout-sample-hook-path``."""
    return [load_function(path, "--rollout-sample-hook-path") for path in paths]


async def hooked(hooks: Iterable[Plugin], args: PluginArgs, sample: Sample, **offered: object) -> Sample:
    """Apply all ``hooks`` to ``sample``, and return the result. An entry of ``offered`` is passed to a hook only if the
    hook has a parameter with the entry's name.

    Raises:
        ValueError: a hook returned neither a sample nor None.
    """
    for hook in hooks:
        known = inspect.signature(hook).parameters
        result = hook(args, sample, **{name: value for name, value in offered.items() if name in known})
        result = await result if inspect.isawaitable(result) else result
        if result is not None and not isinstance(result, Sample):
            raise ValueError(f"sample hook {hook.__name__} returned a {type(result).__name__}, not a Sample or None")
        sample = sample if result is None else result
    return sample
