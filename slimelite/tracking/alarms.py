"""Alarms: signs that training goes wrong. An alarm has a text, the rollout where it began, and the usual remedy.

`Alarms` gets the records of metrics.jsonl in order: from the tracker during the run, and from `replay` afterwards.
`Alarms` has no clock and reads no file.

Each kind of alarm is a function of the run's `History` that returns its finding, or None. The function's docstring
gives the reason for the threshold.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

from slimelite.tracking.history import LEVEL, NOISE, QUIET, SKIPPED, WINDOW, History, Score, rollout_values
from slimelite.tracking.metrics_file import DEFAULT_AXIS, eval_metrics

ERRORS = 4.0  # smallest difference of scores that counts, in standard errors; the earlier score is a best one
UNKNOWN_ERROR = 0.04  # standard error of a score without one: as for 150 answers that are right or wrong
ALL = 0.9  # this share counts as all, so one lucky group in ten changes nothing
SOLVED = 0.9  # at this eval score, the model has little left to learn
AGENTS = 0.1  # share of failed episodes that starts an alarm; flaky programs stay below it
MISMATCH_LIMIT = 0.02  # nats; engines that compute in bfloat16 stay below 0.01


class Seen(NamedTuple):
    """The text of an alarm that begins, and a function that tests after later rollouts whether the alarm goes on."""

    says: str
    goes_on: Callable[[History], bool]


# a function that looks for one kind of alarm in the history of a run
See = Callable[[History], Seen | None]


class Kind(NamedTuple):
    """A kind of alarm. ``when``: the condition as text. ``advice``: the usual remedy. ``see``: tests the condition."""

    name: str
    when: str
    advice: str
    see: See


KINDS: list[Kind] = []


def kind(when: str, advice: str) -> Callable[[See], See]:
    """Register a function as a kind of alarm, under the function's name."""

    def register(see: See) -> See:
        KINDS.append(Kind(see.__name__, when, advice, see))
        return see

    return register


@kind(
    "nine groups in ten no longer have a right answer, or the reward fell to half of its best level",
    "Usually the learning rate is too high: go back to an earlier checkpoint and divide --lr by 3 to 10. A lower "
    "--clip-grad, --use-kl-loss and --lr-warmup-iters also help.",
)
def reward_collapse(h: History) -> Seen | None:
    """Either sign starts the alarm: (1) nine groups in ten no longer have a right answer; (2) the reward fell from its
    best by half, and by six standard deviations. Sign 1 suits any scale; sign 2 suits tasks without right answers."""
    lost = h.best_reward - h.now("reward")
    groups = h.least_wrong <= 0.5 and h.now("wrong", QUIET) >= ALL
    if not groups and not (h.enough("reward") and lost > max(2 * NOISE * h.noise("reward"), abs(h.best_reward) / 2)):
        return None
    best = max(h.best_reward, *h.values["reward"][:1])
    half = best - abs(best) / 2
    says = f"the reward fell from {best:.3g} to {h.now('reward', QUIET):.3g}"
    if groups:
        says += f"; {h.now('wrong', QUIET):.0%} of the groups no longer have a right answer"
    return Seen(says, lambda h: h.now("reward", QUIET) < half)


@kind(
    "nine groups in ten have had equal rewards of 0 or less for 3 rollouts, from the start",
    "Compare samples with their labels: is --label-key the right column, can --rm-type read such answers, is "
    "--rollout-max-response-len large enough? If all this is right, the task is too hard: use easier prompts, more "
    "samples per prompt, or SFT first.",
)
def all_wrong(h: History) -> Seen | None:
    """The alarm needs three such rollouts in a row, because one batch may be hard. See also `reward_collapse`."""
    share = min(h.values["wrong"][-QUIET:], default=0.0)
    if len(h.values["wrong"]) < QUIET or share < ALL or h.least_wrong <= 0.5:
        return None
    says = f"{_at_least(share)} the groups had no right answer in {QUIET} rollouts: there is nothing to learn from"
    return Seen(says, lambda h: h.now("wrong", QUIET) >= ALL)


