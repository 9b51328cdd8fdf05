"""Base class of engines inside this process. One worker thread owns the model and does one thing at a time."""

from __future__ import annotations

import asyncio
import queue
import secrets
import threading
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from slimelite.base.threads import Gathered, LoopThread
from slimelite.engines.checks import WeightUpdate, check_request
from slimelite.engines.protocol import (
    Codec,
    Decode,
    Engine,
    EngineSetup,
    GenerateRequest,
    GenerateResult,
    OnTokens,
    Scores,
    WeightBucket,
)

if TYPE_CHECKING:
    from slimelite.engines.http_front import GenerateServer

T = TypeVar("T")
# device type -> the most requests that are decoded at once, unless --sglang-max-running-requests is given
RUNNING_REQUESTS = {"cpu": 256, "cuda": 512}


class _Call:
    """One call of `Engine.generate`. ``whole`` wakes the caller once, after the last result.

    Each future that an event loop awaits wakes the loop's thread. One such wake-up takes about the time of a step of a
    small model.
    """

    def __init__(self, requests: Sequence[GenerateRequest], listener: OnTokens | None) -> None:
        self.requests, self.listener = requests, listener
        self.whole: Future[list[GenerateResult]] = Future()
        self.whole.set_running_or_notify_cancel()

    def wait_for(self, results: Sequence[Future[GenerateResult]]) -> None:
        """Set ``whole`` when all ``results`` are done, or when one has failed."""
        left = len(results)

        def count(done: Future[GenerateResult]) -> None:
            nonlocal left
            left -= 1
            if self.whole.done():
                return
            if (error := done.exception()) is not None:
                self.whole.set_exception(error)
            elif not left:
                self.whole.set_result([result.result() for result in results])

        for result in results:
            result.add_done_callback(count)
        if not results:
            self.whole.set_result([])


