"""SGLang servers as engines of a run. The module starts servers, connects to them, and implements the engine protocol
over ``/generate``."""

from __future__ import annotations

import asyncio
import copy
import logging
import time
import uuid
from bisect import bisect_left
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig

from slimelite.base.http_client import Client, HttpError, NoAnswer, Refused, Retry, ask
from slimelite.base.threads import LoopThread
from slimelite.engines.checks import check_ids, check_request, check_score
from slimelite.engines.protocol import (
    Codec,
    Engine,
    EngineInfo,
    EngineSetup,
    GenerateRequest,
    GenerateResult,
    OnTokens,
    Restartable,
    Scores,
    SyncSetup,
    WeightBucket,
    check_memory_tags,
)
from slimelite.engines.registry import DRAFTS, NO_DRAFTS_BY_DISK, ServerAddress
from slimelite.engines.sglang.front import ADAPTER, AdapterFront
from slimelite.engines.sglang.server import (
    REPORT_S,
    START_S,
    Server,
    SglangServer,
    server_command,
    server_environment,
    server_fields,
)
from slimelite.engines.sglang.sync import ServerSink, build_sink, check_model
from slimelite.engines.sglang.wire import extend, request_body, version_of
from slimelite.models.files import has_weights

logger = logging.getLogger(__name__)

RETRY = Retry(attempts=3, first_s=0.3)
POLL_S = 0.05
# timeout of a cache flush, which waits until aborted requests have ended
IDLE_S = 30.0
# the maximal length of a request in SGLang is max_req_input_len plus this number [tokens]
REQUEST_ROOM = 4
# SGLang ends a request this many tokens below its context length, so slimelite sets a longer context
CONTEXT_MARGIN = 2
NO_MASKS = (
    "does not report the tokens that top-p, top-k or min-p kept. Training needs these tokens to renormalise log-probs. "
    "Start SGLang 0.5.20 or newer, which reports them (return_sampling_mask), or accept log-probs of the whole "
    "vocabulary with --allow-truncated-sampling"
)
# the field of a request that selects the adapter
POLICY = {"lora_path": ADAPTER}


@dataclass(slots=True)
class _Running:
    """A request in flight: its id at the server, and whether `SglangEngine.abort` ended the request."""

    rid: str = ""
    aborted: bool = False


