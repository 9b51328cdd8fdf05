"""slime's names for what we have: its plugin paths work here, and its plugins import ours.

A slime plugin says ``from slime.utils.types import Sample``. Where slime is not installed, loading a plugin adds an
import finder (last in line) that serves the modules of ``SLIME_NAMES``, and nothing else, under the name ``slime``.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from slimelite.sample import FINISH_STATUS, UNSTAMPED, Sample, Status

if TYPE_CHECKING:
    from slimelite.rollout.context import PluginArgs, RolloutContext

FILTERS = "slimelite.rollout.filters"

SLIME_NAMES = {
    "slime.utils.types.Sample": "slimelite.compat.SlimeSample",
    "slime.utils.http_utils.post": "slimelite.compat.post",
    "slime.utils.http_utils.get": "slimelite.compat.get",
    "slime.utils.misc.load_function": "slimelite.plugins.load_function",
    "slime.utils.async_utils.run": "asyncio.run",
    "slime.utils.processing_utils.load_tokenizer": "slimelite.compat.load_tokenizer",
    "slime.backends.megatron_utils.cp_utils.all_gather_with_cp": "slimelite.compat.whole_response",
    "slime.backends.megatron_utils.cp_utils.slice_log_prob_with_cp": "slimelite.compat.whole_response",
    "slime.rollout.base_types.RolloutFnTrainOutput": "slimelite.rollout.outputs.RolloutFnTrainOutput",
    "slime.rollout.base_types.RolloutFnEvalOutput": "slimelite.rollout.outputs.RolloutFnEvalOutput",
    "slime.rollout.sglang_rollout.generate_rollout": "slimelite.rollout.generate.generate_rollout",
    "slime.rollout.sglang_rollout.GenerateState": "slimelite.compat.generate_state",
    "slime.rollout.sglang_rollout.get_model_url": "slimelite.compat.get_model_url",
    "slime.rollout.sft_rollout.generate_rollout": "slimelite.rollout.sft.generate_rollout",
    "slime.rollout.on_policy_distillation.reward_func": "slimelite.rollout.teacher.reward_func",
    "slime.rollout.on_policy_distillation.post_process_rewards": "slimelite.rollout.teacher.post_process_rewards",
    "slime.rollout.data_source.RolloutDataSource": "slimelite.rollout.source.PluginDataSource",
    "slime.rollout.data_source.RolloutDataSourceWithBuffer": "slimelite.rollout.source.PluginDataSource",
    "slime.rollout.rm_hub.async_rm": "slimelite.compat.async_rm",
    "slime.rollout.rm_hub.batched_async_rm": "slimelite.compat.batched_async_rm",
    "slime.rollout.rm_hub.grade_answer_verl": "slimelite.compat.grade_answer_verl",
    "slime.rollout.rm_hub.math_utils.grade_answer_verl": "slimelite.compat.grade_answer_verl",
    "slime.rollout.rm_hub.math_utils.extract_answer": "slimelite.rewards.latex.extract_boxed_answer",
    "slime.rollout.rm_hub.math_utils.extract_boxed_answer": "slimelite.rewards.latex.extract_boxed_answer",
    "slime.rollout.rm_hub.math_utils.last_boxed_only_string": "slimelite.rewards.latex.last_boxed_only_string",
    "slime.rollout.rm_hub.math_utils.remove_boxed": "slimelite.rewards.latex.remove_boxed",
    "slime.rollout.rm_hub.deepscaler.get_deepscaler_rule_based_reward": "slimelite.compat.deepscaler_reward",
    "slime.rollout.rm_hub.math_dapo_utils.compute_score": "slimelite.rewards.dapo.compute_score",
    "slime.rollout.rm_hub.f1.f1_score": "slimelite.rewards.f1.f1_score",
    "slime.rollout.filter_hub.base_types.DynamicFilterOutput": f"{FILTERS}.DynamicFilterOutput",
    "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std": f"{FILTERS}.check_reward_nonzero_std",
    "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std_with_fallback": (
        f"{FILTERS}.check_reward_nonzero_std_with_fallback"
    ),
}


def resolve(name: str) -> Callable[..., Any]:
    """Our object behind one of ``SLIME_NAMES``."""
    module, _, attribute = SLIME_NAMES[name].rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def install_finder() -> None:
    """Serve ``SLIME_NAMES`` to ``import slime…`` from now on, unless slime itself is installed."""
    if any(isinstance(f, SlimeFinder) for f in sys.meta_path):
        return
    found = importlib.util.find_spec("slime")
    if found is None or found.origin is None:  # a mere folder of that name is not slime
        sys.meta_path.append(SlimeFinder())


class SlimeFinder(MetaPathFinder, Loader):
    """Finds and makes the modules that ``SLIME_NAMES`` speaks of."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:  # noqa: ARG002
        """A package for every prefix of a known name; other slime modules are answered with what there is."""
        if fullname != "slime" and not fullname.startswith("slime."):
            return None
        if not any(name.startswith(fullname + ".") for name in SLIME_NAMES):
            modules = sorted({name.rpartition(".")[0] for name in SLIME_NAMES})
            raise ModuleNotFoundError(
                f"slimelite does not provide {fullname}; of slime it has {', '.join(modules)}", name=fullname
            )
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Attributes resolve when they are asked for, so that a module costs nothing until used."""
        prefix = module.__name__ + "."

        def lookup(attribute: str) -> Any:
            if prefix + attribute in SLIME_NAMES:
                return resolve(prefix + attribute)
            if attribute.startswith("__") or any(n.startswith(f"{prefix}{attribute}.") for n in SLIME_NAMES):
                raise AttributeError(attribute)
            known = sorted(n.removeprefix(prefix) for n in SLIME_NAMES if n.startswith(prefix))
            raise ImportError(f"slimelite does not provide {prefix}{attribute}; there it has {', '.join(known)}")

        module.__dict__["__getattr__"] = lookup


class SlimeSample(Sample):
    """A `Sample` as slime's plugins expect it: attributes of their own, and slime's ways to append tokens.

    Custom generate functions are handed one; being a `Sample`, it goes on from there like any other.
    """

    # no __slots__: plugins set attributes that are not fields

    @classmethod
    def copy_of(cls, sample: Sample) -> SlimeSample:
        """A deep copy, so that a plugin that fails half-way leaves the original as it was."""
        return cls(**{**sample.to_dict(), "status": sample.status})

    def append_response_tokens(  # type: ignore[override]
        self,
        first: Any = None,
        log_probs: Sequence[float] | None = None,
        *,
        tokens: Sequence[int] | None = None,
        text: str | None = None,
        meta_info: dict[str, Any] | None = None,
        update_terminal_info: bool = True,
        **named: Any,
    ) -> None:
        """Ours, where ``first`` is the tokens, or slime's ``(args, *, tokens, log_probs, trainable, meta_info, text)``.

        ``meta_info``: the engine's answer, which has the weight versions and the reason it finished.
        """
        added = first if tokens is None else tokens
        if meta_info is not None and not named.keys() & {"weight_version", "weight_versions"}:
            named["weight_versions"] = versions_of(meta_info, len(added))
        super().append_response_tokens(added, log_probs, text=text or "", **named)
        if meta_info is not None and update_terminal_info:
            self.update_from_meta_info(first, meta_info)

    def update_from_meta_info(self, args: Any, meta_info: dict[str, Any]) -> None:  # noqa: ARG002
        """Status from the engine's finish reason."""
        self.status = FINISH_STATUS.get(meta_info["finish_reason"]["type"], Status.COMPLETED)


