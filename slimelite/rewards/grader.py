"""Samples in, rewards on them: which reward scores a sample, where it runs, and what becomes of one that fails."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from slimelite.arguments import RewardArgs
from slimelite.plugins import load_function, own_traceback
from slimelite.rewards import code
from slimelite.rewards.confine import gaps
from slimelite.rewards.custom import RewardLoop, RewardTimeout, call
from slimelite.rewards.latex import extract_boxed_answer
from slimelite.rewards.pool import WorkerPool
from slimelite.rewards.registry import BOXED, REWARD_MODEL, find_rule
from slimelite.rewards.remote_rm import ATTEMPTS, remote_rewards
from slimelite.rewards.rule import Answer, Exchange, Failure, Reward, Rule, Settings
from slimelite.rewards.shaping import overlong_penalty
from slimelite.sample import Sample, label_text

logger = logging.getLogger(__name__)

# different failures of one rollout that are kept and logged whole; the rest is counted
KEPT_REPORTS = 8
LARGEST_REWARD = 3.4e38  # what fp32, the dtype of advantages, holds
SHOWN_CHARS = 300
# a reward model of many gigabytes may come from a network disk
LOAD_SECONDS = 1800.0


class RewardError(ValueError):
    """A reward failed under ``--reward-error fail``; its one argument is the message."""


class Route(NamedTuple):
    """What scores a sample: a function's path, or the name of a rule."""

    name: str
    custom: bool


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """A reward that failed: which (``reward``), how, and on what; ``response``: its end."""

    reward: str
    failure: Failure
    index: int | None
    group_index: int | None
    label: Any
    response: str

    def __str__(self) -> str:
        return (
            f"reward {self.reward} of sample {self.index} (group {self.group_index}): {self.failure.kind}: "
            f"{self.failure.message}; label {self.label!r}, response ends {self.response!r}\n{self.failure.traceback}"
        ).rstrip()