@kind(
    "no response of a rollout has any token",
    "Look at the prompts in rollouts/ of the run folder: a prompt that fills the context leaves no space for a reply. "
    "Shorten such prompts, or raise --rollout-max-context-len. If environments failed, log.txt has the errors.",
)
def no_tokens(h: History) -> Seen | None:
    """One such rollout is an alarm, because a rollout without a single token is never chance."""
    if h.row.get("length") != 0:
        return None
    return Seen("no response has any token, so there is nothing to train on", lambda h: h.row.get("length") == 0)


@kind(
    "nine groups in ten have had equal rewards above 0 for 3 rollouts, and a new eval score is below 0.9",
    "The model has nothing left to learn from these prompts: use harder ones, or drop solved groups with "
    "--dynamic-sampling-filter-path. If the score falls, the reward does not measure the task: read samples.",
)
def all_right(h: History) -> Seen | None:
    """An eval score below 0.9 shows that the model can still learn, but not from these prompts."""
    share = min(h.values["right"][-QUIET:], default=0.0)
    low = {name: scores[-1].mean for name, scores in h.evaluated().items() if scores[-1].mean < SOLVED}
    if len(h.values["right"]) < QUIET or share < ALL or not low:
        return None
    name, score = next(iter(low.items()))
    says = f"{_at_least(share)} the groups had equal rewards above 0 in {QUIET} rollouts, and {name} is {score:.3g}"
    return Seen(says, lambda h: h.now("right", QUIET) >= ALL and h.scores[name][-1].mean < SOLVED)


@kind(
    "entropy fell to a quarter in 20 rollouts, the reward did not rise, and fewer than half of the groups have only "
    "right answers",
    "The policy has stopped exploring: raise --eps-clip-high (0.28), lower --lr, add --entropy-coef or "
    "--use-kl-loss, and sample at --rollout-temperature 1.",
)
def entropy_collapse(h: History) -> Seen | None:
    """The threshold is a quarter, because entropy may halve in healthy runs: rewards favour sure answers. If half of
    the groups have only right answers, low entropy is normal, because the model knows the answers."""
    then, now, done = h.then("entropy"), h.now("entropy"), max(h.rollouts - WINDOW - LEVEL, 0)
    if not h.enough("entropy") or not h.enough("reward") or now > then / 4 or h.now("right") >= 0.5:
        return None
    reward = h.at("reward", done)
    if h.rose("reward", reward):
        return None
    says = f"entropy fell from {then:.3g} to {now:.3g} while the reward stayed at {h.now('reward'):.3g}"
    return Seen(says, lambda h: h.now("entropy") <= then / 4 and not h.rose("reward", reward))


@kind(
    "more than 25 % of the responses reach the length limit, and this share grew by 10 percentage points in 20 "
    "rollouts; or for 3 rollouts, nine responses in ten reach the limit, and half of the groups have no right answer",
    "Read the ends of long samples. Answers that are cut off need a larger --rollout-max-response-len; loops and "
    "padding need --overlong-buffer-len, a reward that does not favour length, or a lower --lr.",
)
def truncation(h: History) -> Seen | None:
    """Either sign starts the alarm. (1) A quarter of the samples is cut off, and this share has grown by 10 percentage
    points and by more than noise. (2) Nearly all samples are cut off, perhaps from the start, and most groups earn
    nothing: the answers probably come after the limit. Tasks whose answers come early may cut off every response."""
    now, then = h.now("truncated"), h.then("truncated")
    recent = [h.values[name][-QUIET:] for name in ("truncated", "wrong")]
    cut, wrong = (min(values) if len(values) == QUIET else 0.0 for values in recent)
    if cut >= ALL and wrong >= 0.5:
        says = f"{_at_least(cut)} the responses reached the length limit in {QUIET} rollouts, and "
        says += f"{_at_least(wrong)} the groups had no right answer"
    elif now > 0.25 and now - then >= max(0.1, NOISE * h.noise("truncated")):
        says = f"{now:.0%} of the responses reached the length limit; before, it was {then:.0%}"
    else:
        return None
    return Seen(says, lambda h: h.now("truncated", QUIET) > 0.25)


