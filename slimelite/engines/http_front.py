"""Serves SGLang's /generate and /abort_request for any engine, so that generate plugins can use HTTP.

The front of `slimelite.serving` is the same server with more endpoints.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from aiohttp import web

from slimelite.base.http_server import Answer, Server, read_json, sse
from slimelite.base.text import is_text
from slimelite.engines.protocol import Decode, GenerateRequest, GenerateResult, SamplingParams
from slimelite.engines.sampling import Generating, Sampler, engine_sampler, news

# largest request body: this many bytes per token of the context (text, or ids in decimal), plus BODY_BYTES
BODY_BYTES_PER_TOKEN = 16
BODY_BYTES = 1 << 20
HEALTH_TIMEOUT = 20.0  # seconds
# the supported sampling parameters under SGLang's names, with SGLang's defaults
DEFAULTS: dict[str, Any] = {
    "max_new_tokens": 128,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_new_tokens": 0,
    "stop": None,
    "stop_token_ids": None,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "sampling_seed": None,
}
# IGNORED do not change the tokens; NEUTRAL are accepted only with the value that switches them off
IGNORED = {"no_stop_trim", "spaces_between_special_tokens", "stream_interval"}
NEUTRAL: dict[str, float] = {
    "n": 1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}


def parse_sampling_params(given: dict[str, Any]) -> SamplingParams:
    """Convert SGLang's ``sampling_params`` JSON to `SamplingParams`.

    Raises:
        ValueError: a parameter is not supported, or ``stop`` or ``stop_token_ids`` is not a list.
    """
    for name, value in given.items():
        known = name in DEFAULTS or name in IGNORED
        if not known and value is not None and NEUTRAL.get(name) != value:
            raise ValueError(f"sampling parameter {name}={value!r} is not supported; use --rollout-backend sglang")
    values = {name: default if given.get(name) is None else given[name] for name, default in DEFAULTS.items()}
    stop, ids = values.pop("stop") or (), values.pop("stop_token_ids") or ()
    for name, value, kinds in (("stop", stop, list | tuple | str), ("stop_token_ids", ids, list | tuple)):
        if not isinstance(value, kinds):
            raise ValueError(f"sampling parameter {name} must be a list, not {value!r:.60}")
    return SamplingParams(
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(ids),
        seed=values.pop("sampling_seed"),
        **values,
    )


class GenerateServer(Server):
    """SGLang's endpoints over an engine.

    The text of a response keeps its stop string; slime requests that with ``no_stop_trim``. ``max_context_len`` limits
    the length of a body.
    """

    def __init__(
        self,
        engine: Generating,
        encode: Callable[[str], list[int]] | None,
        decode: Decode | None,
        max_context_len: int,
        host: str = "127.0.0.1",
        port: int = 0,
        key: str | None = None,
    ) -> None:
        super().__init__(BODY_BYTES + BODY_BYTES_PER_TOKEN * max_context_len, host, port, key)
        self._engine, self._encode, self._decode = engine, encode, decode

    def _routes(self) -> list[web.RouteDef]:
        return [
            web.post("/generate", self._generate),
            web.post("/abort_request", self._abort),
            web.get("/health", self._health),
            web.get("/health_generate", self._health_generate),
            web.get("/get_model_info", self._model_info),
            web.get("/model_info", self._model_info),
        ]

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        return await self._respond(http, await self._sampled(await read_json(http), engine_sampler(self._engine)))

    async def _sampled(self, body: dict[str, Any], sample: Sampler) -> Answer:
        """The answer to a body of ``/generate``.

        Raises:
            ValueError: the request cannot be served.
        """
        check_types(body, {"rid": str, "sampling_params": dict, "stream": bool, "return_logprob": bool})
        ids = body.get("input_ids")
        if ids is None:
            if self._encode is None or not is_text(body.get("text")):
                raise ValueError("send input_ids: one list of token ids (text needs an engine with an encode function)")
            ids = self._encode(body["text"])
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise ValueError("input_ids must be one list of token ids; send a request for each prompt")
        input_ids = tuple(ids)
        params = body.get("sampling_params") or {}
        if params.get("max_new_tokens") == 0:
            return await self._score(body, input_ids)
        request = GenerateRequest(
            request_id=body.get("rid") or uuid.uuid4().hex,
            input_ids=input_ids,
            params=parse_sampling_params(params),
            prefix_key=f"http-{hash(input_ids)}",
        )
        if body.get("stream"):
            return self._stream(body, request, sample)
        return self._reply(body, request, await sample(request, None), (await self._engine.info()).weight_version)

    async def _stream(
        self, body: dict[str, object], request: GenerateRequest, sample: Sampler
    ) -> AsyncGenerator[bytes]:
        """SGLang's events: each has all tokens so far, and the last one the reason of the end."""
        version = (await self._engine.info()).weight_version
        ids: list[int] = []
        log_probs: list[float] = []
        async with aclosing(news([lambda on_tokens: sample(request, on_tokens)], stream=True)) as coming:
            async for new in coming:
                ids, log_probs = [*ids, *new.ids], [*log_probs, *new.log_probs]
                result = new.result or GenerateResult(request.request_id, ids, log_probs, [], "abort")
                reply = self._reply(body, request, result, version)
                if new.result is None:
                    reply["text"] = reply["text"].rstrip("\ufffd")  # an unfinished character
                    reply["meta_info"]["finish_reason"] = None
                yield sse(reply)
        yield sse("[DONE]")

    async def _abort(self, http: web.Request) -> web.Response:
        body = await read_json(http)
        check_types(body, {"rid": str, "abort_all": bool})
        if not body.get("abort_all") and not body.get("rid"):
            raise ValueError("send rid, or abort_all=true")
        await self._engine.abort(None if body.get("abort_all") else [body["rid"]])
        return web.Response()

    async def _health_generate(self, _: web.Request) -> web.Response:
        """Whether the engine generates a token within `HEALTH_TIMEOUT`."""
        params = SamplingParams(max_new_tokens=1, temperature=0.0)
        request = GenerateRequest(request_id=f"health-{uuid.uuid4().hex}", input_ids=(0,), params=params)
        try:
            await asyncio.wait_for(self._engine.generate([request]), HEALTH_TIMEOUT)
        except TimeoutError:
            return web.Response(status=503, text=f"no token within {HEALTH_TIMEOUT:.0f} s")
        return web.Response()

    async def _model_info(self, _: web.Request) -> web.Response:
        info = await self._engine.info()
        return web.json_response({"is_generation": True, "weight_version": str(info.weight_version), **info.extra})

    async def _score(self, body: dict[str, Any], input_ids: tuple[int, ...]) -> dict[str, Any]:
        """Prompt log-probs, requested by ``max_new_tokens`` 0 with ``return_logprob`` and ``logprob_start_len``.

        As in SGLang the first entry has no log-prob, and ``sampling_params.temperature`` has no effect: the logits are
        divided by ``input_logprob_temperature`` (sgl-project/sglang#36213; default 1), which the reply repeats.
        """
        begin = body.get("logprob_start_len", -1)
        if not body.get("return_logprob") or type(begin) is not int or not 0 <= begin < len(input_ids) - 1:
            raise ValueError(
                "max_new_tokens 0 scores the prompt: send return_logprob=true and a logprob_start_len that leaves at "
                f"least two of the {len(input_ids)} input_ids, not {begin!r:.60}"
            )
        temperature = body.get("input_logprob_temperature", 1.0)
        info = await self._engine.info()
        if not info.scores:
            raise ValueError(f"the {info.name} engine scores no prompts")
        log_probs = (await self._engine.score(input_ids, begin + 1, temperature)).log_probs
        request = GenerateRequest(body.get("rid") or uuid.uuid4().hex, input_ids, SamplingParams(0))
        nothing = GenerateResult(request.request_id, [], [], [], "length")
        reply = self._reply(body, request, nothing, info.weight_version)
        reply["meta_info"] |= {
            "input_logprob_temperature": temperature,
            "input_token_logprobs": _entries([None, *log_probs], input_ids[begin:]),
        }
        return reply

    def _reply(
        self, body: dict[str, Any], request: GenerateRequest, result: GenerateResult, version: int
    ) -> dict[str, Any]:
        """SGLang's JSON reply; ``version``: the current weight version, used if there is no token."""
        reason: dict[str, object] = {"type": result.finish_reason}
        if result.finish_reason == "length":
            reason["length"] = len(result.output_ids)
        meta = {
            "id": request.request_id,
            "finish_reason": reason,
            "prompt_tokens": len(request.input_ids),
            "completion_tokens": len(result.output_ids),
            "cached_tokens": result.cached_tokens,
            # the version of the last token, as a string like SGLang's
            "weight_version": str(result.weight_versions[-1] if result.weight_versions else version),
            "weight_versions": _spans(result.weight_versions),
        }
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = _entries(result.log_probs, result.output_ids)
        text = self._decode(result.output_ids) if self._decode and result.output_ids else ""
        return {"text": text, "output_ids": result.output_ids, "meta_info": meta}


def _entries(log_probs: Sequence[float | None], ids: Sequence[int]) -> list[list[float | int | None]]:
    """SGLang's log-prob entries: (log-prob, token id, no text)."""
    return [[log_prob, token, None] for log_prob, token in zip(log_probs, ids, strict=True)]


def _spans(versions: Sequence[int]) -> list[dict[str, object]]:
    """SGLang's ``weight_versions``: for each run of tokens of one version, the version and the first token's index."""
    starts = [i for i, version in enumerate(versions) if not i or version != versions[i - 1]]
    return [{"version": str(versions[start]), "start": start} for start in starts]


def check_types(body: dict[str, object], kinds: dict[str, type]) -> None:
    """``kinds``: field name -> type, for fields that may also be absent or null.

    Raises:
        ValueError: a field has another type.
    """
    for name, kind in kinds.items():
        value = body.get(name)
        if value is not None and not (is_text(value) if kind is str else isinstance(value, kind)):
            raise ValueError(f"{name} must be of type {kind.__name__}, not {value!r:.60}")