class SglangEngine(Engine):
    """Implements `slimelite.engines.protocol.Engine` over the server at ``url``, and `Restartable`.

    A weight update ends the requests that the server is decoding, because the server can flush its KV cache only when
    it is idle. If a weight update (and not `abort`) ends a response, the client sends the request again with the tokens
    so far. The response continues with the new weights, and every token keeps the weight version that it was sampled
    from. Aborted requests return their tokens, so that partial rollouts need no streaming.
    """

    name = "sglang"

    def __init__(
        self,
        server: Server,
        model_path: str,
        codec: Codec | None = None,
        owner: Restartable | None = None,
        wait_s: float = START_S,
        adapter: bool = False,
    ) -> None:
        """Read the model's config. No request is sent to the server yet.

        Args:
            model_path: Hugging Face folder or name of the server's model. The model defines which weights an update
                must bring.
            codec: used to find stop strings and end tokens that the server misses. None: a response ends only at stop
                strings and end tokens that the server finds.
            owner: the object that can restart the server at the same address; None: slimelite did not start the server.
            wait_s: how long `restart` waits for the server to answer [s].
            adapter: whether the policy is an adapter of the server. Requests must then name the adapter, so requests
                of other clients go through a front. False: the policy is the server's model.
        """
        self.url = server.url.rstrip("/")
        # callers use several event loops, but a connection belongs to one loop, so all requests run on this thread's
        # loop
        self._thread, self._http = LoopThread(f"http {self.url}"), Client(texts=True)
        self._server, self._model_path = server, model_path
        self._vocab_size: int = AutoConfig.from_pretrained(model_path).get_text_config().vocab_size
        self._eos = tuple(codec.eos_token_ids) if codec else ()
        self._decode = codec.decode if codec else None
        self._owner = owner
        self._front = AdapterFront(self.url) if adapter else None
        self._wait_s = wait_s
        self._running: dict[str, _Running] = {}
        self._released: set[str] = set()
        self._sink: ServerSink | None = None
        self._known: EngineInfo | None = None

    async def info(self) -> EngineInfo:
        """See `Engine.info`. The server's scheduler answers ``/server_info``, so a server that hangs is detected."""
        model, server = await asyncio.gather(self._ask("GET", "/model_info"), self._ask("GET", "/server_info"))
        self._known = EngineInfo(
            name=self.name,
            weight_version=version_of(model["weight_version"]),
            max_context_len=server["max_req_input_len"] + REQUEST_ROOM,
            max_running_requests=server["internal_states"][0]["effective_max_running_requests_per_dp"],
            seeds=bool(server["enable_deterministic_inference"]),
            scores=True,
            schemas=True,
            url=None if self._front else self.url,
            extra={"model_path": model["model_path"], "sglang": server["version"], "dtype": str(server["dtype"])},
        )
        return self._known

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
        """See `Engine.generate`. If the caller cancels this call, the server ends its requests."""
        return await self._generate(requests)

    async def stream(self, request: GenerateRequest, on_tokens: OnTokens) -> GenerateResult:
        """See `Streaming.stream`. The server reports a few tokens at a time."""
        (result,) = await self._generate([request], on_tokens)
        return result

    async def _generate(
        self, requests: Sequence[GenerateRequest], on_tokens: OnTokens | None = None
    ) -> list[GenerateResult]:
        info = self._known or await self.info()
        for request in requests:
            check_request(request, self._vocab_size, info.max_context_len)
        check_ids(requests, self._running)
        running = {request.request_id: _Running() for request in requests}
        self._running |= running
        tasks = [asyncio.ensure_future(self._complete(r, info.seeds, on_tokens)) for r in requests]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            for request_id in running:
                del self._running[request_id]

    async def score(self, input_ids: Sequence[int], start: int, temperature: float = 1.0, top: int = 0) -> Scores:
        """See `Engine.score`. Scoring works only at temperature 1. A call waits until all memory is resumed."""
        info = self._known or await self.info()
        check_score(input_ids, start, temperature, top, self._vocab_size, info.max_context_len)
        if temperature != 1:
            raise ValueError(f"score: {self.url} scores only at temperature 1, not at {temperature}")
        body: dict[str, object] = {"input_ids": list(input_ids), "sampling_params": {"max_new_tokens": 0}}
        body |= {"return_logprob": True, "logprob_start_len": start - 1, "top_logprobs_num": top}
        body |= POLICY if self._front else {}
        while self._released:
            await asyncio.sleep(POLL_S)
        meta = (await self._ask("POST", "/generate", body))["meta_info"]
        likeliest = meta["input_top_logprobs"][1:] if top else [[]] * (len(input_ids) - start)
        return Scores(
            [log_prob for log_prob, _, _ in meta["input_token_logprobs"][1:]],
            [[(token, log_prob) for log_prob, token, _ in entries] for entries in likeliest],
        )

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """See `Engine.abort`. If ``request_ids`` is None, requests that other clients sent to the server end too."""
        ids = self._running.keys() if request_ids is None else self._running.keys() & set(request_ids)
        running = [self._running[request_id] for request_id in ids]
        for request in running:
            request.aborted = True
        if request_ids is None:
            await self._ask("POST", "/abort_request", {"rid": "", "abort_all": True})
        else:
            await asyncio.gather(*(self._ask("POST", "/abort_request", {"rid": r.rid}) for r in running if r.rid))

    async def begin_weight_update(self, version: int, changed: Collection[str] | None = None) -> bool:
        if self._sink is None:
            setup = SyncSetup(self._model_path, "http", torch.device("cpu"), self.url)
            self._sink = (await asyncio.to_thread(build_sink, setup)).to([self._server])
        return await asyncio.to_thread(self._sink.begin, version, changed)

    async def load_weights(self, bucket: WeightBucket) -> None:
        await asyncio.to_thread(self._updating().send, bucket)

    async def end_weight_update(self) -> None:
        await asyncio.to_thread(self._updating().end)

    async def release_memory(self, tags: Sequence[str]) -> None:
        """See `Engine.release_memory`. Requests wait in this client until all memory is resumed."""
        check_memory_tags(tags)
        self._released.update(tags)
        # a server dies if it releases memory while it decodes, so all requests are ended first, including requests of
        # plugins
        await self._ask("POST", "/abort_request", {"rid": "", "abort_all": True})
        await self._ask("POST", f"/flush_cache?timeout={IDLE_S:g}", {})
        await self._ask("POST", "/release_memory_occupation", {"tags": list(tags)})
        if "weights" in tags and self._sink is not None:
            self._sink.update.complete = False

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """See `Engine.resume_memory`. Only released tags are sent, because any other tag crashes the server."""
        check_memory_tags(tags)
        if released := [tag for tag in tags if tag in self._released]:
            await self._ask("POST", "/resume_memory_occupation", {"tags": released})
            self._released.difference_update(released)

    async def restart(self) -> None:
        """See `Restartable.restart`. If slimelite did not start the server, this method only waits until the server
        answers again.

        Raises:
            ValueError: the server does not answer in time.
        """
        if self._owner is not None:
            await self._owner.restart()
            self._released.clear()
        try:
            async with asyncio.timeout(self._wait_s):
                await self._until_it_answers()
        except TimeoutError:
            raise ValueError(f"{self.url} has not answered for {self._wait_s:.0f} s; start that server again") from None

    async def start_http(self) -> str:
        """The server's own address, or the address of a front that adds the adapter to requests."""
        return await self._front.start() if self._front else self.url

    async def close(self) -> None:
        """Close the connections. The server keeps running, because another object owns it."""
        if self._front is not None:
            await self._front.stop()
        await self._thread.result(self._http.close())
        await asyncio.to_thread(self._thread.close)

    async def _ask(self, method: str, path: str, body: object = None) -> Any:
        """The server's answer, decoded.

        Raises:
            ConnectionError: the server does not answer.
            ValueError: the server rejects the request (status 400 or 422).
            RuntimeError: the server answers with another error.
        """
        with _rejections():
            return await self._thread.result(self._http.ask(method, self.url + path, body))

    async def _until_it_answers(self) -> None:
        begin = reported = time.monotonic()
        while True:
            try:
                await self.info()
                return
            except HttpError as error:
                now = time.monotonic()
                if now - reported >= REPORT_S:
                    reported = now
                    logger.warning("waiting for SGLang at %s, %.0f s so far: %s", self.url, now - begin, error)
            await asyncio.sleep(1.0)

    async def _complete(self, request: GenerateRequest, seeds: bool, on_tokens: OnTokens | None) -> GenerateResult:
        """Generate the whole response. After a weight update or a lost connection, send the rest again."""
        running = self._running[request.request_id]
        result = GenerateResult(request.request_id)
        failures = sent = 0
        while not running.aborted:
            if self._released:
                await asyncio.sleep(POLL_S)
                continue
            if result.output_ids and request.params.guided:  # the grammar starts at the first token of a response
                if sent:
                    raise RuntimeError(
                        f"request {request.request_id} was interrupted, and a response that follows a grammar cannot "
                        "be resumed; send the request again"
                    )
                result = GenerateResult(request.request_id)
            # SGLang aborts every request with an id that starts with the given id, so an id must not be a prefix of
            # another id
            running.rid = f"{request.request_id}.{uuid.uuid4().hex[:8]}"
            body = request_body(request, result, running.rid, self._eos, seeds) | (POLICY if self._front else {})
            before = result
            try:
                async with aclosing(self._answers(body, streams=on_tokens is not None)) as answers:
                    async for answer in answers:
                        result = self._longer(request, before, answer)
                        if on_tokens is not None and sent < len(result.output_ids):
                            on_tokens(result.output_ids[sent:], result.log_probs[sent:])
                            sent = len(result.output_ids)
                        if result.finish_reason == "stop":
                            break
            except NoAnswer as error:  # the retry uses a new id, because the server may still have the old one
                failures += 1
                if not RETRY.again(error, failures):
                    raise
                await asyncio.sleep(RETRY.wait_s(failures))
                continue
            except ValueError as error:
                raise ValueError(f"request {request.request_id}: {error}") from error
            if result.finish_reason != "abort":
                break
            await asyncio.sleep(POLL_S)
        return result.packed()

    async def _answers(self, body: dict[str, object], *, streams: bool) -> AsyncGenerator[dict[str, object]]:
        """The answer to a request. With ``streams``, the server's earlier, shorter answers come first.

        Raises: see `_ask`.
        """
        if not streams:
            yield await self._ask("POST", "/generate", body)
            return
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Any]()

        async def read() -> None:
            async for event in self._http.events(f"{self.url}/generate", {**body, "stream": True}):
                loop.call_soon_threadsafe(events.put_nowait, event)

        reading = self._thread.submit(read())
        reading.add_done_callback(lambda _: loop.call_soon_threadsafe(events.put_nowait, None))
        try:
            with _rejections():
                while (event := await events.get()) is not None:
                    error = event.get("error") or event["meta_info"]["finish_reason"] or {}
                    if (status := error.get("code") or error.get("status_code")) is not None:
                        raise Refused(f"{self.url}/generate: {error['message']}", status)
                    yield event
                await asyncio.wrap_future(reading)
        finally:
            reading.cancel()

    def _longer(self, request: GenerateRequest, before: GenerateResult, answer: dict[str, object]) -> GenerateResult:
        """``before``, extended by the tokens of an answer and cut where the response ends."""
        result = copy.deepcopy(before)
        extend(result, answer, request.params)
        if request.params.tells and result.length and result.kept is None:
            raise ValueError(f"{self.url} {NO_MASKS}")
        self._cut(request, result)
        return result

    def _cut(self, request: GenerateRequest, result: GenerateResult) -> None:
        """Cut the response at a stop that SGLang missed.

        SGLang ignores stop ids if ignore_eos is set, and misses a stop string that began before a continuation. SGLang
        also searches only as many tokens as its tokenizer needs for the string. But the model may write the string with
        more tokens.
        """
        params, ids = request.params, result.output_ids
        ends = []
        if params.ignore_eos:
            ends += [i + 1 for i, token in enumerate(ids) if token in params.stop_token_ids][:1]
        decode = self._decode
        if params.stop and decode is not None:
            before = list(request.input_ids[len(request.input_ids) - request.position :])

            def stopped(length: int) -> bool:
                text = decode(before + ids[:length])
                return any(stop in text for stop in params.stop)

            if ids and stopped(len(ids)):
                ends.append(bisect_left(range(1, len(ids) + 1), True, key=stopped) + 1)
        if ends:
            end = min(ends)
            del ids[end:], result.log_probs[end:], result.weight_versions[end:]
            result.kept = result.kept and result.kept.first(end)
            result.finish_reason = "stop"

    def _updating(self) -> ServerSink:
        if self._sink is None:
            raise ValueError("no weight update is under way; call begin_weight_update first")
        return self._sink