@kind(
    "the mean response length doubled in 20 rollouts, but no eval score rose (without evaluations: but the reward did "
    "not rise)",
    "Read the longest samples: does the reward favour length? --overlong-buffer-len penalizes length; with "
    "--calculate-per-token-loss, every token of a long wrong answer counts.",
)
def length(h: History) -> Seen | None:
    """The length doubled. Responses also grow when a model learns to reason, but then the score rises."""
    then, now, done = h.then("length"), h.now("length"), max(h.rollouts - WINDOW - LEVEL, 0)
    if not h.enough("length") or not h.values["reward"] or not then or now < 2 * then or h.improved(done):
        return None
    by = "no eval score" if h.scores else "no reward"
    says = f"responses grew from {then:.0f} to {now:.0f} tokens on average, and {by} rose with them"
    return Seen(says, lambda h: h.now("length") >= 2 * then and not h.improved(done))


@kind(
    "the reward rose by a tenth, but an eval score either gained at most 0.02 in 20 rollouts or fell by a tenth from "
    "its best",
    "The policy exploits the reward instead of learning the task, or memorizes the prompts. Read the samples with "
    "the highest reward, fix the reward, and keep the checkpoint of the best evaluation; more prompts help against "
    "memorization.",
)
def reward_without_eval(h: History) -> Seen | None:
    """The reward rose by a tenth and by more than noise, and one of two things happened. (1) The score is a
    tenth, and four standard errors, below its best. (2) In 20 rollouts, no score was over 0.02 above the first one,
    and the relative gain of the reward exceeds that of the score by four standard errors. Smaller changes may be
    chance, because the best of many scores is lucky."""
    for name, scores in h.evaluated().items():
        last, best = scores[-1], max(scores, key=lambda s: s.mean)
        fell = best.mean - last.mean > max(ERRORS * math.hypot(best.error, last.error), 0.1 * abs(best.mean))
        old = [s for s in scores if s.rollouts <= last.rollouts - WINDOW][-1:]
        flat = old and last.mean < SOLVED and max(s.mean for s in scores if s.rollouts > old[0].rollouts)
        since = best if fell else old[0] if flat and flat <= old[0].mean + 0.02 else None
        if since is None or not h.enough("reward"):
            continue
        before, now = h.at("reward", since.rollouts), h.now("reward")
        gain, level = now - before, max(abs(since.mean), 1e-9)
        ahead = gain / max(abs(before), 1e-9) - (last.mean - since.mean) / level
        if not h.rose("reward", before) or gain < 0.1 * abs(before):
            continue
        if fell or ahead > ERRORS * math.hypot(since.error, last.error) / level:
            says = f"the reward rose from {before:.3g} to {now:.3g}, and {name} went from "
            says += f"{since.mean:.3g} to {last.mean:.3g}"
            return Seen(says, _stays_below(name, min(since.mean, last.mean) + 0.02))
    return None


def _stays_below(name: str, score: float) -> Callable[[History], bool]:
    return lambda h: h.scores[name][-1].mean <= score


@kind(
    f"the mean |trainer − engine log-prob| exceeds {MISMATCH_LIMIT:g} (plus 0.2 for each weight update since "
    f"sampling), or it rose fivefold in 20 rollouts to more than {MISMATCH_LIMIT / 10:g}",
    "The policy that computes the gradient differs from the policy that generated the samples. "
    "--check-weight-update-equal tests whether the engines get the trainer's weights. --correction tis corrects "
    "small differences. docs/metrics.md lists the causes.",
)
def mismatch(h: History) -> Seen | None:
    """One rollout above the limit is an alarm, because its value is a mean of many tokens. With fresh samples, a
    fivefold rise to more than a tenth of the limit is an alarm too; smaller values may be rounding. In healthy
    runs at the quickstart's high learning rate, the value grows by 0.17 nats for each weight update since sampling. So
    each update raises the limit by 0.2."""
    now, then, age = h.row.get("mismatch", 0.0), h.then("mismatch"), h.row.get("staleness", 0.0)
    limit = MISMATCH_LIMIT + 0.2 * age
    risen = not age and h.enough("mismatch") and h.now("mismatch") > max(5 * then, MISMATCH_LIMIT / 10)
    if now <= limit and not risen:
        return None
    says = f"trainer and engine disagree about the same tokens: mean |log-prob difference| {now:.3f}"
    floor = min(now, limit) / 2
    return Seen(says, lambda h: h.now("mismatch") > floor)


