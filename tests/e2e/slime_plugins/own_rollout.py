"""A whole rollout of a user's own on slime's parts, as its fully asynchronous worker uses them; by miles' names."""

import asyncio

from miles.rollout.base_types import RolloutFnTrainOutput, call_rollout_fn
from miles.rollout.sglang_rollout import GenerateState, generate, generate_and_rm, generate_and_rm_group
from miles.rollout.sglang_rollout import generate_rollout as usual_rollout
from miles.utils.async_utils import run


async def collect(args, data_buffer):
    state = GenerateState(args)
    groups = data_buffer.get_samples(args.rollout_batch_size)
    *others, last = groups
    tasks = [
        asyncio.create_task(
            generate_and_rm_group(args, group, sampling_params=state.sampling_params.copy(), evaluation=False)
        )
        for group in others
    ]
    alone = [generate_and_rm(args, sample, state.sampling_params.copy()) for sample in last]
    return RolloutFnTrainOutput(samples=[*await asyncio.gather(*tasks), list(await asyncio.gather(*alone))])


def generate_rollout(args, rollout_id, data_buffer, evaluation=False):
    if evaluation:
        return call_rollout_fn(usual_rollout, args, rollout_id, data_buffer, evaluation=True)
    return run(collect(args, data_buffer))


async def generate_and_note(args, sample, sampling_params):
    sample = await generate(args, sample, sampling_params)
    sample.metadata["noted"] = [args.n_samples_per_prompt, args.pipeline_model_parallel_size, args.hf_checkpoint]
    try:
        args.no_such_argument  # noqa: B018
    except AttributeError as error:
        sample.metadata["missing"] = str(error)
    return sample
