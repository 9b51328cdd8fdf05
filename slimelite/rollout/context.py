"""The state that the parts of a rollout share, and the interface of plugins. The interface covers the arguments, the
data source and the return values of plugins."""

from __future__ import annotations

import argparse
import asyncio
import inspect
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from slimelite.arguments import Args
from slimelite.arguments.args import PLUGIN_CONSTANTS
from slimelite.base.guard import guarded
from slimelite.base.threads import LoopThread
from slimelite.data.prompts import DataSource
from slimelite.data.tokenizer import stop_token_ids
from slimelite.rollout.pool import AgentState, EnginePool
from slimelite.samples.sample import Generated, Sample
from slimelite.slime.plugins import load_function

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    from slimelite.environments.hosts import Host
    from slimelite.environments.program import Programs
    from slimelite.rewards.grader import Grader
    from slimelite.rollout.sessions import PooledSessions, RunFront
    from slimelite.rollout.teacher import Teacher


T = TypeVar("T")


@dataclass
class RolloutFnTrainOutput:
    """The result of a rollout function: finished, scored groups, and a dict from full metric names to values. A group
    is a flat list, even if a generate function returned several samples for one prompt (a fan-out).

    ``generated``: one entry for each response that this rollout generated, whether it was accepted or not. If
    ``generated`` is None, `train_output` assumes that this rollout generated every response in ``samples`` completely.
    """

    samples: list[list[Sample]]
    metrics: dict[str, Any] = field(default_factory=dict)
    generated: list[Generated] | None = None

    @property
    def flat(self) -> list[Sample]:
        """The samples of all groups, in one list."""
        return [sample for group in self.samples for sample in group]


@dataclass
class RolloutFnEvalOutput:
    """The results of an evaluation. ``data`` contains for each dataset the lists ``samples``, ``rewards`` and
    ``truncated``, as in slime. The keys of ``metrics`` are full metric names."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] = field(default_factory=dict)


def train_output(value: object) -> RolloutFnTrainOutput:
    """Convert ``value``, which a rollout function returned: an object with ``samples`` and ``metrics``, a list of
    groups, or a list of samples.

    Raises:
        ValueError: ``value`` has another type, or contains no samples.
    """
    samples = getattr(value, "samples", value)
    metrics = getattr(value, "metrics", None) or {}
    generated = getattr(value, "generated", None)
    if not isinstance(samples, list) or not samples:
        raise ValueError(
            f"a rollout function must return a list of groups, or an object with samples, not {value!r:.200}"
        )
    if isinstance(samples[0], Sample):
        by_group: dict[int | None, list[Sample]] = {}
        for sample in samples:
            by_group.setdefault(sample.group_index, []).append(sample)
        samples = list(by_group.values())
    output = RolloutFnTrainOutput([flatten(group) for group in samples], metrics, generated)
    if generated is None:
        output.generated = [sample.generated_since() for sample in output.flat]
    return output


def flatten(group: list[Any]) -> list[Sample]:
    """Flatten a group. In slime, a generate function may return several samples for one prompt, as a list inside the
    group. slimelite puts these samples into the group itself, and gives them the same rollout id.

    Raises:
        ValueError: an element of the group is not a sample.
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


# a function provided by the user
Plugin = Callable[..., Any]


class PluginArgs(argparse.Namespace):
    """The run's arguments, as plugins get them.

    Each plugin gets its own copy of the arguments, because slime's plugins change them. A plugin's copy also has the
    attribute ``rollout_context``. If the plugin's engine serves HTTP, ``sglang_router_ip`` and ``sglang_router_port``
    contain the engine's address.
    """

    keeps_ids: bool
    rollout_context: RolloutContext
    sglang_router_ip: str | None
    sglang_router_port: int | None

    def __getattr__(self, name: str) -> Any:
        """Properties of `Args`, such as ``args.loss``, which is the record of ``--loss-type``."""
        if name.startswith("__") or "rollout_context" not in vars(self):
            raise AttributeError(name)
        return getattr(self.rollout_context.args, name)