@kind(
    "trained tokens are 4 weight updates old on average, or half of the groups are dropped as too old",
    "Sync more often (--update-weights-interval 1), set --max-weight-staleness, or correct with --correction tis.",
)
def stale(h: History) -> Seen | None:
    """Tokens are too old after four weight updates. A policy gradient tolerates a few, and tokens generated one
    rollout ahead are one update old. If half of the groups are dropped, the run discards more work than it uses."""
    age, dropped = h.now("staleness", QUIET), h.row.get("rollout/stale_groups", 0.0)
    if age >= 4:
        return Seen(f"trained tokens are {age:.1f} weight updates old", lambda h: h.now("staleness", QUIET) >= 4)
    if not dropped or dropped < h.row.get("rollout/submitted_groups", 0.0) / 2:
        return None
    says = f"{dropped:.0f} groups were too old to train on"
    return Seen(says, lambda h: h.row.get("rollout/stale_groups", 0.0) > 0)


@kind(
    "a gradient norm exceeds both limits: 10 times the median and 5 times the maximum of the last 20 norms",
    "One spike that --clip-grad catches is harmless. If spikes recur, lower --lr and read the samples of that "
    "rollout: long or repetitive samples and extreme rewards cause spikes.",
)
def grad_spike(h: History) -> Seen | None:
    """One limit is not enough. When most groups are solved, a few odd groups determine the gradient. Even in healthy
    runs, its norm then reaches 13 times the median of the last 20 norms, but only 2.6 times their maximum."""
    before = h.values["grad"][-WINDOW - 1 : -1]
    if "grad" not in h.row or len(before) < WINDOW:
        return None
    limit = max(10 * median(before), 5 * max(before))
    if h.row["grad"] <= limit:
        return None
    says = f"the gradient norm is {h.row['grad']:.3g}, and its median was {median(before):.3g}"
    return Seen(says, lambda h: h.values["grad"][-1] > limit)


@kind(
    "an optimizer step changed nothing, because its loss or gradient was not finite",
    "Look for infinite rewards and a custom loss that divides by zero. Lower --lr. Use bfloat16 instead of float16. "
    "--nonfinite-grad fail stops the run at the first such step.",
)
def skipped_steps(h: History) -> Seen | None:
    """Any share of skipped steps is an alarm, because a loss or gradient that is not finite is never noise."""
    shares = {name: h.row[name] for name in SKIPPED if h.row.get(name, 0.0) > 0}
    if not shares:
        return None
    name, share = next(iter(shares.items()))
    says = f"{share:.0%} of the optimizer steps changed nothing, because their loss or gradient was not finite ({name})"
    return Seen(says, lambda h: any(h.row.get(name, 0.0) > 0 for name in SKIPPED))


@kind(
    "the filter dropped nine in ten of a rollout's groups, and at least 32 groups",
    "Read the dropped groups, with the reason for each group, in dropped/ of the run folder. If the reward is right, "
    "the task is not too hard and the temperature is above 0, loosen --dynamic-sampling-filter-path or leave it out.",
)
def filtered(h: History) -> Seen | None:
    """If nine groups in ten are dropped, a trained group costs ten generated ones. Up to 31 drops may be chance."""
    dropped, sent = h.row.get("rollout/dropped_groups", 0.0), h.row.get("rollout/submitted_groups", 0.0)
    if dropped < max(ALL * sent, 32):
        return None
    return Seen(f"the filter dropped {dropped:.0f} of {sent:.0f} groups", lambda h: filtered(h) is not None)


