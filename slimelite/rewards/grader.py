"""Grades samples. The grader decides which reward function or rule scores a sample, in which process or thread it runs,
and what happens if it fails.

A user's reward functions run in separate threads, so they cannot block generation. Async functions all run on one event
loop in one thread, so they may share an HTTP session. Each plain function runs in its own thread.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from slimelite.arguments import RewardArgs
from slimelite.base import trace
from slimelite.base.guard import PACKAGE, own_traceback
from slimelite.base.registry import function
from slimelite.base.threads import LoopThread, call
from slimelite.rewards.math import extract_boxed_answer
from slimelite.rewards.rules import RULES, Answer, Exchange, Failure, Outcome, Reward, Rule, Scorer, Settings
from slimelite.rewards.workers import WorkerPool
from slimelite.samples.sample import Sample, label_text
from slimelite.slime.plugins import load_function

logger = logging.getLogger(__name__)

# number of different failures of a rollout that are kept and logged in full; further failures are only counted
KEPT_REPORTS = 8
LARGEST_REWARD = 3.4e38  # largest number in fp32, the dtype of advantages
SHOWN_CHARS = 300
# our quick rules read this number of characters in about the time in which a thread starts
AT_ONCE_CHARS = 20_000
# an event loop counts as blocked if it does not respond within this time [s]
ANSWER_SECONDS = 1.0
CONNECTIONS = 64
ATTEMPTS = 10
# time limit to load a reward model [s]; many gigabytes from a network disk take long
LOAD_SECONDS = 1800.0
REQUEST_SECONDS = 120.0


class RewardError(ValueError):
    """A reward could not be computed, and ``--reward-error`` is ``fail``. The exception has one argument, the
    message."""


class Route(NamedTuple):
    """What scores a sample: a custom function or a rule. ``name`` is the path of the function if ``custom`` is true,
    else the name of the rule."""

    name: str
    custom: bool


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """A failure to compute a sample's reward. ``reward`` is the name of the rule or function, and ``response`` is the
    end of the sample's response."""

    reward: str
    failure: Failure
    index: int | None
    group_index: int | None
    label: object
    response: str

    def __str__(self) -> str:
        return (
            f"reward {self.reward} of sample {self.index} (group {self.group_index}): {self.failure.kind}: "
            f"{self.failure.message}; label {self.label!r}, response ends {self.response!r}\n{self.failure.traceback}"
        ).rstrip()


