"""What the parts of the rollout share, and how plugins see it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from slimelite.arguments import Args
from slimelite.arguments.megatron import PLUGIN_CONSTANTS
from slimelite.rollout.pool import EnginePool
from slimelite.rollout.requests import rollout_params, slime_params
from slimelite.rollout.teacher import Teacher

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    from slimelite.data.prompts import Prompt
    from slimelite.rewards import Grader

# done, total, what it is about
Progress = Callable[[int, int, str], None]


class PluginArgs(argparse.Namespace):
    """The run's arguments as plugins get them.

    A copy they may change (slime's do), with ``sglang_router_ip`` and ``sglang_router_port`` of an engine where one
    serves HTTP, and ``rollout_context``.
    """

    rollout_context: RolloutContext
    sglang_router_ip: str | None
    sglang_router_port: int | None


@dataclass(slots=True)
class RolloutContext:
    """Arguments, tokenizer, engines and grader of a run; ``run`` executes a coroutine on the rollout's event loop."""

    args: Args
    tokenizer: PreTrainedTokenizerBase
    engines: EnginePool
    grader: Grader
    run: Callable[[Coroutine[Any, Any, Any]], Any]
    progress: Progress
    # scores training samples (--opd-type sglang); None: nobody does here
    teacher: Teacher | None = None
    # name of an eval dataset -> its prompts, once read
    eval_prompts: dict[str, list[Prompt]] = field(default_factory=dict)

    # slime's GenerateState has these two
    processor: None = None

    @property
    def sampling_params(self) -> dict[str, Any]:
        """slime's dict of the run's sampling parameters."""
        return slime_params(rollout_params(self.args), seed=None)

    def version_trained_on(self, rollout_id: int) -> int:
        """The weight version that rollout ``rollout_id`` meets in training; the engines' own, if none runs ahead."""
        return rollout_id if self.args.async_rollout else self.engines.weight_version

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