@kind(
    "at least a tenth of a rollout's groups could not be generated, or an engine died",
    "log.txt has the errors: memory, a time limit, or a generate function that raises. The run continues with other "
    "prompts and learns nothing from the failed ones.",
)
def failed_groups(h: History) -> Seen | None:
    """A tenth of the groups failed, or an engine died. On a large cluster, a single request that fails after its
    retries is normal, but the death of an engine is not."""
    failed, sent = h.row.get("rollout/failed_groups", 0.0), h.row.get("rollout/submitted_groups", 0.0)
    deaths = [0.0, *h.values["deaths"]][-2:]
    if len(h.values["deaths"]) and deaths[-1] > deaths[0]:
        says = f"an engine died and was restarted: {deaths[-1]:.0f} deaths in this run so far"
    elif failed and failed >= sent / 10:
        says = f"{failed:.0f} of {sent:.0f} groups could not be generated"
    else:
        return None
    return Seen(says, lambda h: failed_groups(h) is not None)


@kind(
    "a rollout took five times as long as usual (the median of the last 20 rollouts), and at least a minute longer; "
    "the time of evaluation and saving does not count",
    "Find the phase that takes longer. If it is gen, look for a very long response, a slow reward (--reward-timeout) "
    "or a slow tool. If it is sync, look for a slow network or disk. If all phases are slow, look for another job on "
    "the machine.",
)
def stall(h: History) -> Seen | None:
    """The rollout took five times the usual time and at least a minute more. Busy machines cause smaller delays."""
    *before, now = h.values["seconds"][-WINDOW - 1 :] or [0.0]
    usual = median(before or [math.inf])
    if len(before) < LEVEL or now < max(5 * usual, usual + 60):
        return None
    says = f"the rollout took {now:.0f} s; the usual time is {usual:.0f} s"
    return Seen(says, lambda h: h.values["seconds"][-1] >= max(5 * usual, usual + 60))


@kind(
    "a tenth of a rollout's agent programs or environments failed or crashed",
    "log.txt has each error, and agents/programs.log has the last output of the programs. `slimelite env check` finds "
    "faults of an environment. --reward-error decides what happens to the samples of failed episodes.",
)
def agent_errors(h: History) -> Seen | None:
    """At least a tenth of the episodes, and at least two, failed. One failed program among many is normal."""
    return _share_of_episodes(h, "errors", "failed or crashed")


@kind(
    "a tenth of a rollout's agent programs or environments took too long",
    "Look for a tool or a request that waits. Raise --agent-timeout, --environment-call-timeout or "
    "--environment-timeout. With a lower --agent-programs, each program runs faster.",
)
def agent_timeouts(h: History) -> Seen | None:
    """See `agent_errors`."""
    return _share_of_episodes(h, "timeouts", "took too long")


@kind(
    "a tenth of a rollout's episodes have no token that is trained on",
    "These episodes ended before the first reply, or their replies are masked: does the program call the model at "
    "OPENAI_BASE_URL, and do the messages of reset leave enough context?",
)
def untrained_episodes(h: History) -> Seen | None:
    """See `agent_errors`."""
    return _share_of_episodes(h, "untrained", "have no token that is trained on")


@kind(
    "a tenth of a rollout's episodes have a prompt that leaves no space for a reply",
    "Shorten the outputs of tools and the messages, end episodes earlier (--environment-max-turns), or raise "
    "--rollout-max-context-len.",
)
def context_overflow(h: History) -> Seen | None:
    """See `agent_errors`."""
    return _share_of_episodes(h, "context_full", "ran out of context")


@kind(
    "half of the episodes of 3 rollouts end at --environment-max-turns",
    "Read the ends of such episodes: does the environment end an episode once it is solved or lost? If they need "
    "more turns, raise --environment-max-turns.",
)
def turn_limit(h: History) -> Seen | None:
    """At least half of the episodes in each of three rollouts: a new model may still learn to end its episodes."""
    limit = h.values["turn_limit"]
    if len(limit) < QUIET or min(limit[-QUIET:]) < 0.5:
        return None
    says = f"{limit[-1]:.0%} of the episodes reached the limit of turns (--environment-max-turns)"
    return Seen(says, lambda h: h.now("turn_limit", QUIET) >= 0.5)


