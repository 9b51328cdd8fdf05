"""``reasoning-gym:<task>[,<task>…][?key=value&…]``: puzzles that reasoning-gym makes from seeds and scores itself.

``size``: rows of each task at each level. ``levels``: rows have the difficulties 0 … levels - 1 of the library's
curriculum; 0: its default difficulty. ``prompt``: one of its system prompts, which ask for ``<answer>`` tags. Without a
prompt, the whole reply is the answer. Other keys are settings of the tasks, such as ``allow_negation=false``.

The library scores some answers with ``eval``. So scoring runs in a process that can read only Python's own files and
reach nothing else (`confine`). This file is also that process's program.
"""

from __future__ import annotations

import json
import math
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl

from slimelite.environments.protocol import Row, Start, Step
from slimelite.rewards.rules import GRADER_MEMORY_MB, Answer, Failure, Reward
from slimelite.rewards.workers import WorkerPool, serve
from slimelite.sandbox.confine import confine
from slimelite.serving.calls import PYTHON

# the library makes entry i of a data set from its seed + i: seeds of ours are this far apart, so none share an entry
APART = 1_000_000
# for the score of one answer; for the first import, which compiles the library [s]; processes
SCORE_SECONDS, START_SECONDS, SCORERS = 10.0, 300.0, 2
# tasks whose questions and answers depend on Python's hash seed too, so that a scoring process has others
CHANGING = ("list_functions", "polynomial_multiplication")
OWN = {"size": 500, "seed": 0, "levels": 0, "prompt": "default"}


def _read(text: str) -> dict[str, Any]:
    """The parts of ``chain_sum,gcd?size=1000&levels=3&min_digits=2``.

    Raises:
        ValueError: the text names no task, or a value has the wrong kind.
    """
    names, _, query = text.partition("?")
    settings = {key: _value(value) for key, value in parse_qsl(query, keep_blank_values=True)}
    spec = {key: settings.pop(key, usual) for key, usual in OWN.items()}
    whole = all(isinstance(spec[key], int) for key in ("size", "seed", "levels"))
    if not names or not whole or spec["size"] < 1 or spec["levels"] < 0:
        example = "tasks, and size, seed and levels as whole numbers, as in chain_sum,gcd?size=1000&seed=1"
        raise ValueError(f"--environment reasoning-gym:{text}: write {example}")
    return {"tasks": names.split(","), "settings": json.dumps(settings)} | spec


def _value(text: str) -> Any:
    """The value of a setting: a number, true, false or a list as in JSON or Python, or else the text."""
    try:
        value = PYTHON[text] if text in PYTHON else json.loads(text)
    except ValueError:
        return text
    return int(value) if isinstance(value, float) and value.is_integer() else value


@lru_cache(64)
def _dataset(task: str, level: int | None, seed: int, size: int, settings: str) -> Any:
    """The library's data set.

    Raises:
        ValueError: there is no such task, it refuses its settings, or it cannot score an answer.
    """
    import reasoning_gym
    from reasoning_gym.factory import CURRICULA, DATASETS

    if task not in DATASETS or task == "composite":
        raise ValueError(f"reasoning-gym has no task {task}; it has {', '.join(sorted({*DATASETS} - {'composite'}))}")
    if task in CHANGING:
        raise ValueError(f"reasoning-gym:{task} is not usable: it makes different questions from the same seed")
    config = DATASETS[task][1]()
    overrides = {key: value for key, value in json.loads(settings).items() if hasattr(config, key)}
    for key, value in overrides.items():
        usual = getattr(config, key)
        # the library takes any text for true, and one for a list of its letters
        if value not in (True, False) if isinstance(usual, bool) else isinstance(value, str) != isinstance(usual, str):
            raise ValueError(f"reasoning-gym: {key} of {task} is a value like {usual!r}, not {value!r}")
    if level is not None:
        if (curriculum := CURRICULA.get(task, lambda: None)()) is None:
            raise ValueError(f"reasoning-gym has no curriculum for {task}; leave levels out")
        curriculum.set_global_level(level)
        config = curriculum.generate_configuration()
    try:
        made = reasoning_gym.create_dataset(task, **{**vars(config), **overrides, "seed": seed * APART, "size": size})
    except (AssertionError, TypeError) as error:
        raise ValueError(f"reasoning-gym refuses the settings of {task}: {error}") from error
    if made[0]["answer"] is None or made.score_answer(made[0]["answer"], made[0]) < 1:
        raise ValueError(f"reasoning-gym:{task} cannot be used: the library gives no reward to its own answer")
    return made


