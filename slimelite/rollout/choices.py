"""The generate function of multiple-choice tasks: the engine scores every choice, and the likeliest is the response."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from slimelite.rollout.context import PluginArgs
from slimelite.samples.sample import Sample


async def choose(args: PluginArgs, sample: Sample, _params: dict[str, Any]) -> Sample:
    """Answer with the likeliest choice, whose reward is 1 if it is the right one.

    ``sample.metadata`` has ``choices``, ``right``, ``delimiter`` and ``metric`` (see `slimelite.arguments.tasks.Task`),
    and then also ``log_likelihoods``, log p(choice | prompt) of each. The tokens of a choice are those that prompt and
    choice have together beyond the prompt's own, as lm-evaluation-harness has it.

    Raises:
        ValueError: a choice adds no token to the prompt, or both together exceed the context.
    """
    context, metadata, start = args.rollout_context, sample.metadata, len(sample.tokens)
    choices: list[str] = metadata["choices"]
    texts = [f"{sample.prompt}{metadata['delimiter']}{choice}" for choice in choices]
    asked, *encoded = context.tokenizer([sample.prompt, *texts], add_special_tokens=False)["input_ids"]
    answers = [ids[len(asked) :] for ids in encoded]
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