class Grader:
    """Sets ``sample.reward``.

    The function ``quick`` of a built-in rule runs in the caller's thread, or in another thread if the responses are
    long. A user's rules always run in another thread. The function ``slow`` of a rule and the reward model run in
    worker processes (`WorkerPool`). Custom functions run on a separate event loop (`RewardLoop`). So no reward blocks
    the caller's event loop for long. If a reward fails, the failure is counted by its kind, and written to the sample's
    ``metadata["reward_error"]``. ``--reward-error`` decides what happens to the sample. The first few different
    failures are kept in ``error_reports`` until `metrics` is called.
    """

    def __init__(
        self, args: RewardArgs, *, workers: int | None = None, trial: bool = False, ends: Sequence[str] = ()
    ) -> None:
        """``workers``: the maximum number of grading processes; with None, half the number of processors, but at least
        1 and at most 8. ``ends``: the texts of the tokens that end a response. If a rule has ``whole``, such a text is
        removed from the end of a response before the rule gets the response.

        ``trial``: whether this grader only scores one row of the data before a run starts (`check_reward`). In a trial,
        failures are not logged, and a request to a reward server is tried only twice.

        Raises:
            ValueError: ``args`` name a rule or a function that does not exist, or lack a flag that the rule needs.
        """
        self.args = args
        # the first argument of custom functions
        self.plugin_args: object = args
        self.error_reports: list[ErrorReport] = []
        self._errors: Counter[str] = Counter()
        self._costly = 0
        self._trial, self._ends = trial, tuple(ends)
        self._cautioned: set[str] = set()
        self._scorers: dict[str, Scorer] = {}
        self._functions: dict[str, Callable[..., Any]] = {}
        self._pool = WorkerPool(workers or max(1, min(8, (os.cpu_count() or 2) // 2)), args.reward_timeout)
        self._settings = Settings(
            args.code_timeout, args.code_memory_mb, args.format_regex, args.agent_sandbox or "process"
        )
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
        group_rm: bool | None = None,
        reward_key: str | None = None,
    ) -> None:
        """Score every sample.

        A sample is scored by the first of these that is set: the sample's own ``custom_rm_path``, --custom-rm-path, the
        sample's ``metadata["rm_type"]``, --rm-type. The arguments of this method override the flags of the same names.
        ``rm_type``, which evaluation datasets may set, also overrides --custom-rm-path. ``group_rm``: whether a custom
        function gets all samples in one call, as with --group-rm. ``group_rm`` is also set if the samples are one
        fan-out. ``reward_key``: if rewards are dicts, the key whose value must be a number.

        Raises:
            ValueError: neither a flag nor the sample names a rule or a function, or the named one does not exist.
            RewardError: a reward could not be computed, and --reward-error is ``fail``.
        """
        flag_path = self.args.custom_rm_path if rm_type is None else None
        whole = self.args.group_rm if group_rm is None else group_rm
        parts: dict[Route, list[Sample]] = {}
        for sample in samples:
            route = route_of(sample, flag_path, rm_type or self.args.rm_type)
            parts.setdefault(route, []).append(sample)
        key = reward_key or self.args.reward_key
        for route in parts:
            _ = self._function(route.name) if route.custom else self._rule(route.name, key)
        jobs = [self._custom(r.name, p, whole) if r.custom else self._ruled(r.name, p) for r, p in parts.items()]
        with trace.span("rollout", "rewards", ", ".join(route.name for route in parts), samples=len(samples)):
            results = await asyncio.gather(*jobs)
        for (route, part), outcomes in zip(parts.items(), results, strict=True):
            for sample, outcome in zip(part, outcomes, strict=True):
                self._settle(sample, route, outcome, key)

    async def shaping(self, samples: Sequence[Sample], max_length: int) -> tuple[list[float], dict[str, float]]:
        """Compute the amounts that --format-reward-coef and --overlong-buffer-len add to each sample's reward. Returns
        the amount for each sample, and metrics with the mean format reward and the mean penalty.

        ``max_length``: the maximum number of tokens of a response. A format check that raises an error or takes too
        long adds 0 to the reward and is counted as a reward error.
        """
        args, added, metrics = self.args, [0.0] * len(samples), {}
        if args.format_reward_coef and samples:
            outcomes = await self._ruled("format", list(samples))
            scores = [o if isinstance(o, float) else 0.0 for o in outcomes]
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
        """Check the rewards of ``samples``, which a custom generate function has set. Each reward must be a finite
        number.

        Raises:
            RewardError: see `grade`.
        """
        route = Route("of the generate function", custom=True)
        for sample in samples:
            self._settle(sample, route, sample.reward, reward_key or self.args.reward_key)

    def fail(self, samples: Sequence[Sample], failure: Failure, what: str, *, reward_key: str | None = None) -> None:
        """Handle samples that got no reward because of ``failure``. --reward-error decides what happens to them.
        ``what``: the text after "reward" in the error message, such as "of --agent-command PROGRAM".

        Raises:
            RewardError: see `grade`.
        """
        for sample in samples:
            self._settle(sample, Route(what, custom=True), failure, reward_key or self.args.reward_key)

    def metrics(self) -> dict[str, float]:
        """The metrics ``rollout/reward_errors``: the number of failed rewards since the last call of this method, in
        total and by kind of failure. Each call resets these counts and ``error_reports``.

        ``rollout/costly_answers``: the number of responses that were too costly to check by algebra. This metric
        is left out if the number is 0.
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
        """End the grader's worker processes and threads."""
        self._pool.close()
        for scorer in self._scorers.values():
            scorer.close()
        self._loop.close()

    def _rule(self, rm_type: str, reward_key: str | None) -> Rule:
        """The rule with the name ``rm_type``. This function checks the flags that the rule needs, creates its scorer,
        and logs its cautions once."""
        rule = RULES[rm_type]
        if missing := rule.lacks(self.args):
            raise ValueError(missing)
        if isinstance(rule.zero, dict) and reward_key not in rule.zero:
            raise ValueError(f"--rm-type {rm_type} returns a dict; add --reward-key with one of {', '.join(rule.zero)}")
        if rule.scorer is not None and rule.name not in self._scorers:
            self._scorers[rule.name] = function(rule.scorer, RULES.option, rule.name)(self.args, self._trial)
        if rule.cautions is not None and rule.name not in self._cautioned:
            self._cautioned.add(rule.name)
            for caution in function(rule.cautions, RULES.option, rule.name)():
                logger.warning("--rm-type %s %s", rule.name, caution)
        return rule

    def _function(self, path: str) -> Callable[..., Any]:
        if path not in self._functions:
            self._functions[path] = load_function(path)
        return self._functions[path]

    async def _ruled(self, rm_type: str, samples: list[Sample]) -> list[Reward | Failure | None]:
        rule = RULES[rm_type]
        texts = [(extract_boxed_answer(s.response) or "") if rule.boxed else s.response for s in samples]
        if rule.whole:
            texts = [without_end(text, self._ends) for text in texts]
        if rule.scorer is not None:
            outcomes = await self._scorers[rule.name].score(samples, texts)
            return [failure_of(o) if isinstance(o, BaseException) else o for o in outcomes]
        answers = [answer_of(s, text, self._settings) for s, text in zip(samples, texts, strict=True)]
        missing = Failure("invalid", f"{rm_type} needs a label, but the sample has none; set --label-key")
        unlabelled = rule.zero if self.args.unlabelled_is_zero else missing
        if _is_ours(rule) and sum(len(answer.response) for answer in answers) <= AT_ONCE_CHARS:
            results = [_quick(rule, answer) for answer in answers]
        else:
            results = await asyncio.to_thread(lambda: [_quick(rule, answer) for answer in answers])
        if rule.needs_label:
            results = [unlabelled if s.label is None else r for s, r in zip(samples, results, strict=True)]
        undecided = [i for i, result in enumerate(results) if result is None]
        slow = await self._pool.run([(rule.name, answers[i]) for i in undecided]) if undecided else []
        for i, verdict in zip(undecided, slow, strict=True):
            costly = isinstance(verdict, Failure) and verdict.kind == "costly"
            self._costly += costly
            results[i] = rule.zero if costly else verdict
        return results

    async def _custom(self, path: str, samples: list[Sample], whole: bool) -> list[Any]:
        call = partial(self._loop.call, self._function(path), self.plugin_args, timeout=self.args.reward_timeout)
        if not whole:
            return list(await asyncio.gather(*map(call, samples)))
        rewards = await call(samples)
        if isinstance(rewards, Failure):
            return [rewards] * len(samples)
        try:
            per_sample = list(rewards)
        except TypeError:
            per_sample = []
        if isinstance(rewards, dict) or len(per_sample) != len(samples):
            got = f"{len(per_sample)} rewards" if per_sample else f"a {type(rewards).__name__}"
            message = (
                f"a reward function for {len(samples)} samples must return a list of {len(samples)} rewards, not {got}"
            )
            return [Failure("invalid", message)] * len(samples)
        return per_sample

    def _settle(self, sample: Sample, route: Route, outcome: object, reward_key: str | None) -> None:
        """Set the sample's reward. If the reward failed, --reward-error decides what happens."""
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
            if not self._trial:
                logger.warning("%s", report)
        if self.args.reward_error == "fail":
            raise RewardError(f"{report}\n(to continue the run after such failures, set --reward-error zero or drop)")
        zero = None if route.custom else RULES[route.name].zero
        if zero is None:
            zero = 0.0 if reward_key is None else {reward_key: 0.0}
        sample.reward = dict(zero) if isinstance(zero, dict) else zero
        sample.metadata = {**(sample.metadata or {}), "reward_error": f"{result.kind}: {result.message}"}
        if self.args.reward_error == "drop":
            sample.remove_sample = True


def route_of(sample: Sample, custom_rm_path: str | None, rm_type: str | None) -> Route:
    """The function or rule that scores ``sample``. As in slime, it is the first of these that is set: the sample's own
    function, --custom-rm-path, the sample's own rule, --rm-type.

    Raises:
        ValueError: none of these four is set.
    """
    if path := sample.custom_rm_path or custom_rm_path:
        return Route(path, custom=True)
    name = str((sample.metadata or {}).get("rm_type") or rm_type or "").strip()
    if not name:
        raise ValueError(
            f"sample {sample.index} has no reward: give --rm-type, --custom-rm-path, or rm_type in its metadata"
        )
    return Route(name, custom=False)


def overlong_penalty(length: int, max_length: int, buffer: int, factor: float) -> float:
    """DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13), from 0 to −``factor``. The arguments ``length``,
    ``max_length`` and ``buffer`` are numbers of tokens.

    The penalty is 0 for responses of at most ``max_length − buffer`` tokens, falls linearly to −factor at
    ``max_length`` tokens, and is −factor for longer responses.
    """
    over = length - (max_length - buffer)
    return -factor * min(max(over / buffer, 0.0), 1.0)


def without_end(text: str, ends: Sequence[str]) -> str:
    """Remove the end of ``text`` if it is one of ``ends``. Otherwise return ``text`` unchanged."""
    return next((text.removesuffix(end) for end in ends if end and text.endswith(end)), text)


def answer_of(sample: Sample, response: str, settings: Settings) -> Answer:
    """The argument that a rule's functions get for ``sample``: its label and metadata, and the text ``response``."""
    return Answer(
        response, label_text(sample.label), sample.metadata or {}, f"{sample.group_index}/{sample.index}", settings
    )


def _is_ours(rule: Rule) -> bool:
    """Whether ``quick`` is one of our functions, which need only time linear in the response. A user's function may
    hang, so it runs in a thread."""
    return rule.quick is None or (isinstance(rule.quick, str) and rule.quick.startswith(f"{PACKAGE.name}."))


def _quick(rule: Rule, answer: Answer) -> Reward | Failure | None:
    """The verdict of the rule's function ``quick`` in this process. None: the rule's function ``slow`` must decide."""
    if rule.quick is None:
        return None
    try:
        verdict: Reward | None = function(rule.quick)(answer)
    except Exception as error:
        return failure_of(error)
    if verdict is None and rule.slow is None:
        return Failure(
            "invalid",
            f"the rule {rule.name} cannot decide, because its quick() returned None and it has no slow()",
        )
    return verdict


def _checked(reward: Any, key: str | None) -> Reward | Failure:
    """The reward if a table can store it, else a `Failure` with the reason."""
    value = reward
    if isinstance(reward, dict):
        if key is None or key not in reward:
            keys = ", ".join(map(str, reward))
            return Failure(
                "invalid",
                f"the reward is a dict with the keys {keys}; --reward-key must name one of them, but is {key!r}",
            )
        value = reward[key]
    try:
        number = float(value)
    except (TypeError, ValueError):
        return Failure("invalid", f"a reward must be a number, not {value!r:.80}")
    if not abs(number) <= LARGEST_REWARD:
        return Failure("nonfinite", f"the reward is {number}, which is not finite in fp32")
    return reward if isinstance(reward, dict) else number


class Trial(NamedTuple):
    """The reward of one row, and the kind of response that was graded, such as "the right answer" or "the bare
    label"."""

    reward: Reward
    response: str


def check_reward(args: RewardArgs, sample: Sample, group_size: int = 1, end: str = "") -> Trial:
    """Before the run starts, score one row of the data in the same way as the run will. ``sample`` is not changed.
    ``end``: the text of the token that ends a response in the run, such as ``<|im_end|>``.

    If the sample has no response, the rule's ``example`` makes a right response from the label. So this check also
    detects a label that the rule cannot read. For a custom function or a reward server, the label itself is the
    response. With --group-rm, the function gets ``group_size`` copies of the sample. --reward-error is ignored, because
    a failure in this row would probably occur in every row.

    Raises:
        ValueError: the reward cannot be computed, or the right response does not get reward 1.
    """
    trial = replace(sample, metadata=dict(sample.metadata or {}))
    grader = Grader(replace(args, reward_error="zero"), workers=1, trial=True, ends=(end,))
    try:
        route = route_of(trial, args.custom_rm_path, args.rm_type)
        example = None if route.custom or trial.label is None or trial.response else RULES[route.name].example
        if trial.response:
            stood = "the sample's response"
        elif example is not None:
            stood = "the right answer"
            right = function(example, RULES.option, route.name)(answer_of(trial, "", Settings()))
            trial.response = f"\\boxed{{{right}}}" if RULES[route.name].boxed else right
        else:
            trial.response = label_text(trial.label)
            stood = "the bare label" if trial.response else "an empty response"
        if trial.response != sample.response:
            trial.response += end
        copies = range(1, group_size if args.group_rm else 1)
        siblings = [replace(trial, index=i, metadata=dict(trial.metadata)) for i in copies]
        asyncio.run(grader.grade([trial, *siblings]))
    finally:
        grader.close()
    if grader.error_reports:
        report = grader.error_reports[0]
        places = re.findall(r'File "(.+)", line (\d+), in (\S+)', report.failure.traceback)
        theirs = [place for place in places if not Path(place[0]).is_relative_to(PACKAGE)]
        where = " ({}, line {}, in {})".format(*theirs[-1]) if route.custom and theirs else ""
        if where in report.failure.message:  # the message of a wrong plugin call already names the place
            where = ""
        raise ValueError(
            f"the reward {report.reward} fails on the first row, so the run does not start (--reward-error does not "
            f"apply here): {report.failure.kind}: {report.failure.message}{where} (label {report.label!r}, response "
            f"{report.response!r})"
        )
    if example is not None and trial.reward_value(args.reward_key) != 1.0:
        remedy = f", or add --rollout-skip-special-tokens if the rule cannot read {end}" if end else ""
        raise ValueError(
            f"--rm-type {route.name} scores the right answer of the first row with {trial.reward}, not 1: check "
            f"--label-key and the labels{remedy} (label {str(trial.label)[-200:]!r}, "
            f"response {trial.response[-200:]!r})"
        )
    assert trial.reward is not None
    return Trial(trial.reward, stood)


class RewardLoop:
    """Runs a user's reward functions on a separate event loop. If a function blocks the loop, a new loop replaces the
    blocked one."""

    def __init__(self) -> None:
        self._thread: LoopThread | None = None

    async def call(self, function: Callable[..., Any], *args: object, timeout: float) -> Any:
        """Call ``function`` and return its result. Returns a `Failure` if ``function`` raises or takes longer than
        ``timeout`` seconds.

        A function that exceeds ``timeout`` is cancelled. If such a function never awaits, it cannot be cancelled, and
        continues to run in the old loop, which is no longer used.
        """
        thread = self._thread = self._thread or LoopThread("rewards")
        future = asyncio.wrap_future(thread.submit(call(function, *args)))
        try:
            done, _ = await asyncio.wait({future}, timeout=timeout)
        finally:
            future.cancel()  # does nothing if the future is done
        if done:
            try:
                return future.result()
            except Exception as error:
                return failure_of(error)
        alive: Future[None] = Future()
        thread.loop.call_soon_threadsafe(alive.set_result, None)
        answered, _ = await asyncio.wait({asyncio.wrap_future(alive)}, timeout=ANSWER_SECONDS)
        if not answered and self._thread is thread:
            self.close()
        blocked = (
            ""
            if answered
            else (
                "; the function blocks the event loop: use await for slow calls, or write a plain def, which runs "
                "in a thread"
            )
        )
        return Failure("timeout", f"no reward within {timeout:g} s (--reward-timeout){blocked}")

    def close(self) -> None:
        """Tell the thread of the event loop to end."""
        if self._thread is not None:
            self._thread.abandon()
            self._thread = None


def failure_of(error: BaseException) -> Failure:
    """Convert an exception to a `Failure`. The failure's traceback begins at the first line of the user's code."""
    return Failure("exception", f"{type(error).__name__}: {error}", own_traceback(error))


class RemoteReward:
    """The scorer of the rule ``remote_rm``. For each sample, it sends an object with ``prompt``, ``response`` and
    ``label`` to --rm-url by POST. The JSON body of the server's answer is the reward."""

    def __init__(self, args: RewardArgs, trial: bool) -> None:
        """``trial``: whether to stop after two attempts.

        Raises:
            ValueError: the address does not start with http:// or https://.
        """
        assert args.rm_url is not None
        if not args.rm_url.startswith(("http://", "https://")):
            raise ValueError(f"--rm-url {args.rm_url}: the address must start with http:// or https://")
        self._url = args.rm_url
        self._attempts = 2 if trial else ATTEMPTS

    async def score(self, samples: Sequence[Sample], texts: Sequence[str]) -> Sequence[Outcome]:
        """The server's answer for each sample, or the exception if the request failed. ``--reward-timeout`` does not
        limit these requests.

        The waits between two attempts are 1, 2, 4, ... seconds, but at most 30 seconds. After an HTTP error 4xx, a
        request is retried only if the error is 408, 425 or 429.
        """
        from slimelite.base.http_client import Client, Retry  # other rewards send no requests

        pairs = zip(samples, texts, strict=True)
        payloads = [{"prompt": s.prompt, "response": text, "label": s.label} for s, text in pairs]
        retry = Retry(self._attempts, first_s=1.0, refused=True)
        async with Client(retry, REQUEST_SECONDS, CONNECTIONS) as client:
            return await asyncio.gather(*(client.post(self._url, p) for p in payloads), return_exceptions=True)

    def close(self) -> None:
        """Do nothing, because `score` closes its connections."""


class ModelReward:
    """The scorer of the rule ``reward_model``. The model at --reward-model-path runs in a separate process, which
    starts when the first batch is scored."""

    def __init__(self, args: RewardArgs, trial: bool) -> None:  # noqa: ARG002  a trial works in the same way
        """Set up the worker pool. The model is loaded with the first batch."""
        assert args.reward_model_path is not None
        program = ("slimelite.rewards.reward_model", args.reward_model_path, args.reward_model_device)
        size = args.reward_model_batch_size
        self._pool = WorkerPool(1, args.reward_timeout, program=program, chunk=size, start_seconds=LOAD_SECONDS)

    async def score(self, samples: Sequence[Sample], texts: Sequence[str]) -> Sequence[Outcome]:
        """The reward model's score, or a `Failure`, for each sample."""
        return await self._pool.run([exchange_of(s, text) for s, text in zip(samples, texts, strict=True)])

    def close(self) -> None:
        """End the process."""
        self._pool.close()


def exchange_of(sample: Sample, response: str) -> Exchange:
    """The input of a reward model for ``sample``. If the prompt is text, its messages come from the sample's metadata,
    where `load_prompts` stores them."""
    if not isinstance(sample.prompt, str):
        return Exchange("", response, sample.prompt)
    return Exchange(sample.prompt, response, (sample.metadata or {}).get("messages"))
