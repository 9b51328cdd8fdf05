"""The checks of `slimelite env check`. The checks judge the episodes that `slimelite.environments.probe` played.

Each check is a function that gets the observations and yields one sentence for each fault. The checks scale the
rewards: the golden answer gets 1, and the kind of reply with the lowest mean reward gets 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, NamedTuple

# largest scaled reward of a reply without an answer, and of a constant answer, which may be right by chance
SHARE, LUCKY = 0.2, 0.9
# without a golden answer, the full reward counts as 1, and no reply without an answer should get this much of it
PAID = 0.5
# rewards with a smaller difference are equal, because of rounding
SAME = 1e-6
# an episode that blocks the event loop for longer than this delays all other episodes [s]
LAG_SECONDS = 0.25
# a leak counts from this share of the rows on, with at least so many rows and so many different labels
LEAKS, ROWS_OF_A_LEAK, LABELS_OF_A_LEAK = 0.8, 3, 3
REVEALS = r"answer|label|solution|expected|target|correct|right|secret|truth|hidden|number|word|was|is"
PLACE = re.compile(r"\([^()]+, line \d+[^()]*\)$")
REWARDS = re.compile(
    r"\b(?:reward|score|points?)\b[^\w-]{0,4}(?:is|was|of)?[^\w-]{0,2}(-?\d+(?:\.\d+)?)", re.IGNORECASE
)

Record = Mapping[str, Any]


@dataclass
class Observed:
    """The output of one process of the probe.

    ``problem``: the reason why no episode could be played. ``hung``: the episode in which the process stopped
    answering. ``died``: the episode in which the process ended, and how it ended.
    """

    episodes: list[Record] = field(default_factory=list)
    labels: list[str | None] = field(default_factory=list)
    end: Record = field(default_factory=dict)
    problem: str | None = None
    hung: str | None = None
    died: str | None = None

    def of(self, kind: str, part: str | None = None) -> list[Record]:
        """The successful episodes of a ``kind`` of script. ``part``: only the episodes of this part of the probe."""
        return [e for e in self.episodes if e["kind"] == kind and part in (None, e["part"]) and not e["failure"]]

    def digests(self, part: str) -> dict[tuple[str, int], str]:
        """(script, row) -> the digest of the episode. An episode with a call that took too long has none, because time
        may end a call in one process and not in another."""
        return {(e["name"], e["row"]): e["digest"] for e in self.episodes if e["part"] == part and not _timed_out(e)}

    def golden(self) -> list[Record]:
        """The episodes with golden answers, in the answer format that scores highest."""
        by_name: dict[str, list[Record]] = {}
        for episode in self.of("golden", "first"):
            by_name.setdefault(episode["name"], []).append(episode)
        return max(by_name.values(), key=lambda each: mean(each) or -1e9, default=[])


class Finding(NamedTuple):
    """A fault: the name of the failed check, and a description."""

    check: str
    says: str


def _timed_out(episode: Record) -> bool:
    return bool(episode["failure"]) and episode["failure"][0] == "timeout"


def mean(episodes: Sequence[Record]) -> float | None:
    """The mean reward of the episodes that have a reward."""
    rewards = [e["reward"] for e in episodes if e["reward"] is not None]
    return fmean(rewards) if rewards else None


Check = Callable[[Observed, Observed], Iterator[str]]
CHECKS: dict[str, tuple[str, Check]] = {}


def check(name: str, healthy: str) -> Callable[[Check], Check]:
    """Register a check. ``healthy``: the text in the table if the check finds no fault."""

    def register(function: Check) -> Check:
        CHECKS[name] = healthy, function
        return function

    return register


def judge(one: Observed, two: Observed) -> list[Finding]:
    """The faults in the outputs ``one`` and ``two`` of the probe's two processes. The second process played only the
    first part of the probe."""
    return [Finding(name, says) for name, (_, find) in CHECKS.items() for says in dict.fromkeys(find(one, two))]


@check("runs", "every episode starts, continues and ends without an error")
def _runs(one: Observed, _: Observed) -> Iterator[str]:
    failures: dict[str, list[Record]] = {}
    for episode in one.episodes:
        if episode["failure"] and not _timed_out(episode):
            place = PLACE.search(episode["failure"][1])  # the same line may fail with different messages
            failures.setdefault(place[0] if place else episode["failure"][1], []).append(episode)
    for episodes in failures.values():
        everything = len(episodes) == len(one.episodes)
        yield f"{'each episode' if everything else 'after ' + episodes[0]['name']}: {episodes[0]['failure'][1]}"
    if one.died is not None:
        yield f"the process ended during {one.died}"


@check("in time", "no call hangs or blocks the event loop")
def _in_time(one: Observed, two: Observed) -> Iterator[str]:
    late, hung = next(filter(_timed_out, [*one.episodes, *two.episodes]), None), one.hung or two.hung
    if late is not None:
        yield f"after {late['name']}: {late['failure'][1]}; its process played no more episodes"
    elif hung is not None:
        yield (
            f"it hangs during {hung} and blocks Python's global lock or the event loop; its process played no more "
            "episodes"
        )
    lags = [lag for episode in one.episodes for lag in episode.get("lags", [])]
    long = [lag for lag in lags if lag > LAG_SECONDS]
    if len(long) >= 3 and len(long) >= len(lags) / 10:
        yield (
            f"calls block the event loop for {median(long):.1f} s, so all other episodes stop; use await for slow "
            "operations"
        )


@check("ends", "episodes end by themselves")
def _ends(one: Observed, _: Observed) -> Iterator[str]:
    whole = [e for e in one.episodes if not e["failure"] and e["kind"] != "cut"]
    mute = [e for e in whole if e["end"] == "mute"]
    if mute:
        yield f"after {mute[0]['name']}: a step continues the episode, but has no message for the model to answer"
    if len(whole) >= 8 and all(e["end"] == "limit" for e in whole):
        yield f"no episode ends with any kind of reply (after {max(len(e['turns']) for e in whole)} turns)"


@check("first message", "an episode begins with a message to answer")
def _first_message(one: Observed, _: Observed) -> Iterator[str]:
    starts = [e["start"] for e in one.episodes if e["start"]]
    if starts and all('"role": "assistant"' in start["messages"].rpartition("{")[2] for start in starts):
        yield "reset ends with a message of the assistant: the model has nothing to answer"
    single = [e for e in one.of("wrong", "first") if len(e["turns"]) == 1]
    labels = {label for label in one.labels if label is not None}
    if len(single) >= 4 and len(single) == len(one.of("wrong", "first")) and len(labels) > 1:
        shown = {e["start"]["messages"] for e in single}
        if len(shown) == 1:
            yield f"rows with {len(labels)} labels all begin with the same messages: the model cannot know the question"


@check("same seed", "the same row and seed give the same episode, in another process too")
def _same_seed(one: Observed, two: Observed) -> Iterator[str]:
    here, there = one.digests("first"), two.digests("first")
    different = [key for key in here.keys() & there.keys() if here[key] != there[key]]
    if different:
        name, row = min(different)
        yield f"row {row} after {name} gives another episode in a second process: derive all randomness from Row.seed"


@check("clean reset", "an episode does not depend on earlier or concurrent ones")
def _clean(one: Observed, two: Observed) -> Iterator[str]:
    if any(True for _ in _same_seed(one, two)):
        return
    first = one.digests("first")
    for part, why in (
        (
            "again",
            "gives another episode after other episodes were played: do they leave state in class or module variables?",
        ),
        ("together", "gives another episode while a second one is played: the two share variables"),
    ):
        now = one.digests(part)
        if different := [key for key in now if first.get(key, now[key]) != now[key]]:
            yield f"row {min(different)[1]} {why}"
            return
    if any(e.get("changed") for e in one.episodes):
        yield "it changes the row (prompt, label or metadata), but a group's episodes share it: copy what you change"
    for what, number in one.end.get("grown", {}).items():
        if number > 0.5 * one.end["episodes"] > 5:
            yield (
                f"{number} {what} are still open after {one.end['episodes']} episodes: release them in the method close"
            )


@check("golden answer", "the golden answer scores highest")
def _golden(one: Observed, _: Observed) -> Iterator[str]:
    golden, wrong = one.golden(), mean(one.of("wrong", "first"))
    best = mean(golden)
    if best is None:
        if golden and wrong is not None:
            yield "episodes with the golden answer have no reward, but other episodes have one"
        return
    low = wrong if wrong is not None else -1e9
    if best <= low + SAME:
        yield f"the golden answer scores {best:.3g} on average, but nonsense scores {low:.3g}"
        return
    failing = [e for e in golden if e["reward"] is None or e["reward"] <= low + (best - low) / 10]
    if failing:
        rows = ", ".join(str(e["row"]) for e in failing[:5])
        share = f"{len(failing)} of {len(golden)} rows (row {rows})"
        yield f"the golden answer scores nothing in {share}: is the label right?"
    for kind in ("empty", "constant", "copied", "long", "injection"):
        for name, episodes in _by_name(one.of(kind)).items():
            high = mean(episodes)
            if high is not None and high > best + SAME:
                yield f"{name} scores {high:.3g}, more than the golden answer ({best:.3g})"


@check("cheap answers", "empty, constant, copied, very long and injected answers score lowest")
def _cheap(one: Observed, _: Observed) -> Iterator[str]:
    best, means = mean(one.golden()), {"nonsense": mean(one.of("wrong", "first"))}
    kinds = dict.fromkeys(["nonsense"], "wrong")
    for kind in ("empty", "constant", "copied", "long", "injection", "code"):
        for name, episodes in _by_name(one.of(kind)).items():
            means[name], kinds[name] = mean(episodes), kind
    scored = {name: score for name, score in means.items() if score is not None}
    if not scored:
        return
    least = min(scored.values())
    if best is None or best <= least + SAME:
        low, empty = scored.get("nonsense"), scored.get("an empty reply")
        # a game may give a small reward for progress, or for every episode
        if best is None and low is not None and empty is not None and min(low, empty) >= PAID:
            yield f"nonsense scores {low:.3g}, and an empty reply {empty:.3g}: every reply is rewarded"
        return
    for name, score in scored.items():
        share = (score - least) / (best - least)
        if share > (LUCKY if kinds[name] in ("constant", "wrong") else SHARE):
            yield f"{name} scores {score:.3g} on average, and the golden answer {best:.3g}"


def _by_name(episodes: Sequence[Record]) -> dict[str, list[Record]]:
    by_name: dict[str, list[Record]] = {}
    for episode in episodes:
        by_name.setdefault(episode["name"], []).append(episode)
    return by_name


@check("no code", "replies never run as code")
def _no_code(one: Observed, _: Observed) -> Iterator[str]:
    ran = [e["name"] for e in one.episodes if e.get("ran")]
    if ran:
        yield f"{ran[0]} ran in the environment's process and made a file: never call eval on the model's text"


@check("no leak", "the model is shown neither the answer nor the reward")
def _no_leak(one: Observed, _: Observed) -> Iterator[str]:
    starts = {e["row"]: e["start"] for e in one.episodes if e["start"]}
    labels = {row: label for row, label in enumerate(one.labels) if label}
    shown = {row: f"{start['messages']} {start['tools']}" for row, start in starts.items()}
    if _leaks(shown, labels):
        yield "the first messages or the tools show the answer: they contain the label after a word such as answer"
    later = [e for e in one.of("wrong", "first") if len(e["turns"]) > 1 or e["end"] != "done"]
    after = {e["row"]: " ".join(turn["messages"] for turn in e["turns"] if not turn["done"]) for e in later}
    if _leaks(after, labels):
        yield "a message after a wrong reply reveals the right answer, and the episode continues"
    telling = [e for e in one.episodes if e["kind"] in ("wrong", "empty", "golden") and _tells_reward(e)]
    if len(telling) >= ROWS_OF_A_LEAK:
        yield "messages tell the model its reward before the episode ends"


def _leaks(texts: Mapping[int, str], labels: Mapping[int, str]) -> bool:
    """Whether the text of most rows has the row's label after a word such as "answer"."""
    rows = [row for row in texts if row in labels and texts[row]]
    if len(rows) < ROWS_OF_A_LEAK or len({labels[row] for row in rows}) < LABELS_OF_A_LEAK:
        return False
    seen = [row for row in rows if _announced(labels[row], texts[row])]
    others = [
        row for row in rows for other in rows if labels[other] != labels[row] and _announced(labels[other], texts[row])
    ]
    return len(seen) >= LEAKS * len(rows) and len(others) < len(seen)