def rows(text: str) -> Iterator[dict[str, Any]]:
    """Yields a row for each puzzle of ``text``, such as ``chain_sum,gcd``.

    The first puzzle of each task comes first, level by level. Then come the second ones, up to ``size`` of each.

    Raises:
        ValueError: reasoning-gym has no such prompt, or no task has one of the settings.
    """
    from reasoning_gym.utils import SYSTEM_PROMPTS

    spec = _read(text)
    prompt, prompts = spec["prompt"], {"none": "", **SYSTEM_PROMPTS}
    if prompt not in prompts:
        raise ValueError(f"reasoning-gym has no prompt {prompt}; it has {', '.join(prompts)}")
    unknown = set(json.loads(spec["settings"]))
    first = [{"role": "system", "content": prompts[prompt]}] if prompts[prompt] else []
    recipe = {key: spec[key] for key in ("seed", "size", "settings")}
    for index in range(spec["size"]):
        for level in range(spec["levels"]) or [None]:
            for task in spec["tasks"]:
                made = _dataset(task, level, *recipe.values())
                unknown -= set(vars(made.config))
                entry, about = made[index], {"task": task, "level": level, **recipe, "index": index}
                messages = [*first, {"role": "user", "content": entry["question"]}]
                yield {"input": messages, "label": entry["answer"], "metadata": {**about, "tags": bool(first)}}
        if unknown:
            raise ValueError(f"none of {', '.join(spec['tasks'])} has a setting {', '.join(sorted(unknown))}")


class ReasoningGym:
    """One puzzle. The model sees the question and answers once."""

    def __init__(self, scorers: WorkerPool) -> None:
        self._scorers = scorers

    async def reset(self, row: Row) -> Start:
        """Show the question."""
        if "tags" not in row.metadata:
            raise ValueError("this row does not come from reasoning-gym; name the tasks and leave --prompt-data out")
        self._recipe = row.metadata
        return Start(row.prompt)

    async def step(self, reply: Mapping[str, Any]) -> Step:
        """Score the answer. If the scorer cannot read it, or takes too long, the reward is 0."""
        (score,) = await self._scorers.run([("reasoning-gym", Answer(reply["content"] or "", "", self._recipe))])
        number = score if isinstance(score, float) else None
        return Step(reward=number or 0.0, done=True, metrics={"unscored": float(number is None)})


def make(text: str) -> Callable[[], ReasoningGym]:
    """The factory of episodes, which share the scoring processes.

    The first process starts here, because the library's import may take longer than a call of an environment.
    """
    _read(text)
    scorers = WorkerPool(SCORERS, SCORE_SECONDS, program=(__name__,), chunk=1, start_seconds=START_SECONDS)
    scorers.start()
    return lambda: ReasoningGym(scorers)


def _scored(tasks: list[tuple[str, Answer]]) -> Iterator[Reward | Failure]:
    from reasoning_gym.utils import extract_answer

    for _, answer in tasks:
        about = answer.metadata
        try:
            made = _dataset(*(about[key] for key in ("task", "level", "seed", "size", "settings")))
            extracted = extract_answer(answer.response) if about["tags"] else answer.response.strip()
            score = float(made.score_answer(extracted, made[about["index"]]))
            yield score if math.isfinite(score) else Failure("nonfinite", str(score))
        except Exception as error:
            yield Failure("exception", f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    import reasoning_gym  # noqa: F401  before this process can read Python's own files alone

    confine("/nowhere", resource.RLIM_INFINITY, GRADER_MEMORY_MB << 20)
    serve(int(sys.argv[1]), float(sys.argv[2]), _scored)
