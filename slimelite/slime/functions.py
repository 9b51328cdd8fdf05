"""slime's own functions. They have slime's names and parameters, and work on our objects. `plugins` lists the names.

This module is imported only when a plugin uses one of slime's names.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from slimelite.base.http_client import Client, NoAnswer, Retry
from slimelite.base.registry import function
from slimelite.samples.sample import Sample, Status, label_text

if TYPE_CHECKING:
    from slimelite.rollout.context import PluginArgs, RolloutFnEvalOutput, RolloutFnTrainOutput

# the random streams of samples from `generate_and_rm` have this name
STREAM = "plugin"


class GenerateState:
    """slime's ``GenerateState(args)``: the run's tokenizer and sampling parameters."""

    processor: None = None

    def __init__(self, args: PluginArgs) -> None:
        from slimelite.engines.params import SamplingParams
        from slimelite.rollout.groups import slime_params

        context = args.rollout_context
        self.args, self.tokenizer = context.args, context.tokenizer
        params = SamplingParams.of(context.args, "rollout")
        self.sampling_params = slime_params(params.telling() if args.keeps_ids else params, seed=None)


def get_model_url(args: PluginArgs, name: str = "actor", endpoint: str = "/generate") -> str:  # noqa: ARG001
    """The address of the policy's engine."""
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}{endpoint}"


def load_tokenizer(path: str, **_: Any) -> Any:
    """Our tokenizer loader. This function ignores slime's extra arguments."""
    from slimelite.data.tokenizer import load_tokenizer

    return load_tokenizer(path)


def whole_response(tensor: Any, *_: Any) -> Any:
    """The whole response. slime gathers or slices a response over context-parallel ranks, but here every rank has all
    of it."""
    return tensor


