"""The embedded engine: token-in, token-out inference in this process, on a CPU or a GPU."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PretrainedConfig

from slimelite.base.threads import Gathered
from slimelite.engines.checks import check_ids, check_score
from slimelite.engines.embedded.batching import Batching
from slimelite.engines.embedded.generic import GenericDecoder
from slimelite.engines.embedded.generic_scheduler import GenericScheduler
from slimelite.engines.embedded.grammars import Grammars, Held
from slimelite.engines.embedded.memory import KVMemory
from slimelite.engines.embedded.model import Decoder, DecoderShape, DecoderWeights, not_fast
from slimelite.engines.embedded.rows import Running
from slimelite.engines.embedded.sampler import Scoring, together
from slimelite.engines.embedded.scheduler import Scheduler
from slimelite.engines.embedded.ways import check_config
from slimelite.engines.in_process import InProcessEngine, build_in_process
from slimelite.engines.protocol import (
    Codec,
    Decode,
    EngineInfo,
    EngineSetup,
    GenerateRequest,
    GenerateResult,
    Scores,
    WeightBucket,
    check_memory_tags,
)
from slimelite.models.files import load_config

# default size of the KV cache: a number of bytes on a CPU, and a share of the free memory on a GPU
CPU_CACHE_BYTES = 4 << 30
GPU_CACHE_SHARE = 0.6


class EmbeddedEngine(InProcessEngine):
    """Implements `slimelite.engines.protocol.Engine`: continuous batching over Hugging Face weights.

    Requests wait if they arrive during a weight update, or while memory is released. If new weights arrive while a
    request runs, the request continues with the new weights. The keys and values of the request are recomputed with the
    new weights, so that each token is sampled only from the weights of its weight version.

    The engine keeps the keys and values of prompts and of long responses for later requests that begin with the same
    tokens. The engine drops these keys and values when new weights arrive, or when other requests need the memory.
    Cached values differ by rounding from values that another batch computes (log-probs by about 1e-6 in fp32). With
    ``repeatable``, the engine drops cached prefixes if it is idle when requests arrive. As a result, the same requests
    with the same seeds in one `generate` call get bit-identical results.
    """

    name = "embedded"

    def __init__(
        self,
        model_path: str,
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        max_running_requests: int = 64,
        max_context_len: int | None = None,
        kv_cache_tokens: int | None = None,
        repeatable: bool = False,
        decode: Decode | None = None,
        encode: Callable[[str], list[int]] | None = None,
        eos_token_ids: Iterable[int] | None = None,
        seed: int = 0,
        http_host: str = "127.0.0.1",
        tokenizer: Any = None,
    ) -> None:
        """Load the model and start the worker.

        Args:
            model_path: Hugging Face folder or name; a folder with a config but no weights gives random weights.
            dtype: default fp32 on a CPU, bf16 on a GPU.
            max_context_len: limit for prompt and response together [tokens]; default: the smaller of the model's limit
                and the cache.
            kv_cache_tokens: the most tokens that the cache holds, in all sequences and cached prefixes. Memory is
                allocated when it is needed. Default: the number of tokens that fit into 4 GiB on a CPU, or into 60 % of
                the free memory on a GPU.
            repeatable: whether cached prefixes are dropped when requests reach an idle engine, see above.
            decode: a function from tokens to text with special tokens; stop strings and the HTTP front need it.
            encode: a function from text to tokens, for the HTTP front.
            eos_token_ids: the tokens that end a response; default: the ids of generation_config.json and config.json.
            seed: seeds random weights, and seeds requests that have no seed.
            http_host: the address of this machine that `start_http` listens on, and that its URL contains.
            tokenizer: the model's tokenizer, for grammars.

        Raises:
            ValueError: the engine cannot compute this architecture, or the cache is smaller than ``max_context_len``.
        """
        super().__init__(decode, encode, http_host)
        config, place = load_config(model_path), torch.device(device)
        check_config(config)
        dtype = dtype or (torch.float32 if place.type == "cpu" else torch.bfloat16)
        decoder: DecoderWeights | GenericDecoder
        row_tokens = 0
        if not not_fast(config):
            decoder = DecoderWeights(DecoderShape.from_config(config), place, dtype)
            decoder.load(model_path, config, seed)
            limit, self._vocab_size = config.max_position_embeddings, decoder.shape.vocab_size
            tokens = default_cache_tokens(decoder.shape, place, dtype)
        else:
            decoder = GenericDecoder(model_path, config, place, dtype, seed)
            limit, self._vocab_size = decoder.context, decoder.vocab_size
            tokens, row_tokens = decoder.cache_tokens(cache_bytes(place))
        self._weights, self._update = decoder, decoder.incoming
        tokens = kv_cache_tokens or tokens
        wanted = max_context_len or limit or tokens
        if wanted > tokens and max_context_len:
            raise ValueError(
                f"a context of {wanted} tokens does not fit a KV cache of {tokens} tokens; raise "
                "--kv-cache-tokens or give the engine more memory, or lower --rollout-max-context-len "
                "(slimelite serve: --context-length)"
            )
        self._max_context_len = min(wanted, tokens)
        self._max_running, self._repeatable = max_running_requests, repeatable
        self._scheduler: Batching
        batching = max_running_requests, decode, self._listeners
        if isinstance(decoder, GenericDecoder):
            self._scheduler = GenericScheduler(decoder, tokens, row_tokens, *batching)
        else:
            memory = KVMemory(decoder.shape, tokens, place, dtype)
            self._scheduler = Scheduler(Decoder(decoder, config, self._max_context_len), memory, *batching)
        self._eos = frozenset(read_eos_ids(model_path, config) if eos_token_ids is None else eos_token_ids)
        self._device, self._tokenizer = place, tokenizer
        self._grammars: Grammars | None = None
        self._extra = {"model_path": model_path, "device": str(place), "dtype": str(dtype).removeprefix("torch.")}
        self._seeds = np.random.default_rng(seed)
        # tags of released memory; no step runs until all of it is resumed; only the worker thread uses this set
        self._released: set[str] = set()
        self._scorings = Gathered(self._accept_scorings)
        self._worker.start()

    async def info(self) -> EngineInfo:
        return EngineInfo(
            name=self.name,
            weight_version=self._scheduler.weight_version,
            max_context_len=self._max_context_len,
            max_running_requests=self._max_running,
            seeds=True,
            scores=True,
            schemas=self._tokenizer is not None,
            url=self._front.url,
            extra=dict(self._extra),
        )

    async def score(self, input_ids: Sequence[int], start: int, temperature: float = 1.0, top: int = 0) -> Scores:
        """See `Engine.score`. Calls from one turn of the event loop share a pass if they have the same tokens before
        ``start``. This pass computes the common tokens only once. The scheduler makes one such pass before each
        decoding step.
        """
        check_score(input_ids, start, temperature, top, self._vocab_size, self._max_context_len)
        scoring = Scoring(list(input_ids), start, float(temperature), top)
        scoring.future.set_running_or_notify_cancel()
        self._scorings.add(scoring)
        return await asyncio.wrap_future(scoring.future)

    def _accept_scorings(self, scorings: list[Scoring]) -> None:
        """Submit the calls of `score` from one turn of an event loop. Calls that begin with the same tokens share one
        pass."""
        try:
            self._post(lambda: self._scheduler.scoring.extend(together(scorings)))
        except RuntimeError as error:
            for scoring in scorings:
                scoring.future.set_exception(error)

    async def release_memory(self, tags: Sequence[str]) -> None:
        """See `Engine.release_memory`. Running requests wait for `resume_memory`. On a CPU the weights stay in memory.

        `resume_memory` allocates no memory for the KV cache, because the next step does this.
        """
        check_memory_tags(tags)

        def release() -> None:
            self._released.update(tags)
            if "kv_cache" in tags:
                self._scheduler.release_cache()
            if "weights" in tags:
                self._weights.release()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

        await self._do(release)

    async def resume_memory(self, tags: Sequence[str]) -> None:
        check_memory_tags(tags)

        def resume() -> None:
            if "weights" in tags:
                self._weights.resume()
            self._released.difference_update(tags)

        await self._do(resume)

    def _submit(self, requests: Sequence[GenerateRequest]) -> list[Future[GenerateResult]]:
        check_ids(requests, self._scheduler.request_ids())
        if self._repeatable and not self._scheduler.has_work:
            self._scheduler.release_cache()
        taken = []
        for request in requests:
            params = request.params
            stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos)}
            running = Running(
                request=request,
                seed=int(self._seeds.integers(2**63)) if params.seed is None else params.seed,
                stop_ids=tuple(sorted(t for t in stop_ids if 0 <= t < self._vocab_size)),
                tokens=np.array(request.input_ids, np.int64),
                guide=self._guide(request),
            )
            running.future.set_running_or_notify_cancel()
            taken.append(running)
        self._scheduler.waiting.extend(taken)
        return [running.future for running in taken]

    def _check(self, request: GenerateRequest) -> None:
        self._guide(request)

    def _guide(self, request: GenerateRequest) -> Held | None:
        """The response's position in its grammar; None without a grammar.

        Raises:
            ValueError: the grammar is malformed or too large, or the response so far does not follow the grammar.
        """
        params = request.params
        if params.grammar is None or (self._tokenizer is None and not params.guided):
            return None
        if self._tokenizer is None:
            raise ValueError(
                f"{params.grammar[0]}: this engine was built without a tokenizer, so it cannot enforce a grammar"
            )
        if self._grammars is None:
            self._grammars = Grammars(self._tokenizer, self._vocab_size, self._eos)
        guide = self._grammars.guide(params)
        if guide is not None:
            guide.advance(self._grammars.tokens.tokenize_str(params.begun))
            guide.advance(request.input_ids[len(request.input_ids) - request.position :])
        return guide

    def _abort(self, request_ids: Collection[str] | None) -> None:
        self._scheduler.abort(request_ids)

    def _can_step(self) -> bool:
        return not self._released and self._scheduler.has_work

    def _step(self) -> None:
        self._scheduler.step()

    def _fail(self, error: Exception) -> None:
        self._scheduler.fail(error)

    def _load(self, bucket: WeightBucket) -> None:
        self._weights.update(bucket.tensors())

    def _begin_update(self) -> None:
        self._scheduler.release_cache()

    def _end_update(self, version: int) -> None:
        self._scheduler.set_weight_version(version)

    @torch.inference_mode()
    def _work(self) -> None:
        super()._work()


def build(setup: EngineSetup, codec: Codec) -> InProcessEngine:
    """Build the engine of a run."""
    own = {"kv_cache_tokens": setup.kv_cache_tokens, "repeatable": setup.repeatable, "tokenizer": codec.tokenizer}
    engine = partial(EmbeddedEngine, **own)
    return build_in_process(engine, setup, codec)


def read_eos_ids(model_path: str, config: PretrainedConfig) -> set[int]:
    """Tokens that end a response, from generation_config.json and config.json."""
    declared = [config.eos_token_id]
    if not Path(model_path).is_dir() or (Path(model_path) / "generation_config.json").is_file():
        declared.append(GenerationConfig.from_pretrained(model_path).eos_token_id)
    return {t for ids in declared for t in (ids if isinstance(ids, list) else [ids]) if t is not None}


def default_cache_tokens(shape: DecoderShape, device: torch.device, dtype: torch.dtype) -> int:
    """The number of tokens whose keys and values fit into `cache_bytes`. Memory is allocated only when it is used."""
    return cache_bytes(device) // (2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * dtype.itemsize)


def cache_bytes(device: torch.device) -> int:
    """The default number of bytes for cached results."""
    if device.type == "cuda":
        return math.floor(torch.cuda.mem_get_info(device)[0] * GPU_CACHE_SHARE)
    return CPU_CACHE_BYTES
