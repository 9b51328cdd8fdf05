"""The reward rules, one record for each value of --rm-type.

A user can add a rule with one file, which ``--import-file`` names::

    from slimelite.rewards.rules import RULES, Answer, Rule

    def quick(answer: Answer) -> float:
        return float(answer.label in answer.response)

    RULES.add(Rule("contains", quick))

The command line reads these records, so this module imports no heavy packages. The functions of a rule are imported at
their first call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from slimelite.base.registry import Function, Registry

if TYPE_CHECKING:
    from slimelite.samples.sample import Sample

Reward = float | dict[str, Any]

BOXED = "boxed_"
# limit of the address space of a grading process [MiB]; --code-memory-mb must be smaller
GRADER_MEMORY_MB = 4096


class TooCostly(BaseException):
    """An answer takes more processor time than its rule allows. The answer gets the rule's ``zero`` as reward, and is
    counted.

    This class does not inherit from `Exception`, because sympy and math-verify catch every `Exception` and continue.
    """


@dataclass(frozen=True, slots=True)
class Settings:
    """The flags that rules read. ``code_timeout``: the time limit for all tests together [s]. ``code_memory_mb``: the
    memory limit [MiB]. ``sandbox``: the name of a sandbox."""

    code_timeout: float = 10.0
    code_memory_mb: int = 1024
    format_regex: str | None = None
    sandbox: str = "process"


@dataclass(frozen=True, slots=True)
class Answer:
    """The part of a sample that a rule gets.

    ``label``: the right answer as text, as in the data set. ``key``: identifies the sample. The rule ``random`` hashes
    the key.
    """

    response: str
    label: str
    metadata: dict[str, Any] = field(default_factory=dict)
    key: str = ""
    settings: Settings = Settings()


@dataclass(frozen=True, slots=True)
class Exchange:
    """The part of a sample that a reward model gets. ``messages``: the prompt before the chat template is applied, if
    it is known."""

    prompt: str
    response: str
    messages: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A reward that could not be computed. ``kind`` is exception, timeout, crash, nonfinite, invalid or too_long.

    A worker may also return the kind ``costly``. ``costly`` means that the rule is bounded, and that the answer took
    too long and counts as wrong.
    """

    kind: str
    message: str
    traceback: str = ""


Outcome = Reward | Failure | BaseException


class Scorer(Protocol):
    """Scores samples outside this process, for example on a server. The field ``scorer`` of a rule creates the
    scorer."""

    async def score(self, samples: Sequence[Sample], texts: Sequence[str]) -> Sequence[Outcome]:
        """Return a reward or a failure for each sample. ``texts``: the responses, or the contents of their boxes."""
        ...

    def close(self) -> None:
        """Release the scorer's resources."""
        ...


@dataclass(frozen=True)
class Rule:
    r"""A rule that scores answers, either with two functions or with a `Scorer`.

    Attributes:
        quick: function ``answer -> reward``. This function runs in this process, and may only do string processing in
            linear time. It returns None if it cannot decide.
        slow: function ``answer -> reward``. This function is called if ``quick`` is missing or returns None. The
            function may take long, and runs in a worker process with a time limit.
        example: function ``answer -> response``. This function makes a response with reward 1 for an ``answer`` without
            a response. The dry run grades this response, so an unusable label is found before the run starts.
        scorer: function ``(args, trial) -> Scorer``. The scorer replaces ``quick`` and ``slow``. ``trial``: whether it
            scores only the trial row before a run starts.
        zero: the reward of a sample whose grading failed. None: the reward is 0, or a dict with 0 if --reward-key is
            given.
        needs_label: whether a sample without a label is an error.
        bounded: whether ``slow`` gets only one second of processor time. An answer that takes more time is wrong
            (`TooCostly`).
        boxable: whether the rule can score only the content of the last ``\boxed{}``. If so, a second rule
            ``boxed_NAME`` scores only this content (its field ``boxed`` is true). Rules that are not boxable search for
            their own marker, which may be outside the box.
        whole: whether the rule judges the whole text. For such a rule, the grader first removes the token that ended
            the response, such as ``<|im_end|>``. Other rules get the text with this token, as in slime.
        needs: the flag that the rule requires, with underscores. ``reads``: other flags of the rule.
        cautions: function ``() -> texts``. If a run uses the rule, the texts are logged once, after ``--rm-type NAME``.
    """

    name: str
    quick: Function | None = None
    slow: Function | None = None
    example: Function | None = None
    scorer: Function | None = None
    zero: Reward | None = 0.0
    needs_label: bool = True
    bounded: bool = False
    boxable: bool = False
    boxed: bool = False
    whole: bool = False
    needs: str | None = None
    reads: tuple[str, ...] = ()
    cautions: Function | None = None

    def __post_init__(self) -> None:
        if not (self.quick or self.slow or self.scorer):
            raise ValueError(
                f"the rule {self.name!r} cannot score; give it a function quick, a function slow or a scorer"
            )

    def lacks(self, args: object) -> str | None:
        """An error message if ``args`` lack the flag that the rule needs, else None."""
        if self.needs is None or getattr(args, self.needs):
            return None
        return f"--rm-type {self.name} needs --{self.needs.replace('_', '-')}"


