"""Evaluates the model on datasets. Each dataset has its own sampling parameters and number of responses per prompt. In
multiple-choice tasks the engine computes the log-prob of every choice, and the most likely choice is the response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from slimelite.arguments import EvalDataset
from slimelite.data.prompts import deal, load_prompts
from slimelite.engines.params import SamplingParams
from slimelite.engines.protocol import Engine
from slimelite.rollout.context import PluginArgs, RolloutContext, RolloutFnEvalOutput
from slimelite.rollout.groups import GroupGenerator, check_scored, is_finished, without_dropped
from slimelite.rollout.pool import Outcome
from slimelite.samples.sample import Sample


async def evaluate_datasets(
    context: RolloutContext, datasets: Sequence[EvalDataset], rollout_id: int
) -> RolloutFnEvalOutput:
    """Evaluate ``datasets`` of ``--eval-prompt-data`` concurrently, or one after the other with
    ``--deterministic-mode``.

    Sampling seeds depend only on the run's seed, the dataset, the prompt and the number of the sample. So two
    evaluations in a run differ only because the model's weights differ.

    Raises:
        ValueError: a dataset is empty or cannot be read, or none of its prompts got a scored response.
    """
    await context.engines.refresh()
    groups = {d.name: _groups(context, d) for d in datasets}
    total, done = sum(len(g) for g in groups.values()), 0

    def count(name: str, number: int) -> None:
        nonlocal done
        done += number
        context.progress(done, total, f"eval {name}")

    count(", ".join(groups), 0)
    results = await context.each(_evaluate(context, d, groups[d.name], rollout_id, count) for d in datasets)
    data, metrics = {}, {}
    for dataset, finished in zip(datasets, results, strict=True):
        samples = [s for group in finished for s in group]
        data[dataset.name] = {
            "samples": samples,
            "rewards": [s.reward_value(context.eval_reward_key) for s in samples],
            "truncated": [s.status == Sample.Status.TRUNCATED for s in samples],
        }
        if lost := len(groups[dataset.name]) - len(finished):
            metrics[f"eval/{dataset.name}/failed_prompts"] = float(lost)
    return RolloutFnEvalOutput(data, metrics)


def _groups(context: RolloutContext, dataset: EvalDataset) -> list[list[Sample]]:
    """The prompts of a dataset as groups of samples. The file is read only once in a run."""
    if dataset.name not in context.eval_prompts:
        try:
            context.eval_prompts[dataset.name] = load_prompts(
                dataset,
                context.tokenizer,
                [dataset.path],
                max_prompt_len=dataset.max_prompt_len,
                skip_bad_rows=context.args.skip_bad_rows,
                keep_messages=context.args.reward_model_path is not None,
            )
        except ValueError as error:
            raise ValueError(f"eval dataset {dataset.name!r}: {error}") from error
    each = dataset.n_samples_per_eval_prompt
    groups = [
        [deal(prompt, number, number * each + i) for i in range(each)]
        for number, prompt in enumerate(context.eval_prompts[dataset.name])
    ]
    for sample in (s for group in groups for s in group):
        sample.metadata |= dataset.metadata_overrides
        sample.custom_rm_path = dataset.custom_rm_path
    return groups


async def _evaluate(
    context: RolloutContext,
    dataset: EvalDataset,
    groups: list[list[Sample]],
    rollout_id: int,
    count: Callable[[str, int], None],
) -> list[list[Sample]]:
    """The scored groups of one dataset, in file order. Groups that failed are left out."""
    generator = GroupGenerator(
        context,
        f"eval/{dataset.name}",
        rollout_id,
        SamplingParams.of(dataset, "dataset"),
        max_context_len=dataset.max_context_len,
        generate_path=dataset.custom_generate_function_path,
        rm_type=dataset.rm_type,
        reward_key=context.eval_reward_key,
        evaluation=True,
    )

    async def generate(part: list[list[Sample]]) -> list[Outcome]:
        outcomes = await generator.generate(part)
        count(dataset.name, len(part))
        return outcomes

    parts = await asyncio.gather(*(generate(part) for part in generator.parts(groups)))
    outcomes = [outcome for part in parts for outcome in part]
    answered = [samples for samples, _ in outcomes if is_finished(samples)]
    if answered:
        check_scored([s for samples in answered for s in samples], f"eval dataset {dataset.name!r}")
    finished = [samples for group in answered if (samples := without_dropped(group, context.args))]
    if not finished:
        cause = next((error for _, error in outcomes if error is not None), None)
        raise ValueError(
            f"eval dataset {dataset.name!r}: none of {len(groups)} prompts got a scored response ({cause!r})"
        ) from cause
    return finished


async def choose(args: PluginArgs, sample: Sample, _params: dict[str, Any]) -> Sample:
    """Set the response to the most likely choice. The reward is 1 if this choice is the right one, and 0 otherwise.

    ``sample.metadata`` must have ``choices``, ``right``, ``delimiter`` and ``metric``, and may have ``shared`` (see
    `slimelite.arguments.evaluation.Task`). The function adds ``log_likelihoods`` to ``sample.metadata``, with one value
    for each choice: log p(choice | prompt). With ``shared``, the value is log p(shared | prompt and choice). The prompt
    and a choice are tokenised as one text. If the prompt alone has n tokens, all tokens after the first n belong to the
    choice, as in lm-evaluation-harness.

    Raises:
        ValueError: a choice adds no token to the prompt, or the prompt and the choice together exceed the context.
    """
    metadata, end = sample.metadata, sample.metadata.get("shared", "")
    choices: list[str] = metadata["choices"]
    starts = [f"{sample.prompt}{metadata['delimiter']}{choice}" for choice in choices]
    begins = starts if end else [str(sample.prompt)] * len(choices)
    answers = [_added(args, begin, text + end) for begin, text in zip(begins, starts, strict=True)]
    if not all(answer for _, answer in answers):
        raise ValueError(f"one of the choices {choices!r:.200} adds no token to the prompt")
    # the tokens that an evaluation task adds before the tokens of the prompt's text
    opening = sample.tokens[: len(sample.tokens) - len(_added(args, str(sample.prompt), str(sample.prompt))[0])]
    engine = _engine_of(args, sample)
    prompts = [[*opening, *before] for before, _ in answers]
    each = zip(prompts, answers, strict=True)
    scores = await asyncio.gather(*(engine.score([*ids, *answer], len(ids)) for ids, (_, answer) in each))
    likelihoods = np.array([sum(of_choice.log_probs) for of_choice in scores])
    sizes = {"acc_norm": [len(choice) for choice in choices], "acc_token": [len(answer) for _, answer in answers]}
    best = int(np.argmax(likelihoods / np.array(sizes.get(metadata["metric"], 1))))
    if end:  # only the text after the choice was scored, so the choice's tokens belong to the prompt
        sample.tokens = prompts[best]
    sample.append_response_tokens(answers[best][1], scores[best].log_probs)
    sample.response, sample.status = choices[best] + end, Sample.Status.COMPLETED
    sample.reward = float(best == metadata["right"])
    metadata["log_likelihoods"] = likelihoods.tolist()
    return sample


async def go_on(args: PluginArgs, sample: Sample, _params: dict[str, Any]) -> Sample:
    """Set the response to the label. The reward is 1 if each token of the label is the model's most likely next token,
    and 0 otherwise.

    ``sample.metadata`` must have ``delimiter``. The function adds ``log_likelihood``, the value of log p(label |
    prompt), to ``sample.metadata``.

    Raises:
        ValueError: the label adds no token to the prompt, or the prompt and the label together exceed the context.
    """
    prompt, start = str(sample.prompt), len(sample.tokens)
    text = f"{sample.metadata['delimiter']}{sample.label}"
    _, answer = _added(args, prompt, prompt + text)
    if not answer:
        raise ValueError(f"the label {sample.label!r:.200} adds no token to the prompt")
    scores = await _engine_of(args, sample).score([*sample.tokens, *answer], start, top=1)
    sample.append_response_tokens(answer, scores.log_probs)
    sample.response, sample.status = str(sample.label), Sample.Status.COMPLETED
    sample.reward = float([best[0][0] for best in scores.top] == answer)
    sample.metadata["log_likelihood"] = sum(scores.log_probs)
    return sample


def _added(args: PluginArgs, before: str, text: str) -> tuple[list[int], list[int]]:
    """The ids of ``before``, and the further ids of ``text``. The text begins with ``before``."""
    first, whole = args.rollout_context.tokenizer([before, text], add_special_tokens=False)["input_ids"]
    return first, whole[len(first) :]


def _engine_of(args: PluginArgs, sample: Sample) -> Engine:
    engines = args.rollout_context.engines
    engine: Engine = engines.engines[engines.up[(sample.group_index or 0) % len(engines.up)]]
    return engine