@dataclass(slots=True)
class RolloutContext:
    """Arguments, tokenizer, engines and grader of a run, and the thread with the event loop of the rollout."""

    args: Args
    tokenizer: PreTrainedTokenizerBase
    engines: EnginePool
    grader: Grader
    thread: LoopThread
    progress: Callable[[int, int, str], None]  # function that is called with (done, total, note)
    # scores training samples (--opd-type sglang); None: there is no teacher server
    teacher: Teacher | None = None
    # session id of a sample in a generate function -> the engine of its group, and the clock of its agent
    states: dict[str, AgentState] = field(default_factory=dict)
    # the sessions of agents; None until a generate function calls `sessions`
    agents: PooledSessions | None = None
    # opens the environments of --environment
    environment: Host | None = None
    # the HTTP front for agents that are programs; None until a generate function calls `front`
    server: RunFront | None = None
    # runs the programs of --agent-command
    programs: Programs | None = None
    # name of an eval dataset -> its prompts, read at the first evaluation of the dataset
    eval_prompts: dict[str, list[Sample]] = field(default_factory=dict)

    def version_trained_on(self, rollout_id: int) -> int:
        """The weight version that the trainer has when it trains on this rollout. With --async-rollout, the engines may
        have another version than the trainer."""
        return rollout_id if self.args.async_rollout else self.engines.weight_version

    def sessions(self) -> PooledSessions:
        """Agent sessions on this run's engines. Generate functions may use the sessions, but only on the event loop of
        the rollout.

        A session with the id ``sample.session_id`` uses the engine of the sample's group, and has its own seed.
        """
        if self.agents is None:
            from slimelite.rollout.sessions import PooledSessions  # only runs with agents need it
            from slimelite.serving.format import ChatFormat

            args, infos = self.args, self.engines.infos.values()
            limit = min([info.max_context_len for info in infos] + [args.rollout_max_context_len or 2**62])
            chat_format = ChatFormat(
                self.tokenizer,
                template_kwargs=args.apply_chat_template_kwargs,
                tool_parser=args.tool_call_parser,
                reasoning_parser=args.reasoning_parser,
                end_ids=stop_token_ids(str(args.tokenizer), self.tokenizer),
            )
            settings = (limit, args.rollout_seed, args.keeps_ids, args.engine_kind.kept, args.train_constrained)
            self.agents = PooledSessions(chat_format, self.engines, self.states, *settings)
        return self.agents

    async def front(self) -> str:
        """The base URL of an HTTP server for `sessions`. The first call starts the server. Generate functions may call
        this method, but only on the event loop of the rollout.

        A program sends its requests to session ``s`` at ``<url>/sessions/<s.id>/v1`` (OpenAI) or
        ``<url>/sessions/<s.id>`` (Anthropic), with ``s.key`` as its API key.
        """
        if self.server is None:
            from slimelite.rollout.sessions import RunFront

            self.server = RunFront(self.sessions(), self.engines, Path(str(self.args.hf_checkpoint)).name)
        return await self.server.start()

    @property
    def eval_reward_key(self) -> str | None:
        """If rewards are dicts, the key of the entry that evaluations use as the reward."""
        return self.args.eval_reward_key or self.args.reward_key

    async def each(self, jobs: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        """Run ``jobs`` concurrently, or one after the other with ``--deterministic-mode``. Returns their results."""
        if self.args.deterministic_mode:
            return [await job for job in jobs]
        return list(await asyncio.gather(*jobs))

    def __deepcopy__(self, memo: dict[int, Any]) -> RolloutContext:
        return self  # plugins deep-copy their arguments, but the engines must not be copied

    async def plugin_args(self, engine: int | None = None, *, evaluation: bool = False) -> PluginArgs:
        """A new copy of the arguments for a plugin, with the address of ``engine`` (None: no address).

        In an evaluation, the copy's ``keeps_ids`` is False, because no token is trained on. Otherwise it has the value
        of the run's arguments.
        """
        values = {f.name: getattr(self.args, f.name) for f in fields(self.args)}
        args = PluginArgs(**PLUGIN_CONSTANTS | self.args.custom_config, **values, rollout_context=self)
        args.keeps_ids = self.args.keeps_ids and not evaluation
        if engine is not None:
            address = urlsplit(await self.engines.url(engine))
            # the address may contain a key; keep it, because plugins build the address from these two parts
            args.sglang_router_ip, args.sglang_router_port = address.netloc.rpartition(":")[0], address.port
        return args


def load_plugin(path: str | None, flag: str) -> Plugin | None:
    """Load the function at ``path``, which is the value of ``flag``. Returns None if ``path`` is None.

    Raises:
        ValueError: the function cannot be loaded.
    """
    return None if path is None else load_function(path, flag)


def build_source(path: str | None, plugin_args: PluginArgs, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Build the data source: call the class at ``path`` (--data-source-path) with (args, tokenizer) or (args). If
    ``path`` is None, build a `DataSource`.

    Raises:
        ValueError: the class lacks a method that a rollout calls.
    """
    flag = "--data-source-path"
    if path is None:
        return DataSource(plugin_args.rollout_context.args, tokenizer)
    kind = load_function(path, flag)
    if missing := [m for m in ("get_samples", "add_samples", "__len__") if not hasattr(kind, m)]:
        raise ValueError(f"{flag} {path}: a data source needs the methods {', '.join(missing)}")
    wants_tokenizer = len(inspect.signature(kind).parameters) > 1
    make = guarded(kind, path, flag)
    source = make(plugin_args, tokenizer) if wants_tokenizer else make(plugin_args)
    for name in ("get_samples", "add_samples", "state_dict", "load_state_dict"):  # the methods that a run calls
        if hasattr(source, name):
            setattr(source, name, guarded(getattr(source, name), f"{path}.{name}", flag))
    return source
