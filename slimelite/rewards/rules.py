"""The reward rules, one record for each value of --rm-type.

A user can add a rule with a file such as the following, whose path is passed as ``--import-file``::

    from slimelite.rewards.rules import RULES, Answer, Rule

    def quick(answer: Answer) -> float:
        return float(answer.label in answer.response)

    RULES.add(Rule("contains", quick))

The code that parses the command line reads these records, so this module imports no heavy packages. The functions of a
built-in rule are imported when they are first called.
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
    """The check of a response takes more processor time than its rule allows. The response gets the rule's ``zero`` as
    reward, and is counted in a metric.

    This class does not inherit from `Exception`, because sympy and math-verify catch every `Exception` and continue.
    """


@dataclass(frozen=True, slots=True)
class Settings:
    """The values of the flags that rules use. ``code_timeout``: the time limit for all tests of a response together
    [s]. ``code_memory_mb``: the memory limit of the tested program [MiB]. ``sandbox``: the sandbox in which the program
    runs."""

    code_timeout: float = 10.0
    code_memory_mb: int = 1024
    format_regex: str | None = None
    sandbox: str = "process"


@dataclass(frozen=True, slots=True)
class Answer:
    """The argument of a rule's functions: the parts of a sample that a rule may use.

    ``label``: the right answer as text, as in the data set. ``key``: identifies the sample; the rule ``random`` hashes
    it.
    """

    response: str
    label: str
    metadata: dict[str, Any] = field(default_factory=dict)
    key: str = ""
    settings: Settings = Settings()


@dataclass(frozen=True, slots=True)
class Exchange:
    """The input of a reward model: prompt and response of a sample. ``messages``: the prompt as messages, before the
    chat template was applied, or None if unknown."""

    prompt: str
    response: str
    messages: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A reward that could not be computed. ``kind`` is exception, timeout, crash, nonfinite, invalid or too_long.

    A worker process may also return the kind ``costly``, which means that the check of the response exceeded the time
    limit of a ``bounded`` rule. Such a response counts as wrong.
    """

    kind: str
    message: str
    traceback: str = ""


Outcome = Reward | Failure | BaseException


class Scorer(Protocol):
    """Scores samples outside this process, for example on a server. The function in a rule's field ``scorer`` creates
    such a scorer."""

    async def score(self, samples: Sequence[Sample], texts: Sequence[str]) -> Sequence[Outcome]:
        """Return a reward or a failure for each sample. ``texts``: the samples' responses, or for a boxed rule the
        contents of the responses' last boxes."""
        ...

    def close(self) -> None:
        """Release the resources of the scorer, such as processes."""
        ...


@dataclass(frozen=True)
class Rule:
    r"""A rule that scores responses, either with the functions ``quick`` and ``slow`` or with a `Scorer`.

    Attributes:
        quick: function ``answer -> reward``. It runs in the grader's process, so it may only process strings, in linear
            time. ``quick`` returns None if ``slow`` must decide.
        slow: function ``answer -> reward``. ``slow`` is called if ``quick`` is missing or returns None. It may take
            long, and runs in a worker process with a time limit.
        example: function ``answer -> response``. In this `Answer`, the label is set and ``response`` is empty. The
            returned response must get reward 1. It is graded before the run starts, so an unusable label is detected
            early.
        scorer: function ``(args, trial) -> Scorer``. The scorer replaces ``quick`` and ``slow``. ``trial``: whether the
            scorer only scores one row of the data before a run starts.
        zero: the reward of a sample whose grading failed. If ``zero`` is None, the reward is 0; with --reward-key it is
            a dict with the value 0 for this key.
        needs_label: whether a sample without a label is an error.
        bounded: whether ``slow`` may use only one second of processor time for a response. A response that takes longer
            counts as wrong (`TooCostly`).
        boxable: whether there is a second rule ``boxed_NAME``, whose field ``boxed`` is true. It applies this rule only
            to the content of the response's last ``\boxed{}``. A rule that itself searches for a marker is not boxable,
            because the marker may be outside the box.
        whole: whether the rule scores the response's whole text. For such a rule, the grader first removes the token
            that ended the response, such as ``<|im_end|>``. The text that other rules get still contains this token, as
            in slime.
        needs: the flag that the rule requires, written with underscores. ``reads``: other flags that the rule uses.
        cautions: function ``() -> texts``, which returns warnings. If a run uses the rule, each warning is logged once,
            with ``--rm-type NAME`` before the text.
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
            raise ValueError(f"the rule {self.name!r} cannot score; give it at least one of quick=, slow= and scorer=")

    def lacks(self, args: object) -> str | None:
        """An error message if the flag ``needs`` is not set in ``args``, else None."""
        if self.needs is None or getattr(args, self.needs):
            return None
        return f"--rm-type {self.name} needs --{self.needs.replace('_', '-')}"


# rules of slime that this project does not have -> the reason
REFUSED = {
    "opencua_click": "it scores clicks on screenshots, and images are not supported",
}


class Rules(Registry[Rule]):
    """The reward rules by name. A boxable rule has two entries, ``NAME`` and ``boxed_NAME``."""

    def add(self, record: Rule) -> Rule:
        """Register the rule ``record``. If the rule is boxable, also register ``boxed_NAME``.

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
                f"--rm-type {name} would score every response as wrong: {BOXED} keeps only the content of the box, but "
                f"{plain} needs the whole response; use {plain} (rules with a boxed form: {boxed})"
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
