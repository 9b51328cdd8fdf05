"""A calculator as a tool, in the shape of slime's retool: `append_response_tokens`, own attributes, dapo's reward."""

from slime.observability.trace_utils import trace_function, trace_span
from slime.rollout.rm_hub.math_dapo_utils import compute_score as math_dapo_compute_score
from slime.rollout.sglang_rollout import GenerateState, get_model_url
from slime.utils.http_utils import post
from slime.utils.types import Sample

MAX_TOOL_CALLS = 1


@trace_function("run_tool", target="sample")
async def run_tool(sample: Sample, text: str) -> str:
    with trace_span(sample, "calculator", attrs={"chars": len(text)}) as span:
        total = sum(int(c) for c in text if c.isdecimal()) % 100
        span.update({"total": total})
    return f"\n={total}\n"


async def generate(args, sample: Sample, sampling_params) -> Sample:
    assert not args.partial_rollout, "a partial rollout is not supported here"
    # what an attempt before this one left
    sample.rollout_log_probs = None
    sample.rollout_top_p_token_ids = None
    sample.response = ""
    sample.response_length = 0
    sample.loss_mask = []
    state = GenerateState(args)
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    sample.tokens = list(prompt_ids)
    response, response_ids, loss_masks = "", [], sample.loss_mask
    tool_calls = 0
    if args.rollout_max_context_len is not None:
        most = args.rollout_max_context_len
    else:
        most = args.context_parallel_size * args.max_tokens_per_gpu
    while True:
        left = most - len(prompt_ids) - len(response_ids)
        params = {**sampling_params, "max_new_tokens": min(sampling_params["max_new_tokens"] // 2, left)}
        payload = {"input_ids": prompt_ids + response_ids, "sampling_params": params, "return_logprob": True}
        output = await post(get_model_url(args, "default"), payload)
        pairs = output["meta_info"]["output_token_logprobs"]
        tokens = [item[1] for item in pairs]
        text = state.tokenizer.decode(tokens)
        response += text
        response_ids += tokens
        sample.append_response_tokens(
            args,
            tokens=tokens,
            log_probs=[item[0] for item in pairs],
            trainable=True,
            meta_info=output["meta_info"],
        )
        if tool_calls == MAX_TOOL_CALLS:
            break
        observation = await run_tool(sample, text)
        observation_ids = state.tokenizer(observation, add_special_tokens=False)["input_ids"]
        response_ids += observation_ids
        sample.append_response_tokens(args, tokens=observation_ids, trainable=False)
        assert len(response_ids) == len(sample.rollout_log_probs)
        response += observation
        tool_calls += 1
    sample.tokens = prompt_ids + response_ids
    sample.response_length = len(response_ids)
    sample.response = response
    sample.loss_mask = loss_masks
    sample.tool_call_count = tool_calls
    return sample


async def reward_func(args, sample, **kwargs):
    if not isinstance(sample, Sample):
        raise TypeError("Sample must be an instance of Sample class.")
    assert isinstance(sample.label, int)
    result = math_dapo_compute_score(sample.prompt + sample.response, sample.label, strict_box_verify=True)
    calls = getattr(sample, "tool_call_count", 0)
    result["calls"] = calls
    result["score"] += 0.1 * calls + 0.01 * (len(sample.response) % 5)
    if result["pred"] is None:
        result["pred"] = ""
    return result
