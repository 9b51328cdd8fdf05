r"""``code``: the last Python block of the response passes all tests.

The tests are in the metadata, or in the label as JSON (an object, or a list of asserts), in one of three forms:

    {"test": "def check(candidate): ...", "entry_point": "add"}      HumanEval
    {"test_list": ["assert add(1, 2) == 3"]}                         MBPP
    {"inputs": ["1 2\n"], "outputs": ["3\n"]}                        stdin and stdout: APPS, TACO, CodeContests

each perhaps with ``prefix``: code to go in front of the response's (imports, or the head that it completes).
"""

from __future__ import annotations

import json
import time
from typing import Any, NamedTuple

from slimelite.rewards.rule import Answer, Rule

FENCE = "```"
PYTHON = ("", "python", "py", "python3")


class Tests(NamedTuple):
    """``script``: what runs after the code; else ``cases``, (stdin, stdout) of each."""

    prefix: str
    script: str | None
    cases: list[tuple[str, str]]


def quick(answer: Answer) -> float | None:
    """0 without a block of code.

    Raises:
        ValueError: there are no tests.
    """
    read_tests(answer)
    return 0.0 if last_block(answer.response) is None else None


def slow(answer: Answer) -> float:
    """1 if every test passes within --code-timeout in all, else 0."""
    from slimelite.rewards.sandbox import run_code  # it needs a process with one thread: a worker

    tests, block = read_tests(answer), last_block(answer.response)
    code = f"{tests.prefix}\n{block}" if tests.prefix else block or ""
    memory, end = answer.settings.code_memory_mb, time.monotonic() + answer.settings.code_timeout
    if tests.script is not None:
        run = run_code(code, tests.script, "", seconds=answer.settings.code_timeout, memory_mb=memory)
        return float(run.finished)
    for stdin, stdout in tests.cases:
        left = end - time.monotonic()
        if left <= 0:
            return 0.0
        run = run_code(code, None, stdin, seconds=left, memory_mb=memory)
        if not run.finished or lines(run.output) != lines(stdout):
            return 0.0
    return 1.0


def read_tests(answer: Answer) -> Tests:
    """The tests of a sample.

    Raises:
        ValueError: there are none, or they are in no known form.
    """
    given = {**_label(answer.label), **answer.metadata}
    prefix = str(given.get("prefix") or "")
    if given.get("test") and given.get("entry_point"):
        return Tests(prefix, f"{given['test']}\ncheck({given['entry_point']})\n", [])
    if given.get("test_list"):
        return Tests(prefix, "\n".join(map(str, given["test_list"])), [])
    inputs, outputs = given.get("inputs") or [], given.get("outputs") or []
    if inputs and len(inputs) == len(outputs):
        return Tests(prefix, None, [(str(a), str(b)) for a, b in zip(inputs, outputs, strict=True)])
    raise ValueError(
        "code needs tests in metadata (--metadata-key) or in the label as JSON: test and entry_point, test_list, or "
        f"inputs and outputs of equal length; there are {', '.join(given) or 'none'}"
    )


def last_block(response: str) -> str | None:
    """The last closed fenced block that is Python, or of no named language; None if there is none."""
    block: list[str] | None = None
    language, last = "", None
    for line in response.splitlines():
        if not line.lstrip().startswith(FENCE):
            if block is not None:
                block.append(line)
        elif block is None:
            block, language = [], line.strip().removeprefix(FENCE).strip().lower()
        else:
            last = "\n".join(block) if language in PYTHON else last
            block = None
    return last


def lines(text: str) -> list[str]:
    """Lines without the spaces at their ends, and without empty ones around the text."""
    return [line.rstrip() for line in text.strip().splitlines()]


def _label(label: str) -> dict[str, Any]:
    try:
        value = json.loads(label)
    except ValueError:
        return {}  # a label of another kind; the tests may be in the metadata
    return value if isinstance(value, dict) else {"test_list": value} if isinstance(value, list) else {}


RULE = Rule("code", quick, slow, needs_label=False)