@contextmanager
def _rejections() -> Iterator[None]:
    """Raise ValueError for a request that the server rejects."""
    try:
        yield
    except Refused as error:
        if error.status in (400, 422):
            raise ValueError(str(error)) from error
        raise


def build_server(setup: EngineSetup) -> SglangServer:
    """The server process on this machine, with a reserved port. The server is not started yet."""
    config = AutoConfig.from_pretrained(setup.model_path).get_text_config()
    length = setup.max_context_len
    if length is not None:
        length = min(length + CONTEXT_MARGIN, max(config.max_position_embeddings, length))
    # if the folder has no weights, the trainer starts with random weights, and the first weight sync sends them
    load_format = setup.options.get("load_format") if has_weights(setup.model_path) else "dummy"

    def command(host: str, port: int) -> list[str]:
        return server_command(
            server_fields(setup, host=host, port=port, context_length=length, load_format=load_format)
        )

    environment = server_environment(server_fields(setup), setup.memory.unset)
    return SglangServer(command, setup.host, setup.log, environment=environment)


def connect(setup: EngineSetup, codec: Codec, address: ServerAddress, owner: Restartable | None) -> SglangEngine:
    """The engine that uses the server at ``address``."""
    return SglangEngine(Server.at(address), setup.model_path, codec, owner, adapter=setup.adapter is not None)


def external_servers(addresses: Sequence[str], model_path: str, transport: str) -> list[Server]:
    """The servers of ``--rollout-external-engine-addrs``. Each result has the ``tp_size`` that the server reports.
    ``transport``: the transport of weight updates to these servers.

    Raises:
        ValueError: a server does not answer, `check_model` refuses its model, or the server has a draft model that
            would get the policy's weights.
    """
    servers = []
    for address in addresses:
        url = (address if "://" in address else f"http://{address}").rstrip("/")
        try:
            server, model = (ask("GET", f"{url}/{path}", timeout_s=10.0) for path in ("server_info", "model_info"))
            width = int(server["tp_size"])
        except (HttpError, TypeError, LookupError, ValueError) as error:
            raise ValueError(
                f"--rollout-external-engine-addrs {address}: no SGLang server answers at this address ({error})"
            ) from error
        check_model(url, model, model_path)
        if transport == "disk" and server.get(DRAFTS):
            raise ValueError(f"{url} runs with --speculative-algorithm {server[DRAFTS]}: {NO_DRAFTS_BY_DISK}")
        servers.append(Server(url, width))
    return servers
