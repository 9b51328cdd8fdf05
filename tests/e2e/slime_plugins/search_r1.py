"""A search tool between two turns, in the shape of slime's search-r1: lists kept by hand, a label with its targets."""

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

MAX_TURNS = 2
DOCUMENTS = ["1+1=2", "2+2=4", "9+9=18"]


async def search(query: str) -> str:
    return DOCUMENTS[len(query) % len(DOCUMENTS)]


async def generate(args, sample: Sample, sampling_params) -> Sample:
    assert not args.partial_rollout, "a partial rollout is not supported here"
    assert isinstance(sample.label["ground_truth"]["target"], list)
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    response, response_ids, loss_mask, log_probs = "", [], [], []
    for turn in range(MAX_TURNS):
        params = {**sampling_params, "max_new_tokens": sampling_params["max_new_tokens"] // MAX_TURNS}
        payload = {"input_ids": prompt_ids + response_ids, "sampling_params": params, "return_logprob": True}
        output = await post(url, payload)
        if output["meta_info"]["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        tokens = [item[1] for item in output["meta_info"]["output_token_logprobs"]]
        response += output["text"]
        response_ids += tokens
        loss_mask += [1] * len(tokens)
        log_probs += [item[0] for item in output["meta_info"]["output_token_logprobs"]]
        if turn + 1 < MAX_TURNS:
            found = f"\n{await search(output['text'])}\n"
            found_ids = state.tokenizer(found, add_special_tokens=False)["input_ids"]
            response += found
            response_ids += found_ids
            loss_mask += [0] * len(found_ids)
            log_probs += [0.0] * len(found_ids)
    sample.tokens = prompt_ids + response_ids
    sample.response_length = len(response_ids)
    sample.response = response
    sample.loss_mask = loss_mask
    sample.rollout_log_probs = log_probs
    match output["meta_info"]["finish_reason"]["type"]:
        case "length":
            sample.status = Sample.Status.TRUNCATED
        case "stop":
            sample.status = Sample.Status.COMPLETED
    return sample


async def reward_func(args, sample, **kwargs):
    if not isinstance(sample, Sample):
        raise TypeError("Sample must be an instance of Sample class.")
    targets = sample.label["ground_truth"]["target"]
    return 1.0 if any(str(target) in sample.response for target in targets) else 0.1 * (len(sample.response) % 3)


async def reward_length(args, sample, **kwargs):
    return float(len(sample.response) % 3)