# rules of slime that this project does not have -> the reason
REFUSED = {
    "opencua_click": "it scores clicks on screenshots, and images are not supported",
}


class Rules(Registry[Rule]):
    """Rules by name. A boxable rule has a second entry, ``boxed_NAME``."""

    def add(self, record: Rule) -> Rule:
        """Register ``record``. If the rule is boxable, register its boxed form too.

        Raises:
            ValueError: another rule has the same name.
        """
        added = super().add(record)
        if record.boxable:
            super().add(replace(record, name=BOXED + record.name, boxed=True))
        return added

    def __missing__(self, name: str) -> Rule:
        """Raise an error for a name that no rule has.

        Raises:
            ValueError: always. The message has the nearest name, or the reason why the rule is not available.
        """
        plain = name.removeprefix(BOXED)
        if plain in REFUSED:
            raise ValueError(f"--rm-type {name} is not supported: {REFUSED[plain]}")
        if plain in self:
            boxed = ", ".join(rule.name for rule in self.values() if rule.boxed)
            raise ValueError(
                f"--rm-type {name} would score every response as wrong: {plain} does not search its answer in a "
                f"box, but {BOXED} removes all text outside the box; use {plain} (rules with a boxed form: {boxed})"
            )
        return super().__missing__(name)


_MATH, _TEXT, _CODE, _SCORERS = (f"slimelite.rewards.{module}:" for module in ("math", "text", "code", "grader"))
_IFBENCH = "slimelite.contrib.ifbench:"
RULES = Rules(
    "reward rule",
    "--rm-type",
    (
        Rule("math", _MATH + "quick", _MATH + "slow", _MATH + "example", bounded=True),
        Rule("gsm8k", _MATH + "gsm8k", example=_MATH + "gsm8k_example"),
        Rule("last_number", _MATH + "last_number", example=_MATH + "gsm8k_example"),
        Rule("deepscaler", _MATH + "deepscaler", _MATH + "deepscaler_slow", _MATH + "deepscaler_example", bounded=True),
        Rule("dapo", _MATH + "dapo", example=_MATH + "dapo_example", zero={"score": 0.0, "acc": False, "pred": None}),
        Rule("f1", _TEXT + "f1", example=_TEXT + "label", boxable=True, whole=True),
        Rule("gpqa", _TEXT + "gpqa", example=_TEXT + "gpqa_example", needs_label=False, boxable=True),
        Rule("multiple_choice", _TEXT + "multiple_choice", example=_TEXT + "gpqa_example", needs_label=False),
        Rule(
            "code",
            _CODE + "quick",
            _CODE + "slow",
            needs_label=False,
            reads=("code_timeout", "code_memory_mb"),
            cautions=_CODE + "cautions",
        ),
        Rule("ifbench", _IFBENCH + "strict", needs_label=False, whole=True),
        Rule("ifbench_loose", _IFBENCH + "loose", needs_label=False, whole=True),
        Rule(
            "format",
            _TEXT + "format_quick",
            _TEXT + "format_slow",
            needs_label=False,
            whole=True,
            reads=("format_regex",),
        ),
        Rule("random", _TEXT + "coin", needs_label=False, boxable=True),
        Rule("zero", _TEXT + "nothing", needs_label=False),
        Rule("remote_rm", scorer=_SCORERS + "RemoteReward", zero=None, needs_label=False, boxable=True, needs="rm_url"),
        Rule(
            "reward_model",
            scorer=_SCORERS + "ModelReward",
            zero=None,
            needs_label=False,
            whole=True,
            needs="reward_model_path",
        ),
    ),
    instead=", or write your own function and give its path as --custom-rm-path",
)
