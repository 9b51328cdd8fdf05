"""Evaluation: each dataset has its own sampling parameters and number of responses per prompt. In multiple-choice tasks
the engine scores every choice, and the likeliest is the response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from slimelite.arguments import EvalDataset
from slimelite.data.prompts import deal, load_prompts
from slimelite.engines.params import SamplingParams
from slimelite.rollout.context import PluginArgs, RolloutContext, RolloutFnEvalOutput
from slimelite.rollout.groups import GroupGenerator, check_scored, is_finished, without_dropped
from slimelite.rollout.pool import Outcome
from slimelite.samples.sample import Sample


async def evaluate_datasets(
    context: RolloutContext, datasets: Sequence[EvalDataset], rollout_id: int
) -> RolloutFnEvalOutput:
    """Evaluate ``datasets`` of ``--eval-prompt-data``: concurrently, or one by one under ``--deterministic-mode``.

    Seeds depend only on dataset, prompt and sample, so that two evaluations differ only because of their weights.

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
    """The prompts of a dataset as groups of samples; the file is read once in a run."""
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
    """The scored groups of one dataset, in file order; groups that failed are left out."""
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
    """Answer with the likeliest choice, whose reward is 1 if it is the right one.

    ``sample.metadata`` has ``choices``, ``right``, ``delimiter`` and ``metric`` (see
    `slimelite.arguments.evaluation.Task`), and then also ``log_likelihoods``, log p(choice | prompt) of each. The
    tokens of a choice are those that prompt and choice have together beyond the prompt's own, as lm-evaluation-harness
    has it.

    Raises:
        ValueError: a choice adds no token to the prompt, or both together exceed the context.
    """
    context, metadata, start = args.rollout_context, sample.metadata, len(sample.tokens)
    choices: list[str] = metadata["choices"]
    texts = [f"{sample.prompt}{metadata['delimiter']}{choice}" for choice in choices]
    prompt_ids, *encoded = context.tokenizer([sample.prompt, *texts], add_special_tokens=False)["input_ids"]
    answers = [ids[len(prompt_ids) :] for ids in encoded]
    if not all(answers):
        raise ValueError(f"a choice of {choices!r:.200} adds no token to the prompt")
    engines = context.engines
    engine = engines.engines[engines.up[(sample.group_index or 0) % len(engines.up)]]
    scored = await asyncio.gather(*(engine.score([*sample.tokens, *ids], start) for ids in answers))
    likelihoods = np.array([sum(scores.log_probs) for scores in scored])
    weights = np.array([len(choice) for choice in choices]) if metadata["metric"] == "acc_norm" else 1
    best = int(np.argmax(likelihoods / weights))
    sample.append_response_tokens(answers[best], scored[best].log_probs)
    sample.response, sample.status = choices[best], Sample.Status.COMPLETED
    sample.reward = float(best == metadata["right"])
    metadata["log_likelihoods"] = likelihoods.tolist()
    return sample
