"""What the parts of the rollout share, and what plugins meet of it: arguments, data source, what they return."""

from __future__ import annotations

import argparse
import asyncio
import inspect
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from slimelite.arguments import Args
from slimelite.arguments.args import PLUGIN_CONSTANTS
from slimelite.data.source import DataSource
from slimelite.plugins import guarded, load_function
from slimelite.rollout.pool import EnginePool
from slimelite.rollout.teacher import Teacher
from slimelite.sample import Sample
from slimelite.threads import LoopThread

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    from slimelite.rewards.grader import Grader


T = TypeVar("T")


class Generated(NamedTuple):
    """What a rollout added to one response: ``tokens``, those the loss sees, and seconds spent on tools."""

    tokens: int
    effective: int
    waited: float = 0.0


@dataclass
class RolloutFnTrainOutput:
    """Finished, scored groups (fan-out siblings side by side in their group), and metrics by their full names.

    ``generated``: all that this rollout generated, also what was not accepted; None: the samples from end to end, which
    `train_output` puts there.
    """

    samples: list[list[Sample]]
    metrics: dict[str, Any] = field(default_factory=dict)
    generated: list[Generated] | None = None

    @property
    def flat(self) -> list[Sample]:
        """The samples of all groups."""
        return [sample for group in self.samples for sample in group]


@dataclass
class RolloutFnEvalOutput:
    """For each dataset its ``samples``, and slime's ``rewards`` and ``truncated`` columns; metrics by full names."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] = field(default_factory=dict)


def train_output(value: Any) -> RolloutFnTrainOutput:
    """What a rollout function returned: an object with ``samples`` and ``metrics``, groups, or samples (regrouped).

    Raises:
        ValueError: it is none of these, or empty.
    """
    samples = getattr(value, "samples", value)
    metrics = getattr(value, "metrics", None) or {}
    generated = getattr(value, "generated", None)
    if not isinstance(samples, list) or not samples:
        raise ValueError(
            f"a rollout function returns a list of groups of samples, or an object with it, not {value!r:.200}"
        )
    if isinstance(samples[0], Sample):
        by_group: dict[int | None, list[Sample]] = {}
        for sample in samples:
            by_group.setdefault(sample.group_index, []).append(sample)
        samples = list(by_group.values())
    output = RolloutFnTrainOutput([flatten(group) for group in samples], metrics, generated)
    if generated is None:
        lengths = ((s.response_length, s.effective_response_length, s.non_generation_time) for s in output.flat)
        output.generated = [Generated(*length) for length in lengths]
    return output


def flatten(group: list[Any]) -> list[Sample]:
    """slime nests the siblings of a fan-out in their group; here they stand side by side, sharing a rollout id.

    Raises:
        ValueError: something in it is not a sample.
    """
    flat: list[Sample] = []
    for item in group:
        siblings = item if isinstance(item, list) else [item]
        for sample in siblings:
            if not isinstance(sample, Sample):
                raise ValueError(f"expected a Sample in a group, got a {type(sample).__name__}")
            if isinstance(item, list) and sample.rollout_id is None:
                sample.rollout_id = siblings[0].index
        flat.extend(siblings)
    return flat


# done, total, what it is about
Progress = Callable[[int, int, str], None]
# a function of the user
Plugin = Callable[..., Any]


class PluginArgs(argparse.Namespace):
    """The run's arguments as plugins get them.

    A copy they may change (slime's do), with ``sglang_router_ip`` and ``sglang_router_port`` of an engine where one
    serves HTTP, and ``rollout_context``.
    """

    rollout_context: RolloutContext
    sglang_router_ip: str | None
    sglang_router_port: int | None

    def __getattr__(self, name: str) -> Any:
        """What follows from the arguments, such as ``args.loss``, the record of ``--loss-type``."""
        if name.startswith("__") or "rollout_context" not in vars(self):
            raise AttributeError(name)
        return getattr(self.rollout_context.args, name)


@dataclass(slots=True)
class RolloutContext:
    """Arguments, tokenizer, engines and grader of a run, and the thread on whose event loop its coroutines run."""

    args: Args
    tokenizer: PreTrainedTokenizerBase
    engines: EnginePool
    grader: Grader
    thread: LoopThread
    progress: Progress
    # scores training samples (--opd-type sglang); None: nobody does here
    teacher: Teacher | None = None
    # name of an eval dataset -> its prompts, once read
    eval_prompts: dict[str, list[Sample]] = field(default_factory=dict)

    def version_trained_on(self, rollout_id: int) -> int:
        """The weight version that rollout ``rollout_id`` meets in training; the engines' own, if none runs ahead."""
        return rollout_id if self.args.async_rollout else self.engines.weight_version

    @property
    def eval_reward_key(self) -> str | None:
        """Which entry of a reward that is a dict counts in an evaluation."""
        return self.args.eval_reward_key or self.args.reward_key

    async def each(self, jobs: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        """The results of ``jobs``, which go on together, or under ``--deterministic-mode`` one after the other."""
        if self.args.deterministic_mode:
            return [await job for job in jobs]
        return list(await asyncio.gather(*jobs))

    def __deepcopy__(self, memo: dict[int, Any]) -> RolloutContext:
        return self  # plugins deep-copy their args; the engines stay the same

    async def plugin_args(self, engine: int | None = None) -> PluginArgs:
        """A fresh copy of the arguments for a plugin, with the address of ``engine`` (None: of no engine)."""
        values = {f.name: getattr(self.args, f.name) for f in fields(self.args)}
        args = PluginArgs(**PLUGIN_CONSTANTS | self.args.custom_config, **values, rollout_context=self)
        if engine is not None:
            address = urlsplit(await self.engines.url(engine))
            args.sglang_router_ip, args.sglang_router_port = address.hostname, address.port
        return args


def load_plugin(path: str | None, flag: str) -> Plugin | None:
    """The function at ``path``, which ``flag`` names; None if it names none.

    Raises:
        ValueError: it cannot be loaded.
    """
    return None if path is None else load_function(path, flag)


def build_source(args: Args, plugin_args: PluginArgs, tokenizer: PreTrainedTokenizerBase) -> Any:
    """What ``--data-source-path`` names, called with (args, tokenizer) or slime's (args); else a `DataSource`.

    Raises:
        ValueError: the class lacks a method that a rollout calls.
    """
    path, flag = args.data_source_path, "--data-source-path"
    if path is None:
        return DataSource(args, tokenizer)
    kind = load_function(path, flag)
    if missing := [m for m in ("get_samples", "add_samples", "__len__") if not hasattr(kind, m)]:
        raise ValueError(f"{flag} {path}: a data source needs {', '.join(missing)}")
    wants_tokenizer = len(inspect.signature(kind).parameters) > 1
    make = guarded(kind, path, flag)
    source = make(plugin_args, tokenizer) if wants_tokenizer else make(plugin_args)
    for name in ("get_samples", "add_samples", "state_dict", "load_state_dict"):  # those that a run calls
        if hasattr(source, name):
            setattr(source, name, guarded(getattr(source, name), f"{path}.{name}", flag))
    return source
