"""The embedded engine: token-in, token-out inference in this process, on a CPU or a GPU."""

from __future__ import annotations

import asyncio
import math
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import AutoConfig, GenerationConfig

from slimelite.engines.checks import LOWEST_TEMPERATURE, check_request, check_tokens, is_temperature, is_whole
from slimelite.engines.embedded.attention import KVCache, round_up
from slimelite.engines.embedded.model import Decoder, DecoderShape, DecoderWeights
from slimelite.engines.embedded.scheduler import Decode, Running, Scheduler, Scoring
from slimelite.engines.http_front import HttpFront
from slimelite.engines.protocol import (
    Capabilities,
    Codec,
    EngineInfo,
    EngineSetup,
    GenerateRequest,
    GenerateResult,
    WeightBucket,
    check_memory_tags,
)

T = TypeVar("T")
# decoded at once, by device, where --sglang-max-running-requests does not say
RUNNING_REQUESTS = {"cpu": 128, "cuda": 256}
# default size of the cache: on a CPU in bytes (memory is taken as it is used), on a GPU as a share of what is free
CPU_CACHE_BYTES = 4 << 30
GPU_CACHE_SHARE = 0.6


class EmbeddedEngine:
    """Implements `slimelite.engines.protocol.Engine`.

    One worker thread owns the model and all running sequences; what callers ask for reaches it through a queue
    and is done between two decoding steps. Requests that come while weights are being updated or memory is
    released wait. A request that is running when new weights arrive goes on under them: its keys and values are
    computed anew, so that each token is drawn from the model its weight version names.

    The same requests in one `generate` call to an idle engine give bit-identical results, seeds given.
    """

    def __init__(
        self,
        model_path: str,
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        max_running_requests: int = 64,
        max_context_len: int | None = None,
        kv_cache_tokens: int | None = None,
        decode: Decode | None = None,
        encode: Callable[[str], list[int]] | None = None,
        eos_token_ids: Iterable[int] | None = None,
        seed: int = 0,
        http_host: str = "127.0.0.1",
        http_port: int = 0,
    ) -> None:
        """Load the model and start the worker.

        Args:
            model_path: Hugging Face folder or name; a folder with a config but no weights gives random ones.
            dtype: default fp32 on a CPU, bf16 on a GPU.
            max_context_len: prompt and response tokens of one sequence; default: the model's, or what the cache holds.
            kv_cache_tokens: size of the cache in tokens, over all sequences.
            decode: tokens to text, special tokens included; stop strings and the HTTP front need it.
            encode: text to tokens, for the HTTP front.
            eos_token_ids: default: those of generation_config.json and config.json.
            seed: of requests without one, and of random weights.
            http_host: address of this machine that `start_http` listens on, and that its URL names.
            http_port: where; 0 takes a free one.

        Raises:
            ValueError: an architecture this engine does not compute, or a cache smaller than one context.
        """
        config = AutoConfig.from_pretrained(model_path)
        shape = DecoderShape.from_config(config)
        place = torch.device(device)
        dtype = dtype or (torch.float32 if place.type == "cpu" else torch.bfloat16)
        self._weights = DecoderWeights(shape, place, dtype)
        self._weights.load(model_path, config, seed)
        wanted = max_context_len or config.max_position_embeddings
        tokens = kv_cache_tokens or default_cache_tokens(shape, place, dtype, max_running_requests * round_up(wanted))
        if wanted > tokens and max_context_len:
            raise ValueError(
                f"a context of {wanted} tokens does not fit a KV cache of {tokens} tokens; give the engine more "
                "memory, or lower --rollout-max-context-len"
            )
        self._max_context_len = min(wanted, tokens)
        self._max_running = max_running_requests
        decoder = Decoder(self._weights, config, self._max_context_len)
        self._scheduler = Scheduler(
            decoder,
            lambda: KVCache(shape, round_up(tokens), place, dtype),
            max_running_requests,
            self._max_context_len,
            decode,
        )
        self._eos = frozenset(read_eos_ids(model_path, config) if eos_token_ids is None else eos_token_ids)
        self._decode, self._device = decode, place
        self._front = HttpFront(self, encode, decode, http_host, http_port)
        self._extra = {"model_path": model_path, "device": str(place), "dtype": str(dtype).removeprefix("torch.")}
        self._seeds = np.random.default_rng(seed)
        # why decoding is suspended; only the worker touches it
        self._holds: set[str] = set()
        self._next_version: int | None = None
        self._closed = False
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._work, name="embedded-engine", daemon=True)
        self._worker.start()

    async def info(self) -> EngineInfo:
        """See `Engine.info`."""
        return EngineInfo(
            name="embedded",
            weight_version=self._scheduler.weight_version,
            max_context_len=self._max_context_len,
            max_running_requests=self._max_running,
            capabilities=Capabilities(seeds=True, abort=True, partial_results=True, pause=True, sleep=True, score=True),
            url=self._front.url,
            extra=dict(self._extra),
        )

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """See `Engine.generate`. Cancelling it aborts the requests."""
        for request in requests:
            check_request(request, self._weights.shape.vocab_size, self._max_context_len)
            if request.params.stop and self._decode is None:
                raise ValueError(f"request {request.request_id}: stop strings need an engine with a decode function")
        call = _Call(len(requests))
        try:
            await self._do(lambda: self._submit(requests, call))
            return await asyncio.wrap_future(call.future)
        except asyncio.CancelledError:
            ids = {request.request_id for request in requests}
            self._post(lambda: self._scheduler.abort(ids))
            raise

    async def score(self, input_ids: Sequence[int], start: int, temperature: float = 1.0) -> list[float]:
        """See `Engine.score`. One sequence is scored between two decoding steps."""
        check_tokens(input_ids, self._weights.shape.vocab_size, "score")
        if not is_whole(start, 1, len(input_ids) - 1) or not is_temperature(temperature, greedy=False):
            raise ValueError(
                f"score: needs a temperature of at least {LOWEST_TEMPERATURE:g} and 0 < start < {len(input_ids)} (the "
                f"number of input_ids), got {temperature!r:.60} and {start!r:.60}"
            )
        if len(input_ids) > self._max_context_len:
            raise ValueError(f"score: {len(input_ids)} tokens exceed the engine's context of {self._max_context_len}")
        scoring = Scoring(list(input_ids), start, temperature)
        scoring.future.set_running_or_notify_cancel()
        await self._do(lambda: self._scheduler.scoring.append(scoring))
        return await asyncio.wrap_future(scoring.future)

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """See `Engine.abort`."""
        ids = None if request_ids is None else set(request_ids)
        await self._do(lambda: self._scheduler.abort(ids))

    async def begin_weight_update(self, version: int) -> None:
        """See `Engine.begin_weight_update`. Beginning again drops what an unfinished update has sent."""

        def begin() -> None:
            self._next_version = version
            self._holds.add("weight update")
            self._weights.begin_update()

        await self._do(begin)

    async def load_weights(self, bucket: WeightBucket) -> None:
        """See `Engine.load_weights`."""

        def load() -> None:
            self._assert_updating()
            self._weights.update(bucket.tensors())

        await self._do(load)

    async def end_weight_update(self) -> None:
        """See `Engine.end_weight_update`."""

        def end() -> None:
            version = self._assert_updating()
            if missing := self._weights.missing():
                names = ", ".join(missing[:4]) + (", …" if len(missing) > 4 else "")
                raise ValueError(
                    f"weight version {version} lacks {len(missing)} weights ({names}); send them, end again"
                )
            self._scheduler.set_weight_version(version)
            self._next_version = None
            self._holds.discard("weight update")

        await self._do(end)

    async def release_memory(self, tags: Sequence[str]) -> None:
        """See `Engine.release_memory`. Running requests wait for `resume_memory`; a CPU keeps its weights."""
        check_memory_tags(tags)

        def release() -> None:
            self._holds.update(tags)
            if "kv_cache" in tags:
                self._scheduler.release_cache()
            if "weights" in tags:
                self._weights.release()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

        await self._do(release)

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """See `Engine.resume_memory`."""
        check_memory_tags(tags)

        def resume() -> None:
            if "weights" in tags:
                self._weights.resume()
            if "kv_cache" in tags:
                self._scheduler.allocate_cache()
            self._holds.difference_update(tags)

        await self._do(resume)

    async def start_http(self) -> str:
        """See `Engine.start_http`."""
        return await self._front.start()

    async def close(self) -> None:
        """See `Engine.close`. Requests still running fail."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        await asyncio.to_thread(self._worker.join)
        await self._front.stop()

    def _assert_updating(self) -> int:
        if self._next_version is None:
            raise ValueError("no weight update is under way; call begin_weight_update first")
        return self._next_version

    def _submit(self, requests: Sequence[GenerateRequest], call: _Call) -> None:
        """Queue the requests of one call, all or none."""
        taken = self._scheduler.request_ids()
        for request in requests:
            if request.request_id in taken:
                raise ValueError(f"request id {request.request_id} is taken by a running request; ids must be unique")
            taken.add(request.request_id)
        for index, request in enumerate(requests):
            params = request.params
            stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos)}
            sequence = Running(
                request=request,
                seed=int(self._seeds.integers(2**63)) if params.seed is None else params.seed,
                stop_ids=tuple(sorted(t for t in stop_ids if 0 <= t < self._weights.shape.vocab_size)),
                deliver=call.deliver_to(index),
                fail=call.fail,
            )
            self._scheduler.waiting.append(sequence)

    def _post(self, job: Callable[[], T]) -> Future[T]:
        """Have the worker do ``job`` between two steps."""
        if self._closed:
            raise RuntimeError("the engine is closed")
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        self._jobs.put((job, future))
        return future

    async def _do(self, job: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._post(job))

    @torch.inference_mode()
    def _work(self) -> None:
        """The worker: jobs first, then a decoding step, until closed."""
        scheduler = self._scheduler
        while True:
            idle = bool(self._holds) or not scheduler.has_work
            try:
                item = self._jobs.get(block=idle)
            except queue.Empty:
                try:
                    scheduler.step()
                except Exception as error:
                    scheduler.fail(error)
                continue
            if item is None:
                break
            job, future = item
            try:
                future.set_result(job())
            except Exception as error:
                future.set_exception(error)
        scheduler.fail(RuntimeError("the engine was closed"))


def build(setup: EngineSetup, codec: Codec) -> EmbeddedEngine:
    """The engine as a run has it."""
    return EmbeddedEngine(
        setup.model_path,
        device=setup.device,
        max_running_requests=setup.max_running_requests or RUNNING_REQUESTS[setup.device],
        max_context_len=setup.max_context_len,
        decode=codec.decode,
        encode=codec.encode,
        eos_token_ids=codec.eos_token_ids,
        seed=setup.seed,
        http_host=setup.host,
    )


class _Call:
    """Results of one `generate` call, collected by the worker."""

    def __init__(self, count: int) -> None:
        self.future: Future[list[GenerateResult]] = Future()
        self.future.set_running_or_notify_cancel()
        self._results: list[GenerateResult | None] = [None] * count
        self._open = count
        if not count:
            self.future.set_result([])

    def deliver_to(self, index: int) -> Callable[[GenerateResult], None]:
        """A function that takes the result of request ``index``."""

        def deliver(result: GenerateResult) -> None:
            self._results[index] = result
            self._open -= 1
            if not self._open:
                self.future.set_result([r for r in self._results if r is not None])

        return deliver

    def fail(self, error: Exception) -> None:
        """Pass an error to the caller, once."""
        if not self.future.done():
            self.future.set_exception(error)


def read_eos_ids(model_path: str, config: Any) -> set[int]:
    """Tokens that end a response, from generation_config.json and config.json."""
    found = [config.eos_token_id]
    if not Path(model_path).is_dir() or (Path(model_path) / "generation_config.json").is_file():
        found.append(GenerationConfig.from_pretrained(model_path).eos_token_id)
    return {t for ids in found for t in (ids if isinstance(ids, list) else [ids]) if t is not None}


def default_cache_tokens(shape: DecoderShape, device: torch.device, dtype: torch.dtype, wanted: int) -> int:
    """``wanted`` tokens, or as many as the default share of memory holds."""
    token_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * dtype.itemsize
    free = CPU_CACHE_BYTES
    if device.type == "cuda":
        free = math.floor(torch.cuda.mem_get_info(device)[0] * GPU_CACHE_SHARE)
    return min(wanted, free // token_bytes)