def versions_of(meta_info: dict[str, Any], count: int) -> list[int]:
    """The weight version of each of ``count`` tokens, the first ones of the answer that has this ``meta_info``."""
    spans = meta_info.get("weight_versions") or [{"version": meta_info.get("weight_version", ""), "start": 0}]
    ends = [*(span["start"] for span in spans[1:]), count]
    versions: list[int] = []
    for span, end in zip(spans, ends, strict=True):
        # SGLang says "default" until the first update
        version = int(span["version"]) if str(span["version"]).isdecimal() else UNSTAMPED
        versions += [version] * (end - span["start"])
    return versions[:count]  # a plugin may have cut the answer


def generate_state(args: PluginArgs) -> RolloutContext:
    """slime's ``GenerateState(args)``: ``.tokenizer``, ``.processor``, ``.sampling_params``."""
    return args.rollout_context


def get_model_url(args: PluginArgs, name: str = "actor", endpoint: str = "/generate") -> str:  # noqa: ARG001
    """The address of the policy's engine."""
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}{endpoint}"


def load_tokenizer(path: str, **_: Any) -> Any:
    """Our tokenizer loader; slime's extra arguments do not matter to it."""
    from slimelite.data.tokenizer import load_tokenizer

    return load_tokenizer(path)


def whole_response(tensor: Any, *_: Any) -> Any:
    """slime gathers or slices a response over context-parallel ranks; here every rank has all of it."""
    return tensor


async def async_rm(args: PluginArgs, sample: Sample, **_: Any) -> Any:
    """Score one sample by the run's reward, and return the reward."""
    return (await batched_async_rm(args, [sample]))[0]


async def batched_async_rm(args: PluginArgs, samples: list[Sample], **_: Any) -> list[Any]:
    """Score samples by the run's reward, and return their rewards."""
    await args.rollout_context.grader.grade(samples, group_rm=len(samples) > 1)
    return [s.reward for s in samples]


def grade_answer_verl(response: str, label: str) -> bool:
    """Whether the last boxed answer equals the label; algebra included, without a time limit."""
    return bool(_score("math", response, label))


def deepscaler_reward(response: str, label: str) -> int:
    """1 where what follows the thinking is right, else 0; without a time limit."""
    return int(_score("deepscaler", response, label))


def _score(rm_type: str, response: str, label: str) -> float:
    from slimelite.rewards.registry import RULES
    from slimelite.rewards.rule import Answer

    rule, answer = RULES[rm_type], Answer(response, str(label))
    quick = rule.quick(answer)
    assert rule.slow is not None
    score = rule.slow(answer) if quick is None else quick
    assert isinstance(score, float)
    return score


async def post(
    url: str, payload: dict[str, Any] | None, max_retries: int = 60, headers: dict[str, str] | None = None
) -> Any:
    """POST JSON and return the JSON answer; a connection that fails is tried again every second.

    Raises:
        aiohttp.ClientError: the server answered with an error, or never.
    """
    return await _request("POST", url, max_retries, json=payload or {}, headers=headers)


async def get(url: str) -> Any:
    """GET a JSON answer."""
    return await _request("GET", url, 1)


async def _request(method: str, url: str, attempts: int, **options: Any) -> Any:
    import aiohttp

    for attempt in range(attempts):
        try:
            # generation takes as long as it takes
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
                session.request(method, url, **options) as response,
            ):
                response.raise_for_status()
                return await response.json(content_type=None)
        except aiohttp.ClientConnectionError:
            if attempt + 1 == attempts:
                raise
            await asyncio.sleep(1)
    return None