class Grader:
    """Sets ``sample.reward``.

    Rules that are plain string work run in a thread; those that compute run in worker processes (`WorkerPool`), and so
    does the reward model; custom functions and remote_rm run on an event loop of their own (`RewardLoop`). The caller's
    event loop never waits for the processor. Failures are counted by kind, the first of each kept in ``error_reports``
    until `metrics` is called, noted in the sample's ``metadata["reward_error"]``, and settled by ``--reward-error``.
    """

    def __init__(
        self, args: RewardArgs, *, workers: int | None = None, remote_attempts: int = ATTEMPTS, warns: bool = True
    ) -> None:
        """``workers``: grading processes at most; None: one for every two processors, 1 to 8. ``warns``: the first
        failures of each kind go to the log.

        Raises:
            ValueError: ``args`` name a rule or a function that does not exist, or lack what it needs.
        """
        self.args = args
        # what custom functions get as their first argument
        self.plugin_args: Any = args
        self.error_reports: list[ErrorReport] = []
        self._errors: Counter[str] = Counter()
        self._costly = 0
        self._told = False
        self._remote_attempts = remote_attempts
        self._warns = warns
        self._functions: dict[str, Callable[..., Any]] = {}
        self._pool = WorkerPool(workers or max(1, min(8, (os.cpu_count() or 2) // 2)), args.reward_timeout)
        self._model = _reward_model(args)
        self._settings = Settings(args.code_timeout, args.code_memory_mb, args.format_regex)
        self._loop = RewardLoop()
        if args.rm_type is not None:
            self._rule(args.rm_type, args.reward_key)
        if args.custom_rm_path is not None:
            self._function(args.custom_rm_path)

    async def grade(
        self,
        samples: Sequence[Sample],
        *,
        rm_type: str | None = None,
        custom_rm_path: str | None = None,
        group_rm: bool | None = None,
        reward_key: str | None = None,
    ) -> None:
        """Score every sample.

        A sample's own ``custom_rm_path`` comes first, then --custom-rm-path, its ``metadata["rm_type"]``, --rm-type.
        The arguments of this call stand in for the flags (an ``rm_type`` given here, by an evaluation dataset, also
        stands above --custom-rm-path). ``group_rm``: custom functions get all samples at once, as with --group-rm;
        fan-out siblings are scored so. ``reward_key``: the entry of a dict reward that must be a number.

        Raises:
            ValueError: nothing says how to score a sample, or it names what does not exist.
            RewardError: a reward failed, and --reward-error is ``fail``.
        """
        flag_path = self.args.custom_rm_path if rm_type is None else None
        whole = self.args.group_rm if group_rm is None else group_rm
        parts: dict[Route, list[Sample]] = {}
        for sample in samples:
            route = route_of(sample, custom_rm_path or flag_path, rm_type or self.args.rm_type)
            parts.setdefault(route, []).append(sample)
        key = reward_key or self.args.reward_key
        for route in parts:
            _ = self._function(route.name) if route.custom else self._rule(route.name, key)
        jobs = [self._custom(r.name, p, whole) if r.custom else self._ruled(r.name, p) for r, p in parts.items()]
        for (route, part), outcomes in zip(parts.items(), await asyncio.gather(*jobs), strict=True):
            for sample, outcome in zip(part, outcomes, strict=True):
                self._settle(sample, route, outcome, key)

    async def shaping(self, samples: Sequence[Sample], max_length: int) -> tuple[list[float], dict[str, float]]:
        """What --format-reward-coef and --overlong-buffer-len add to the reward of each sample, and the means of it.

        ``max_length``: tokens that a response may have. A format that cannot be judged adds 0 and is counted.
        """
        args, added, metrics = self.args, [0.0] * len(samples), {}
        if args.format_reward_coef and samples:
            outcomes = await self._ruled("format", list(samples))
            scores = [0.0 if isinstance(o, Failure) else float(o) for o in outcomes]
            self._errors.update(o.kind for o in outcomes if isinstance(o, Failure))
            added = [args.format_reward_coef * score for score in scores]
            metrics["rollout/format_reward"] = math.fsum(scores) / len(scores)
        if args.overlong_buffer_len is not None and samples:
            limits = max_length, args.overlong_buffer_len, args.overlong_penalty_factor
            penalties = [overlong_penalty(s.response_length, *limits) for s in samples]
            added = [a + p for a, p in zip(added, penalties, strict=True)]
            metrics["rollout/overlong_penalty"] = math.fsum(penalties) / len(penalties)
        return added, metrics

    def check(self, samples: Sequence[Sample], *, reward_key: str | None = None) -> None:
        """Hold samples that brought a reward (of a custom generate function) to the same rules: a finite number.

        Raises:
            RewardError: as `grade`.
        """
        route = Route("of the generate function", custom=True)
        for sample in samples:
            self._settle(sample, route, sample.reward, reward_key or self.args.reward_key)

    def metrics(self) -> dict[str, float]:
        """``rollout/reward_errors`` in all and by kind since the last call; clears them and ``error_reports``.

        ``rollout/costly_answers``: those that algebra gave up on, where there were any.
        """
        counts = {f"rollout/reward_errors/{kind}": float(n) for kind, n in sorted(self._errors.items())}
        total = float(self._errors.total())
        self._errors.clear()
        self.error_reports = []
        if self._costly:
            counts["rollout/costly_answers"] = float(self._costly)
            self._costly = 0
        return {"rollout/reward_errors": total, **counts}

    def close(self) -> None:
        """End workers and threads."""
        self._pool.close()
        if self._model is not None:
            self._model.close()
        self._loop.close()

    def _rule(self, rm_type: str, reward_key: str | None) -> Rule | None:
        """The rule, with what it needs checked; None for remote_rm and reward_model."""
        rule = find_rule(rm_type)
        if rule is code.RULE and not self._told:
            self._told = True
            for gap in gaps():
                logger.warning(
                    "--rm-type code runs what the model writes, and on this machine %s (docs/rewards.md)", gap
                )
        if rm_type == REWARD_MODEL and self._model is None:
            raise ValueError("--rm-type reward_model needs --reward-model-path")
        if (
            rule is None
            and rm_type != REWARD_MODEL
            and not (self.args.rm_url or "").startswith(("http://", "https://"))
        ):
            raise ValueError(f"--rm-type {rm_type} needs --rm-url http://..., not {self.args.rm_url!r}")
        if rule is not None and isinstance(rule.zero, dict) and reward_key not in rule.zero:
            raise ValueError(f"--rm-type {rm_type} gives a dict: add --reward-key, one of {', '.join(rule.zero)}")
        return rule

    def _function(self, path: str) -> Callable[..., Any]:
        if path not in self._functions:
            self._functions[path] = load_function(path)
        return self._functions[path]

    async def _ruled(self, rm_type: str, samples: list[Sample]) -> list[Any]:
        if rm_type == REWARD_MODEL:
            assert self._model is not None
            return list(await self._model.run([exchange_of(s) for s in samples]))
        rule = find_rule(rm_type)
        boxed = rm_type.startswith(BOXED)
        texts = [(extract_boxed_answer(s.response) or "") if boxed else s.response for s in samples]
        if rule is None:
            return await self._remote(samples, texts)
        answers = [answer_of(s, text, self._settings) for s, text in zip(samples, texts, strict=True)]
        missing = Failure("invalid", f"{rm_type} compares with a label, and the sample has none; set --label-key")
        unlabelled = rule.zero if self.args.unlabelled_is_zero else missing
        results: list[Any] = await asyncio.to_thread(lambda: [_quick(rule, a) for a in answers])
        if rule.needs_label:
            results = [unlabelled if s.label is None else r for s, r in zip(samples, results, strict=True)]
        undecided = [i for i, result in enumerate(results) if result is None]
        slow = await self._pool.run([(rule.name, answers[i]) for i in undecided]) if undecided else []
        for i, result in zip(undecided, slow, strict=True):
            costly = isinstance(result, Failure) and result.kind == "costly"
            self._costly += costly
            results[i] = rule.zero if costly else result
        return results

    async def _remote(self, samples: list[Sample], texts: list[str]) -> list[Any]:
        assert self.args.rm_url is not None
        pairs = zip(samples, texts, strict=True)
        payloads = [{"prompt": s.prompt, "response": text, "label": s.label} for s, text in pairs]
        # it has its own limits: attempts, and seconds for each
        work = remote_rewards(self.args.rm_url, payloads, attempts=self._remote_attempts)
        answers = await self._loop.run(work, timeout=None)
        return [_failure(a) if isinstance(a, BaseException) else a for a in answers]

    async def _custom(self, path: str, samples: list[Sample], whole: bool) -> list[Any]:
        function = self._function(path)
        if not whole:
            return list(await asyncio.gather(*(self._call(function, sample) for sample in samples)))
        rewards = await self._call(function, samples)
        if isinstance(rewards, Failure):
            return [rewards] * len(samples)
        try:
            given = list(rewards)
        except TypeError:
            given = []
        if isinstance(rewards, dict) or len(given) != len(samples):
            got = f"{len(given)} rewards" if given else f"a {type(rewards).__name__}"
            return [
                Failure("invalid", f"{len(samples)} samples at once need a list of rewards as long, not {got}")
            ] * len(samples)
        return given

    async def _call(self, function: Callable[..., Any], what: Sample | list[Sample]) -> Any:
        try:
            return await self._loop.run(call(function, self.plugin_args, what), self.args.reward_timeout)
        except RewardTimeout as error:
            return Failure("timeout", str(error))
        except Exception as error:
            return _failure(error)

    def _settle(self, sample: Sample, route: Route, outcome: Any, reward_key: str | None) -> None:
        """Put the reward on the sample, or what --reward-error says."""
        result = outcome if isinstance(outcome, Failure) else _checked(outcome, reward_key)
        if not isinstance(result, Failure):
            sample.reward = result
            return
        report = ErrorReport(
            route.name, result, sample.index, sample.group_index, sample.label, sample.response[-SHOWN_CHARS:]
        )
        self._errors[result.kind] += 1
        known = any(kept.failure == result for kept in self.error_reports)
        if not known and len(self.error_reports) < KEPT_REPORTS:
            self.error_reports.append(report)
            if self._warns:
                logger.warning("%s", report)
        if self.args.reward_error == "fail":
            raise RewardError(f"{report}\n(--reward-error zero or drop would go on)")
        rule = None if route.custom else find_rule(route.name)
        zero = rule.zero if rule is not None else 0.0 if reward_key is None else {reward_key: 0.0}
        sample.reward = dict(zero) if isinstance(zero, dict) else zero
        sample.metadata = {**(sample.metadata or {}), "reward_error": f"{result.kind}: {result.message}"}
        if self.args.reward_error == "drop":
            sample.remove_sample = True


def route_of(sample: Sample, custom_rm_path: str | None, rm_type: str | None) -> Route:
    """slime's order: the sample's own function, --custom-rm-path, the sample's rule, --rm-type.

    Raises:
        ValueError: there is none of these.
    """
    if path := sample.custom_rm_path or custom_rm_path:
        return Route(path, custom=True)
    name = str((sample.metadata or {}).get("rm_type") or rm_type or "").strip()
    if not name:
        raise ValueError(
            f"nothing says how to score sample {sample.index}: give --rm-type or --custom-rm-path, or metadata.rm_type"
        )
    return Route(name, custom=False)


def answer_of(sample: Sample, response: str, settings: Settings) -> Answer:
    """What a rule sees of ``sample``."""
    return Answer(
        response, label_text(sample.label), sample.metadata or {}, f"{sample.group_index}/{sample.index}", settings
    )


def exchange_of(sample: Sample) -> Exchange:
    """What a reward model sees of ``sample``; `Prompt.sample_metadata` keeps the messages for it."""
    if not isinstance(sample.prompt, str):
        return Exchange("", sample.response, sample.prompt)
    return Exchange(sample.prompt, sample.response, (sample.metadata or {}).get("messages"))


def _reward_model(args: RewardArgs) -> WorkerPool | None:
    """The process of --reward-model-path, to be started at its first batch."""
    if args.reward_model_path is None:
        return None
    program = ("slimelite.rewards.reward_model", args.reward_model_path, args.reward_model_device)
    size = args.reward_model_batch_size
    return WorkerPool(1, args.reward_timeout, program=program, chunk=size, start_seconds=LOAD_SECONDS)


def _quick(rule: Rule, answer: Answer) -> Reward | Failure | None:
    try:
        return rule.quick(answer)
    except Exception as error:
        return _failure(error)


def _failure(error: BaseException) -> Failure:
    return Failure("exception", f"{type(error).__name__}: {error}", own_traceback(error))


def _checked(reward: Any, key: str | None) -> Reward | Failure:
    """A reward that a table can take, or why it cannot be one."""
    value = reward
    if isinstance(reward, dict):
        if key is None or key not in reward:
            keys = ", ".join(map(str, reward))
            return Failure("invalid", f"the reward is a dict of {keys}; --reward-key must name one (it is {key!r})")
        value = reward[key]
    try:
        number = float(value)
    except (TypeError, ValueError):
        return Failure("invalid", f"a reward is a number, not {value!r:.80}")
    if not abs(number) <= LARGEST_REWARD:
        return Failure("nonfinite", f"the reward is {number}, which is not finite in fp32")
    return reward if isinstance(reward, dict) else number
