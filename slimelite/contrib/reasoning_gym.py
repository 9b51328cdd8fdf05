"""The environment ``reasoning-gym:<task>[,<task>…][?key=value&…]``. The library reasoning-gym makes puzzles from seeds,
and scores the answers.

``size``: the number of rows of each task at each level. ``levels``: the number of difficulty levels. Rows have the
levels 0 … levels - 1 of the library's curriculum. With ``levels=0`` the rows have the default difficulty. ``prompt``:
the name of a system prompt of the library. The library's system prompts ask for ``<answer>`` tags. Without ``prompt``,
the whole reply is the answer. All other parameters are settings of the tasks, such as ``allow_negation=false``.

The library scores some answers with Python's ``eval``. So scoring runs in a separate process that can read only
Python's own files and has no other access (`confine`). This file is also the program of the scoring process.
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

# difference between our seeds; the library makes entry i of a data set from seed + i, so our data sets share no entry
APART = 1_000_000
# time limit for the score of one answer [s]; time limit for the first import, which compiles the library [s]; number of
# scoring processes
SCORE_SECONDS, START_SECONDS, SCORERS = 10.0, 300.0, 2
# tasks whose questions also depend on Python's hash seed, so a scoring process would make other questions
CHANGING = ("list_functions", "polynomial_multiplication")
OWN = {"size": 500, "seed": 0, "levels": 0, "prompt": "default"}


def _read(text: str) -> dict[str, Any]:
    """Parse a spec such as ``chain_sum,gcd?size=1000&levels=3&min_digits=2``.

    Raises:
        ValueError: the text names no task, or a value has a wrong type.
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
    """The value of a setting. The value is a number, true, false or a list, written as in JSON or Python. In all other
    cases, the value is the text."""
    try:
        value = PYTHON[text] if text in PYTHON else json.loads(text)
    except ValueError:
        return text
    return int(value) if isinstance(value, float) and value.is_integer() else value


@lru_cache(64)
def _dataset(task: str, level: int | None, seed: int, size: int, settings: str) -> Any:
    """Create the library's data set of ``task``.

    Raises:
        ValueError: there is no such task, the task refuses its settings, or the library cannot score the task's
            answers.
    """
    import reasoning_gym
    from reasoning_gym.factory import CURRICULA, DATASETS

    if task not in DATASETS or task == "composite":
        raise ValueError(f"reasoning-gym has no task {task}; it has {', '.join(sorted({*DATASETS} - {'composite'}))}")
    if task in CHANGING:
        raise ValueError(f"reasoning-gym:{task} cannot be used: it makes different questions from the same seed")
    config = DATASETS[task][1]()
    overrides = {key: value for key, value in json.loads(settings).items() if hasattr(config, key)}
    for key, value in overrides.items():
        usual = getattr(config, key)
        # the library would accept any text as true, and would read a text as the list of its letters
        if value not in (True, False) if isinstance(usual, bool) else isinstance(value, str) != isinstance(usual, str):
            raise ValueError(f"reasoning-gym: {key} of {task} must be a value such as {usual!r}, not {value!r}")
    if level is not None:
        if (curriculum := CURRICULA.get(task, lambda: None)()) is None:
            raise ValueError(f"reasoning-gym has no curriculum for {task}; leave out levels")
        curriculum.set_global_level(level)
        config = curriculum.generate_configuration()
    try:
        made = reasoning_gym.create_dataset(task, **{**vars(config), **overrides, "seed": seed * APART, "size": size})
    except (AssertionError, TypeError) as error:
        raise ValueError(f"reasoning-gym refuses the settings of {task}: {error}") from error
    if made[0]["answer"] is None or made.score_answer(made[0]["answer"], made[0]) < 1:
        raise ValueError(f"reasoning-gym:{task} cannot be used: the library does not accept its own answer")
    return made


def rows(text: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each puzzle of ``text``, such as ``chain_sum,gcd``.

    The first rows are puzzle 1 of each task at the first level. Puzzle 1 of each task at the next level follows, and so
    on. After the last level comes puzzle 2, in the same way, up to puzzle number ``size``.

    Raises:
        ValueError: reasoning-gym has no such prompt, or a setting belongs to none of the tasks.
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
    """An episode with one puzzle. The model sees the question, and gives one answer."""

    def __init__(self, scorers: WorkerPool) -> None:
        self._scorers = scorers

    async def reset(self, row: Row) -> Start:
        """Return the question."""
        if "tags" not in row.metadata:
            raise ValueError("this row does not come from reasoning-gym; name the tasks and leave out --prompt-data")
        self._recipe = row.metadata
        return Start(row.prompt)

    async def step(self, reply: Mapping[str, Any]) -> Step:
        """Score the answer. If the scorer cannot read the answer, or if the scoring takes too long, the reward is 0."""
        (score,) = await self._scorers.run([("reasoning-gym", Answer(reply["content"] or "", "", self._recipe))])
        number = score if isinstance(score, float) else None
        return Step(reward=number or 0.0, done=True, metrics={"unscored": float(number is None)})


def make(text: str) -> Callable[[], ReasoningGym]:
    """The factory of episodes. All episodes share the scoring processes.

    The first process is started here, because the import of the library may take longer than the time limit of a call.
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
    import reasoning_gym  # noqa: F401  import it before `confine` limits this process

    confine("/nowhere", resource.RLIM_INFINITY, GRADER_MEMORY_MB << 20)
    serve(int(sys.argv[1]), float(sys.argv[2]), _scored)