def _at_least(share: float) -> str:
    """The lowest share of some rollouts, as words before "the groups"."""
    # 1e-9: as floats, 100 * 0.29 is below 29
    return "all" if share == 1 else f"{math.floor(100 * share + 1e-9)}% or more of"


def _share_of_episodes(h: History, name: str, what: str) -> Seen | None:
    """An alarm if a tenth of the episodes, and at least two, count in ``rollout/environment/{name}``."""
    episodes, number = (h.row.get(f"rollout/environment/{each}", 0.0) for each in ("episodes", name))
    if number < max(AGENTS * episodes, 2):
        return None
    return Seen(
        f"{number:.0f} of {episodes:.0f} episodes {what}", lambda h: _share_of_episodes(h, name, what) is not None
    )


@dataclass(frozen=True, slots=True)
class Alarm:
    """A problem from rollout ``rollout_id`` on.

    ``kind``: a name in ``KINDS``. ``says``: the finding, with numbers. ``advice``: the usual remedy.
    """

    kind: str
    rollout_id: int
    says: str
    advice: str
    ended: int | None = None

    @property
    def title(self) -> str:
        """A title such as ``alarm mismatch since rollout 12``."""
        until = "" if self.ended is None else f", ended in rollout {self.ended}"
        return f"alarm {self.kind} since rollout {self.rollout_id}{until}"

    @property
    def text(self) -> str:
        """The finding and the usual remedy, in one line."""
        return f"{self.says}. {self.advice}"


class Alarms:
    """The alarms of a run, both present and past ones. ``all`` lists the alarms in the order in which they began."""

    def __init__(self) -> None:
        self.all: list[Alarm] = []
        self._history = History()
        self._pending: defaultdict[str, list[float]] = defaultdict(list)
        self._going: dict[str, tuple[int, Seen, int]] = {}  # kind -> (index in all, condition, rollouts without it)

    @property
    def active(self) -> int:
        """The number of alarms that have not ended."""
        return len(self._going)

    def note(self, record: Mapping[str, Any]) -> list[Alarm]:
        """Take a record of metrics.jsonl. Returns the alarms that it begins or ends (then ``ended`` is set)."""
        if record["kind"] == "start":
            self._pending.clear()
            return []
        if record["kind"] == "eval":
            done = self._history.rollouts + (DEFAULT_AXIS in self._pending)
            for name in eval_metrics([record]):
                score = Score(done, float(record[name]), float(record.get(f"{name}-stderr", UNKNOWN_ERROR)))
                self._history.scores[name].append(score)
            return []
        for name, value in record.items():
            if name != "kind":
                self._pending[name].append(float(value))
        return self.judge() if record["kind"] == "perf" else []

    def judge(self) -> list[Alarm]:
        """Judge the rollout of the last records. Call this also after a failed rollout, which has no closing record."""
        if DEFAULT_AXIS not in self._pending:
            return []
        rollout_id = int(self._pending[DEFAULT_AXIS][-1])
        self._history.add(rollout_values(self._pending))
        self._pending.clear()
        changed = []
        for kind in KINDS:
            if kind.name in self._going:
                changed += self._go_on(kind.name, rollout_id)
            elif seen := kind.see(self._history):
                alarm = Alarm(kind.name, rollout_id, seen.says, kind.advice)
                self._going[kind.name] = (len(self.all), seen, 0)
                self.all.append(alarm)
                changed.append(alarm)
        return changed

    def _go_on(self, kind: str, rollout_id: int) -> list[Alarm]:
        index, seen, quiet = self._going[kind]
        quiet = 0 if seen.goes_on(self._history) else quiet + 1
        self._going[kind] = (index, seen, quiet)
        if quiet < QUIET:
            return []
        del self._going[kind]
        self.all[index] = replace(self.all[index], ended=rollout_id - QUIET + 1)
        return [self.all[index]]


def replay(records: Iterable[Mapping[str, object]]) -> list[Alarm]:
    """The alarms of a run, from its valid records (`read_metrics`), in the order in which they began."""
    alarms = Alarms()
    for record in records:
        alarms.note(record)
    alarms.judge()
    return alarms.all
