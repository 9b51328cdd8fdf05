"""Plugins as they are written for slime: they import slime, and post to the router."""

import asyncio
from copy import deepcopy

from slime.rollout.sglang_rollout import GenerateState, generate_rollout, get_model_url
from slime.utils.http_utils import post
from slime.utils.types import Sample

TOOL_TEXT = "3+4=7\n"


async def generate(args, sample: Sample, sampling_params) -> Sample:
    """Two turns with a tool's answer between them, by hand, as slime's search-r1 example does."""
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    response_ids, mask, log_probs, text = [], [], [], ""
    for turn in range(2):
        params = {**sampling_params, "max_new_tokens": 4}
        payload = {"input_ids": prompt_ids + response_ids, "sampling_params": params, "return_logprob": True}
        output = await post(url, payload)
        pairs = output["meta_info"]["output_token_logprobs"]
        response_ids += [item[1] for item in pairs]
        log_probs += [item[0] for item in pairs]
        mask += [1] * len(pairs)
        text += output["text"]
        if turn == 0:
            tool_ids = state.tokenizer(TOOL_TEXT, add_special_tokens=False)["input_ids"]
            response_ids += tool_ids
            log_probs += [0.0] * len(tool_ids)
            mask += [0] * len(tool_ids)
            text += TOOL_TEXT
    sample.tokens = prompt_ids + response_ids
    sample.response_length = len(response_ids)
    sample.response = text
    sample.loss_mask = mask
    sample.rollout_log_probs = log_probs
    match output["meta_info"]["finish_reason"]["type"]:
        case "length":
            sample.status = Sample.Status.TRUNCATED
        case "abort":
            sample.status = Sample.Status.ABORTED
        case "stop":
            sample.status = Sample.Status.COMPLETED
    return sample


async def generate_with_meta_info(args, sample, sampling_params, evaluation=False):
    """The newer way: slime's append_response_tokens does the bookkeeping."""
    output = await post(
        get_model_url(args, "actor"),
        {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True},
    )
    pairs = output["meta_info"]["output_token_logprobs"]
    sample.append_response_tokens(
        args,
        tokens=[item[1] for item in pairs],
        log_probs=[item[0] for item in pairs],
        trainable=True,
        meta_info=output["meta_info"],
        text=output["text"],
    )
    sample.my_own_attribute = evaluation
    sample.metadata["evaluation"] = evaluation
    return sample


async def generate_in_a_thread(args, sample, sampling_params):
    """On an event loop of its own."""
    return await asyncio.to_thread(lambda: asyncio.run(generate(args, sample, sampling_params)))


async def solver_and_critic(args, sample, sampling_params):
    """Fan-out: two training samples from one prompt, as slime's multi-agent example makes them."""
    args = deepcopy(args)
    args.results = []
    state = GenerateState(args)

    async def run(note):
        made = deepcopy(sample)
        prompt = sample.prompt + note
        made.tokens = state.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        output = await post(
            get_model_url(args),
            {"input_ids": made.tokens, "sampling_params": sampling_params, "return_logprob": True},
        )
        pairs = output["meta_info"]["output_token_logprobs"]
        made.append_response_tokens(
            args,
            tokens=[p[1] for p in pairs],
            log_probs=[p[0] for p in pairs],
            meta_info=output["meta_info"],
            text=output["text"],
        )
        made.reward = float(len(note))
        args.results.append(made)

    await asyncio.gather(run(""), run("1+1=2\n"))
    return args.results


def wrapped_rollout(args, rollout_id, data_source, evaluation=False):
    output = generate_rollout(args, rollout_id, data_source, evaluation)
    for group in output.samples:
        for sample in group:
            sample.metadata["wrapped"] = True
    return output
