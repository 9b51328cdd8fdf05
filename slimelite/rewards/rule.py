"""What a reward rule is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Reward = float | dict[str, Any]


class TooCostly(BaseException):
    """An answer takes more processor time than its rule allows: it gets the rule's ``zero``, and is counted.

    It is no `Exception`: sympy and math-verify catch those and go on.
    """


@dataclass(frozen=True, slots=True)
class Settings:
    """The flags that rules read. ``code_timeout``: [s] for all tests; ``code_memory_mb``: [MiB]."""

    code_timeout: float = 10.0
    code_memory_mb: int = 1024
    format_regex: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rule sees of a sample.

    ``label``: the right answer as the data set has it, as text. ``key``: names the sample; the random rule's stream.
    """

    response: str
    label: str
    metadata: dict[str, Any] = field(default_factory=dict)
    key: str = ""
    settings: Settings = Settings()


@dataclass(frozen=True, slots=True)
class Exchange:
    """What a reward model sees of a sample. ``messages``: the prompt before the policy's chat template, if known."""

    prompt: str
    response: str
    messages: list[dict[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A reward that could not be had: ``kind`` is exception, timeout, crash, nonfinite or invalid.

    A worker also says ``costly``: the answer of a bounded rule took too long, and is wrong.
    """

    kind: str
    message: str
    traceback: str = ""


@dataclass(frozen=True)
class Rule:
    """A named way to score an answer, in two steps.

    ``quick`` is string work, linear in the text, and runs in this process; None means that it cannot tell. Then
    ``slow``, which may compute without bound, is asked in a worker process under a time limit. ``example`` writes the
    response (of an answer without one) that deserves reward 1: the dry run grades it, so that an unusable label is
    found at start. ``zero``: the reward of a sample whose grading failed. ``bounded``: ``slow`` gets two seconds of
    processor time, and an answer that takes more is wrong (`TooCostly`).
    """

    name: str
    quick: Callable[[Answer], Reward | None]
    slow: Callable[[Answer], Reward] | None = None
    example: Callable[[Answer], str] | None = None
    zero: Reward = 0.0
    needs_label: bool = True
    bounded: bool = False
    # can the rule read what stands inside \boxed{}? Others look for a marker that the boxed_ prefix would cut away
    boxable: bool = False