def _announced(label: str, text: str) -> bool:
    word = rf"(?<!\w)({REVEALS})\b\W{{0,12}}((is|was|of|to)\b)?\W{{0,6}}"
    return re.search(rf"{word}{re.escape(label)}(?!\w)", text, re.IGNORECASE) is not None


def _tells_reward(episode: Record) -> bool:
    """Whether a message in the middle of an episode names the reward of its own step."""
    for turn in episode["turns"]:
        reward = turn["reward"]
        if turn["done"] or not isinstance(reward, int | float):
            continue
        if any(abs(float(number) - reward) < SAME for number in REWARDS.findall(turn["messages"])):
            return True
    return False


@check("rewards", "rewards go to the role that spoke")
def _rewards(one: Observed, _: Observed) -> Iterator[str]:
    speakers = {turn["role"] for e in one.episodes for turn in e["turns"]}
    who = ", ".join(map(repr, sorted(speakers)))
    for role in dict.fromkeys(role for e in one.episodes for turn in e["turns"] for role in turn["rewards"]):
        if role not in speakers and mean(one.golden()) is not None:  # else the first reply may have ended the episode
            yield f"a step has a reward for the role {role!r}, which never speaks; the roles that speak are {who}"
    done = [e for e in one.episodes if e["end"] == "done"]
    scored = [e for e in done if e["reward"] is not None]
    if scored and len(scored) < len(done):
        missing = next(e for e in done if e["reward"] is None)
        yield f"after {missing['name']} an episode ends without a reward, but other episodes have one"


@check("tools", "tools are described in OpenAI's form, and each call is answered")
def _tools(one: Observed, _: Observed) -> Iterator[str]:
    for episode in one.of("tools"):
        if any(turn["unanswered"] for turn in episode["turns"]):
            yield f"after {episode['name']}: a call has no answer (a message of the role tool with its tool_call_id)"
            return