class HttpFront:
    """A `GenerateServer` that starts on demand. The server has its own thread and event loop, so it continues when a
    caller's loop ends."""

    def __init__(
        self,
        engine: Engine,
        encode: Callable[[str], list[int]] | None,
        decode: Decode | None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.url: str | None = None
        self._engine, self._codec, self._place = engine, (encode, decode), (host, port)
        self._server: GenerateServer | None = None
        self._thread: LoopThread | None = None

    async def start(self) -> str:
        """Start listening, unless the server listens already, and return the base URL.

        Raises:
            OSError: the host is not an address of this machine, or the port is taken.
        """
        self._thread = self._thread or LoopThread("http front")
        if self._server is None:
            # these two modules need aiohttp
            from slimelite.base.http_server import is_loopback, with_key
            from slimelite.engines.http_front import GenerateServer

            length = (await self._engine.info()).max_context_len
            # at an address other than loopback, clients need a key; plugins find the key in the URL
            key = None if is_loopback(self._place[0]) else secrets.token_urlsafe(24)
            server = GenerateServer(self._engine, *self._codec, length, *self._place, key)
            self.url = with_key(await self._thread.result(server.start()), key)
            self._server = server
        assert self.url is not None
        return self.url

    async def stop(self) -> None:
        """Stop the server, if it was started."""
        if self._thread is not None:
            if self._server is not None:
                await self._thread.result(self._server.stop())
            await asyncio.to_thread(self._thread.close)
        self._thread = self._server = self.url = None


class InProcessEngine(Engine):
    """One worker thread owns the model and the running requests. Between two steps, the thread runs the jobs of
    callers.

    During a weight update the worker makes no step, so running and new requests wait.

    A subclass sets the attributes below, starts the thread `_worker`, and defines the methods that run on it.
    """

    name: str
    _vocab_size: int
    _max_context_len: int
    _update: WeightUpdate

    def __init__(
        self,
        decode: Decode | None,
        encode: Callable[[str], list[int]] | None,
        http_host: str = "127.0.0.1",
    ) -> None:
        self._decode = decode
        self._front = HttpFront(self, encode, decode, http_host)
        self._closed = False
        # calls made in the same turn of an event loop are submitted together, so one step admits all of them
        self._arriving = Gathered(self._accept)
        # request id -> the callback for its tokens; only the worker thread uses this dict
        self._listeners: dict[str, OnTokens] = {}
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._work, name=f"{self.name} engine", daemon=True)

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """See `Engine.generate`. Cancelling this call aborts the requests."""
        return await self._generate(requests)

    async def stream(self, request: GenerateRequest, on_tokens: OnTokens) -> GenerateResult:
        """See `Streaming.stream`."""
        loop = asyncio.get_running_loop()

        def tell(tokens: Sequence[int], log_probs: Sequence[float]) -> None:
            with suppress(RuntimeError):  # the loop is closed, so nobody waits for the result
                loop.call_soon_threadsafe(on_tokens, tokens, log_probs)

        # the worker passes the last tokens to the loop before the result, and the loop keeps this order
        (result,) = await self._generate([request], tell)
        return result

    async def _generate(
        self, requests: Sequence[GenerateRequest], listener: OnTokens | None = None
    ) -> list[GenerateResult]:
        for request in requests:
            check_request(request, self._vocab_size, self._max_context_len)
            if request.params.stop and self._decode is None:
                raise ValueError(f"request {request.request_id}: stop strings need an engine with a decode function")
            # compiling a grammar takes time, and other requests continue meanwhile
            if request.params.grammar is not None:
                await asyncio.to_thread(self._check, request)
        call = _Call(requests, listener)
        self._arriving.add(call)
        try:
            return await asyncio.wrap_future(call.whole)
        except asyncio.CancelledError:
            ids = {request.request_id for request in requests}
            self._post(lambda: self._abort(ids))
            raise

    async def score(self, input_ids: Sequence[int], start: int, temperature: float = 1.0, top: int = 0) -> Scores:  # noqa: ARG002
        raise ValueError(f"score: the {self.name} engine cannot score prompts; use --rollout-backend embedded")

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        ids = None if request_ids is None else set(request_ids)
        await self._do(lambda: self._abort(ids))

    async def begin_weight_update(self, version: int, changed: Collection[str] | None = None) -> bool:
        def begin() -> bool:
            self._begin_update()
            return self._update.begin(version, changed)

        return await self._do(begin)

    async def load_weights(self, bucket: WeightBucket) -> None:
        await self._do(lambda: self._load(bucket))

    async def end_weight_update(self) -> None:
        def end() -> None:
            self._end_update(self._update.whole())
            self._update.end()

        await self._do(end)

    async def release_memory(self, tags: Sequence[str]) -> None:
        raise ValueError(
            f"the {self.name} engine cannot release its {' and '.join(tags)}; use another --rollout-backend"
        )

    async def resume_memory(self, tags: Sequence[str]) -> None:
        await self.release_memory(tags)

    async def start_http(self) -> str:
        return await self._front.start()

    async def close(self) -> None:
        """See `Engine.close`. Requests that are still running fail."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        await asyncio.to_thread(self._worker.join)
        await self._front.stop()

    def _check(self, request: GenerateRequest) -> None:
        """Refuse a grammar that the engine cannot enforce.

        Raises:
            ValueError: the grammar is malformed or too large, or the engine supports no grammars.
        """
        if request.params.guided and request.params.grammar is not None:
            raise ValueError(f"{request.params.grammar[0]}: the {self.name} engine cannot enforce a grammar")

    def _accept(self, calls: list[_Call]) -> None:
        def submit() -> None:
            for call in calls:
                try:
                    results = self._submit(call.requests)
                    if call.listener is not None:
                        self._listen(call.requests[0].request_id, call.listener, results[0])
                    call.wait_for(results)
                except Exception as error:
                    call.whole.set_exception(error)

        try:
            self._post(submit)
        except RuntimeError as error:
            for call in calls:
                call.whole.set_exception(error)

    # the worker thread runs the methods below

    def _listen(self, request_id: str, listener: OnTokens, result: Future[GenerateResult]) -> None:
        self._listeners[request_id] = listener
        result.add_done_callback(lambda _: self._listeners.pop(request_id))

    @abstractmethod
    def _submit(self, requests: Sequence[GenerateRequest]) -> list[Future[GenerateResult]]:
        """Accept all requests of one call, or none of them."""

    @abstractmethod
    def _abort(self, request_ids: Collection[str] | None) -> None:
        """End the requests with these ids; None: all requests. Each request returns the tokens that it has so far."""

    @abstractmethod
    def _can_step(self) -> bool:
        """Whether there is a request to decode and all memory for it is allocated."""

    @abstractmethod
    def _step(self) -> None:
        """Decode one token for each running request."""

    @abstractmethod
    def _fail(self, error: Exception) -> None:
        """Pass ``error`` to every caller and drop all requests."""

    def _begin_update(self) -> None:
        """Prepare for an update. An earlier update may be unfinished."""

    @abstractmethod
    def _load(self, bucket: WeightBucket) -> None:
        """Copy the bucket into the model. `_update` has checked the names and shapes of the bucket's tensors."""

    @abstractmethod
    def _end_update(self, version: int) -> None:
        """All weights have arrived: discard the cached keys and values, because they were computed with the old
        weights."""

    def _shut_down(self) -> None:
        """Free the resources of the worker."""

    def _post(self, job: Callable[[], T]) -> Future[T]:
        """Queue ``job`` for the worker, which runs it between two steps."""
        if self._closed:
            raise RuntimeError("the engine is closed")
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                future.set_result(job())
            except Exception as error:
                future.set_exception(error)

        self._jobs.put(run)
        return future

    async def _do(self, job: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._post(job))

    def _work(self) -> None:
        """The worker's loop: run queued jobs first, then make a step, until the engine is closed."""
        while True:
            idle = self._update.version is not None or not self._can_step()
            try:
                job = self._jobs.get(block=idle)
            except queue.Empty:
                try:
                    self._step()
                except Exception as error:
                    self._fail(error)
                continue
            if job is None:
                break
            job()
        self._fail(RuntimeError("the engine was closed"))
        self._shut_down()


def build_in_process(engine: Callable[..., InProcessEngine], setup: EngineSetup, codec: Codec) -> InProcessEngine:
    """Build an engine of the class ``engine`` from the setup of a run."""
    return engine(
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
