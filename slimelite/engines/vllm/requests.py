"""Requests on their way through vLLM."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future

from vllm import SamplingParams

from slimelite.engines.protocol import FinishReason, GenerateRequest, GenerateResult


def sampling_params(request: GenerateRequest, eos: Collection[int], vocab_size: int) -> SamplingParams:
    """Ours as vLLM's; stop strings are not passed on, see `Running.completes_stop_string`."""
    params = request.params
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
    return SamplingParams(
        max_tokens=params.max_new_tokens,
        min_tokens=params.min_new_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        stop_token_ids=[token for token in stops if 0 <= token < vocab_size],
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
    )


class Running:
    """A request in vLLM, and what came out of it."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.result = GenerateResult(request.request_id, [], [], [], "abort")
        self.future: Future[GenerateResult] = Future()
        self.future.set_running_or_notify_cancel()

    def finish(self, reason: FinishReason) -> None:
        """Hand the result to the caller."""
        self.result.finish_reason = reason
        self.future.set_result(self.result)

    def completes_stop_string(self, decode: Callable[[list[int]], str]) -> bool:
        """Whether the tail of the response, a continued one's older part included, holds one of its stop strings.

        vLLM does not look for them: to it the older part is prompt.
        """
        params, output = self.request.params, self.result.output_ids
        if not params.stop or len(output) < params.min_new_tokens:
            return False
        # a token brings at least one byte; one more keeps the first from being decoded as the start of a text
        tail = max(len(stop.encode()) for stop in params.stop) + 1
        prompt_length = len(self.request.input_ids) - self.request.position
        text = decode([*self.request.input_ids[prompt_length:], *output][-tail:])
        return any(stop in text for stop in params.stop)