def call_rollout_fn(
    function: Callable[..., Any], *args: Any, evaluation: bool, **named: Any
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Call a rollout function. If the function returns only samples or data, as older functions do, put these into an
    output object."""
    from slimelite.rollout.context import RolloutFnEvalOutput, RolloutFnTrainOutput

    output = function(*args, evaluation=evaluation, **named)
    if isinstance(output, RolloutFnTrainOutput | RolloutFnEvalOutput):
        return output
    return RolloutFnEvalOutput(output) if evaluation else RolloutFnTrainOutput(output)


async def generate(args: PluginArgs, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """slime's default generate function. It generates a response, or the rest of a partial response, with the
    engine."""
    from slimelite.engines.http_front import parse_sampling_params

    if not sample.tokens:
        tokenizer = args.rollout_context.tokenizer
        sample.tokens = tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    left = sampling_params["max_new_tokens"] - sample.response_length
    if left <= 0:
        sample.status = Status.TRUNCATED
        return sample
    params = {**sampling_params, "max_new_tokens": left}
    body = {"input_ids": sample.tokens, "sampling_params": params, "return_logprob": True}
    if args.keeps_ids and (telling := parse_sampling_params(sampling_params).telling()).tells:
        params["top_k"] = telling.top_k  # SGLang reports the kept ids only for a finite top-k
        body["return_sampling_mask"] = True
    answer = await post(get_model_url(args), body)
    pairs = answer["meta_info"].get("output_token_logprobs", [])
    sample.append_response_tokens(
        tokens=[pair[1] for pair in pairs],
        log_probs=[pair[0] for pair in pairs],
        meta_info=answer["meta_info"],
        text=answer["text"],
    )
    return sample


async def generate_and_rm(
    args: PluginArgs, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """One sample from the run's generate function, after sample hooks and reward. A generate function that fans out
    gives several samples.

    Raises:
        ValueError: --group-rm is on, so only whole groups can be scored.
    """
    if args.group_rm:
        raise ValueError("generate_and_rm scores one sample, but --group-rm scores groups: call generate_and_rm_group")
    made = await generate_and_rm_group(args, [sample], sampling_params, evaluation)
    return made[0] if len(made) == 1 else made


async def generate_and_rm_group(
    args: PluginArgs, group: list[Sample], sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Sample]:
    """The samples of one prompt from the run's generate function, after sample hooks and reward.

    Aborted samples are returned unfinished.

    Raises:
        Exception: the last error, if every attempt at the group failed.
    """
    from slimelite.engines.http_front import parse_sampling_params
    from slimelite.rollout.groups import GroupGenerator

    context = args.rollout_context
    generator = GroupGenerator(
        context,
        STREAM,
        -1,  # the rollout's id is unknown, as in slime
        parse_sampling_params(sampling_params),
        max_context_len=args.rollout_max_context_len,
        generate_path=args.custom_generate_function_path,
        reward_key=args.reward_key,
        evaluation=evaluation,
    )

    async def work() -> list[Sample]:
        await context.engines.refresh()
        samples, error = await generator.generate_one(list(group))
        if error is not None:
            raise error
        return samples

    # the engines use the rollout's event loop, but the plugin may run on another event loop
    return await context.thread.result(work())


async def apply_rollout_sample_hooks(args: PluginArgs, value: Any, **offered: Any) -> Any:
    """Apply the functions of --rollout-sample-hook-path to ``value``, a sample or nested lists of samples."""
    from slimelite.rollout.groups import hooked, load_hooks

    if isinstance(value, list):
        return [await apply_rollout_sample_hooks(args, item, **offered) for item in value]
    return await hooked(load_hooks(args.rollout_sample_hook_path), args, value, **offered)


async def async_rm(args: PluginArgs, sample: Sample, **_: Any) -> Any:
    """Score one sample with the run's reward, and return the reward."""
    return (await batched_async_rm(args, [sample]))[0]


async def batched_async_rm(args: PluginArgs, samples: list[Sample], **_: Any) -> list[Any]:
    """Score samples with the run's reward, and return their rewards."""
    await args.rollout_context.grader.grade(samples, group_rm=len(samples) > 1)
    return [s.reward for s in samples]


async def reward_func(_args: Any, samples: Sample | list[Sample], **_: Any) -> float | list[float]:
    """The reward of pure distillation: always 0. slime's function of this name also requests the teacher's log-probs;
    here the rollout requests them."""
    return [0.0] * len(samples) if isinstance(samples, list) else 0.0


def post_process_rewards(args: Any, samples: list[Sample], **_: Any) -> tuple[list[float], list[float]]:
    """slime's ``--custom-reward-post-process-path`` for pure distillation. The reward is reported, but the advantages
    use 0 instead, so that only the teacher trains the policy.
    """
    return [s.reward_value(args.reward_key) for s in samples], [0.0] * len(samples)


def grade_answer_verl(response: str, label: str) -> bool:
    """Whether the last boxed answer equals the label. The comparison uses algebra, without a time limit."""
    return bool(_score("math", response, label))


def deepscaler_reward(response: str, label: str) -> int:
    """1 if the text after the thinking has the right answer, else 0. The comparison has no time limit."""
    return int(_score("deepscaler", response, label))


def _score(rm_type: str, response: str, label: str) -> float:
    from slimelite.rewards.rules import RULES, Answer

    rule, answer = RULES[rm_type], Answer(response, str(label))
    assert rule.quick is not None
    assert rule.slow is not None
    quick = function(rule.quick)(answer)
    score = function(rule.slow)(answer) if quick is None else quick
    assert isinstance(score, float)
    return score


def compute_gpqa_reward(response: str | None, label: Any, metadata: dict[str, Any] | None = None) -> float:
    """1 if the response chooses the right option, else 0."""
    from slimelite.rewards.rules import Answer
    from slimelite.rewards.text import gpqa

    return gpqa(Answer(response or "", label_text(label), metadata or {}))


def is_correct_minerva(solution_str: str, gt: Any, gt_need_extract: bool = False) -> tuple[bool, str]:
    """(correct, prediction) of the last line ``Answer: ...``. The answer is compared with the integer ``gt``.
    ``gt_need_extract``: the integer is in a box in ``gt``."""
    from slimelite.rewards.math import extract_boxed_answer, verify_minerva

    truth = extract_boxed_answer(str(gt)) if gt_need_extract else str(gt)
    return verify_minerva(solution_str, truth or "")


def is_correct_strict_box(pred: str, gt: Any, pause_tokens_index: None = None) -> tuple[int, str | None]:
    """(1 or -1, prediction) for the last box in the final 100 characters: 1 if the content of the box equals ``gt``
    exactly.

    Raises:
        ValueError: ``pause_tokens_index`` is given, but it is not supported.
    """
    from slimelite.rewards.math import verify_strict_box

    if pause_tokens_index is not None:
        raise ValueError("is_correct_strict_box: pause_tokens_index is not supported here")
    correct, prediction = verify_strict_box(pred, str(gt))
    return (1 if correct else -1), prediction


class Dataset:
    """The prompts of a file as samples, in slime's form. ``samples`` are in the order of ``shuffle(epoch)``."""

    def __init__(
        self,
        path: str,
        tokenizer: Any,
        processor: None = None,
        max_length: int | None = None,
        *,
        prompt_key: str = "text",
        multimodal_keys: dict[str, str] | None = None,
        label_key: str | None = None,
        tool_key: str | None = None,
        metadata_key: str = "metadata",
        seed: int = 42,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """
        Raises:
            ValueError: images, video or audio are requested, or the file cannot be read.
        """
        from slimelite.arguments import EvalDataset
        from slimelite.data.prompts import load_prompts

        if processor is not None or multimodal_keys:
            raise ValueError("Dataset: images, video and audio are not supported here")
        columns = EvalDataset(
            name="plugin",
            path=path,
            input_key=prompt_key,
            label_key=label_key,
            tool_key=tool_key or "tools",
            metadata_key=metadata_key,
            apply_chat_template=apply_chat_template,
            apply_chat_template_kwargs=apply_chat_template_kwargs or {},
        )
        self.origin_samples = load_prompts(columns, tokenizer, [path], max_prompt_len=max_length)
        self.samples = self.origin_samples
        self.seed = seed

    def shuffle(self, new_epoch_id: int) -> None:
        """Put ``samples`` into the order of an epoch."""
        order = list(range(len(self.origin_samples)))
        random.Random(self.seed + new_epoch_id).shuffle(order)
        self.samples = [self.origin_samples[i] for i in order]

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def __len__(self) -> int:
        return len(self.samples)


def read_file(path: str) -> Iterator[dict[str, Any]]:
    """The rows of a parquet or jsonl file. ``path@[a:b]``: only the rows of this slice."""
    from slimelite.data.reader import read_rows

    return (row for _, row in read_rows(path))


class MultiTurnLossMaskGenerator:
    """Token ids and loss masks of conversations, with one of slime's kinds of mask or our ``auto``."""

    def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen") -> None:
        self.tokenizer, self.tokenizer_type = tokenizer, tokenizer_type

    def get_loss_mask(self, messages: list[dict[str, Any]], tools: Any = None) -> tuple[list[int], list[int]]:
        """(token ids, mask) of a conversation."""
        from slimelite.data.conversations import ChatReader

        return ChatReader(self.tokenizer, self.tokenizer_type).tokens(messages, tools)

    def get_response_lengths(self, loss_masks: Sequence[list[int]]) -> list[int]:
        """See the function `get_response_lengths`."""
        return get_response_lengths(loss_masks)

    def get_text_from_loss_mask(self, token_ids: Sequence[int], loss_masks: Sequence[int]) -> list[str]:
        """The pieces of text that are trained on."""
        runs = groupby(zip(token_ids, loss_masks, strict=True), key=lambda pair: pair[1] == 1)
        return [self.tokenizer.decode([token for token, _ in run]) for trained, run in runs if trained]


def get_response_lengths(loss_masks: Sequence[list[int]]) -> list[int]:
    """For each mask, the number of tokens from the first trained token to the end."""
    return [len(mask) - mask.index(1) if 1 in mask else 0 for mask in loss_masks]


class trace_span(dict[str, Any]):
    """slime's time span: ``with trace_span(sample, "tool") as span: span.update({...})``. slimelite does not record the
    span."""

    def __init__(self, target: Any = None, name: str = "", attrs: dict[str, Any] | None = None) -> None:
        super().__init__(attrs or {})
        self.target, self.name = target, name

    def __enter__(self) -> trace_span:
        return self

    def __exit__(self, *error: object) -> None: ...


def trace_function(name: str, **_: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:  # noqa: ARG001
    """slime's decorator for a span around each call. In slimelite, the decorator returns the function unchanged."""
    return lambda function: function


def build_sglang_meta_trace_attrs(meta_info: dict[str, Any]) -> dict[str, Any]:
    """The numeric entries of an engine's ``meta_info``, which slime's plugins add to a trace."""
    return {key: value for key, value in meta_info.items() if isinstance(value, int | float)}


async def post(
    url: str, payload: dict[str, Any] | None, max_retries: int = 60, headers: dict[str, str] | None = None
) -> Any:
    """POST JSON, and return the JSON answer. A failed connection is retried every second while the engine of the
    generate function is alive.

    Raises:
        HttpError: the server answered with an error, or did not answer.
        ValueError: the engine is dead and will not be restarted.
    """
    from slimelite.rollout.pool import IS_GONE

    retry, is_gone, attempt = Retry(max_retries, first_s=1.0, most_s=1.0), IS_GONE.get(), 1
    async with Client() as client:
        while True:
            try:
                return await client.post(url, payload or {}, headers)
            except NoAnswer as error:
                if not retry.again(error, attempt) or (is_gone is not None and await is_gone()):
                    raise
            await asyncio.sleep(retry.wait_s(attempt))
            attempt += 1


async def get(url: str) -> Any:
    """GET a JSON answer."""
    async with Client() as client:
        return await client.get(url)
