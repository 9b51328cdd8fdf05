"""Serves SGLang's /generate and /abort_request for any engine, so that generate plugins can use HTTP.

The server in `slimelite.serving` is this server with more endpoints. This module also reads the sampling parameters
from the request bodies of every HTTP dialect.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import fields, replace
from typing import Any, ClassVar, TypeVar

import numpy as np
from aiohttp import web
from pydantic import Field

from slimelite.base.http_body import (
    Body,
    FirstError,
    Ids,
    Shape,
    Text,
    checked,
    document,
    read_body,
    unread,
    with_fields,
)
from slimelite.base.http_server import Answer, RequestError, Server, sse
from slimelite.engines.params import GRAMMARS, Place, SamplingParams, names_at
from slimelite.engines.protocol import Decode, GenerateRequest, GenerateResult
from slimelite.engines.sampling import Generating, Sampler, engine_sampler, news
from slimelite.samples.sample import CONSTRAINED

TEXTS = Text | FirstError[list[Text]]
# type of a parameter -> type of its field in a body
TYPES: dict[str, Any] = {
    "int": int,
    "int | None": int,
    "float": float,
    "bool": bool,
    "str | None": Text,
    "dict[str, float] | None": dict[str, float],
    "tuple[str, ...]": TEXTS,
    "tuple[int, ...]": Ids,
}
BOUNDS = {"at_least": "ge", "at_most": "le", "above": "gt"}


class SampledBody(Body):
    """A request body with sampling parameters, see `sampled`."""

    dialects: ClassVar[tuple[Place, ...]] = ()

    def params(self, defaults: SamplingParams) -> SamplingParams:
        """The sampling parameters of the body. A parameter that the body does not have is taken from ``defaults``."""
        values: dict[str, Any] = {}
        for dialect in self.dialects:
            for field, names in names_at(dialect).items():
                for name in names:
                    if (value := getattr(self, name)) is not None:
                        value = [value] if isinstance(value, str) and field == "stop" else value
                        values[field] = tuple(value) if isinstance(value, list) else value
        own = ((name, name, values[name]) for name in GRAMMARS if values.get(name) is not None)
        if grammars := [*own, *self.grammars()]:
            if len(grammars) > 1:
                named = " and ".join(name for name, _, _ in grammars)
                raise RequestError(f"{named}: a response can follow only one grammar; send only one of these fields")
            values |= {**dict.fromkeys(GRAMMARS), grammars[0][1]: grammars[0][2]}
        return replace(defaults, **values)

    def grammars(self) -> list[tuple[str, str, str]]:
        """The grammars in fields that only this dialect has, each as (name of the field, parameter, text)."""
        return []


S = TypeVar("S", bound=SampledBody)


def sampled(*dialects: Place) -> Callable[[type[S]], type[S]]:
    """Return a decorator that adds the sampling parameters of these dialects to a request body."""
    added: dict[str, tuple[Any, Any]] = {}
    for dialect in dialects:
        for f in fields(SamplingParams):
            bounds = f.metadata["bounds"] if "except_for" not in f.metadata["bounds"] else {}
            for name in names_at(dialect).get(f.name, ()):
                limits = {BOUNDS[bound]: value for bound, value in bounds.items()}
                added[name] = TYPES[str(f.type)], Field(None, description=f.metadata["help"] or None, **limits)

    def decorated(body: type[S]) -> type[S]:
        made = with_fields(added)(body)
        made.dialects = dialects
        return made

    return decorated


# largest request body: this many bytes per token of the context (text, or ids in decimal), plus BODY_BYTES
BODY_BYTES_PER_TOKEN = 16
BODY_BYTES = 1 << 20
HEALTH_TIMEOUT = 20.0  # seconds
# SGLang's defaults that differ from the defaults of `SamplingParams`
DEFAULTS = SamplingParams(128, skip_special_tokens=True)


@sampled("sglang")
@with_fields(
    unread(
        *("no_stop_trim", "spaces_between_special_tokens", "stream_interval"),
        n=1,
    )
)
class Sampling(SampledBody):
    """SGLang's ``sampling_params``."""

    max_new_tokens: int | None = Field(default=None, ge=0)


class GenerateBody(Shape):
    """The body of ``/generate``, with ``input_ids`` or ``text``. With ``max_new_tokens`` 0, the endpoint scores the
    prompt.

    ``return_sampling_mask``: if the request has top_p, top_k or min_p, return the ids that each token was drawn from.
    The log-probs of the sampled tokens are then over these ids. (In SGLang, ``output_token_logprobs`` stays over the
    whole vocabulary.)
    """

    rid: Text = ""
    input_ids: Ids | None = None
    text: Text | None = None
    sampling_params: Sampling = Sampling()
    stream: bool = False
    return_logprob: bool = False
    return_sampling_mask: bool = False
    logprob_start_len: int = -1
    input_logprob_temperature: float = 1.0


class AbortBody(Shape):
    """The body of ``/abort_request``, which ends the request ``rid`` or all requests."""

    rid: Text = ""
    abort_all: bool = False


def parse_sampling_params(fields: dict[str, Any]) -> SamplingParams:
    """Convert SGLang's ``sampling_params`` JSON to `SamplingParams`.

    Raises:
        ValueError: a parameter is not supported, or has the wrong type.
    """
    plain = {name: _as_json(value) for name, value in fields.items()}
    return checked(Sampling, plain).params(DEFAULTS)


def _as_json(value: object) -> object:
    """Convert a value of a plugin's dict to JSON. The value may be a tuple or a numpy value."""
    if isinstance(value, (tuple, np.ndarray)):
        value = list(value)
    if isinstance(value, list):
        return [_as_json(each) for each in value]
    return value.item() if isinstance(value, np.generic) else value


class GenerateServer(Server):
    """SGLang's endpoints in front of an engine.

    The text of a response keeps its stop string. slime requests this behaviour with ``no_stop_trim``.
    ``max_context_len`` limits the length of a request body.
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
        self._sampler = engine_sampler(engine)

    def _routes(self) -> list[web.RouteDef]:
        return [
            web.post("/generate", self._generate),
            web.post("/abort_request", self._abort),
            web.get("/health", self._health),
            web.get("/health_generate", self._health_generate),
            web.get("/get_model_info", self._model_info),
            web.get("/model_info", self._model_info),
            web.get("/openapi.json", self._schema),
        ]

    def _bodies(self) -> dict[str, type[Body]]:
        """The bodies of the endpoints, for the OpenAPI schema."""
        return {"/generate": GenerateBody, "/abort_request": AbortBody}

    async def _schema(self, _: web.Request) -> web.Response:
        return web.json_response(document(self._bodies()))

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        return await self._respond(http, await self._sampled(await read_body(http, GenerateBody), self._sampler))

    async def _sampled(self, body: GenerateBody, sample: Sampler) -> Answer:
        """The answer to a body of ``/generate``.

        Raises:
            ValueError: the request cannot be served.
        """
        ids = body.input_ids
        if ids is None:
            if self._encode is None or body.text is None:
                raise ValueError("send input_ids: one list of token ids (text needs an engine with an encode function)")
            ids = self._encode(body.text)
        input_ids, params = tuple(ids), body.sampling_params.params(DEFAULTS)
        if not params.max_new_tokens:
            return await self._score(body, input_ids)
        request_id = body.rid or uuid.uuid4().hex
        params = replace(params, kept=body.return_sampling_mask)
        request = GenerateRequest(request_id, input_ids, params, prefix_key=f"http-{hash(input_ids)}")
        if body.stream:
            return self._stream(body, request, sample)
        return self._reply(body, request, await sample(request, None), (await self._engine.info()).weight_version)

    async def _stream(self, body: GenerateBody, request: GenerateRequest, sample: Sampler) -> AsyncGenerator[bytes]:
        """SGLang's events. Each event has all tokens so far. The last event also has the finish reason."""
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
        body = await read_body(http, AbortBody)
        if not body.abort_all and not body.rid:
            raise ValueError("send rid, or abort_all=true")
        await self._engine.abort(None if body.abort_all else [body.rid])
        return web.Response()

    async def _health_generate(self, _: web.Request) -> web.Response:
        """Whether the engine generates a token within `HEALTH_TIMEOUT`."""
        params = SamplingParams(max_new_tokens=1, temperature=0.0)
        request = GenerateRequest(request_id=f"health-{uuid.uuid4().hex}", input_ids=(0,), params=params)
        try:
            await asyncio.wait_for(self._engine.generate([request]), HEALTH_TIMEOUT)
        except TimeoutError:
            return web.Response(status=503, text=f"the engine sampled no token within {HEALTH_TIMEOUT:.0f} s")
        return web.Response()

    async def _model_info(self, _: web.Request) -> web.Response:
        info = await self._engine.info()
        return web.json_response({"is_generation": True, "weight_version": str(info.weight_version), **info.extra})

    async def _score(self, body: GenerateBody, input_ids: tuple[int, ...]) -> dict[str, Any]:
        """Prompt log-probs, requested by ``max_new_tokens`` 0 with ``return_logprob`` and ``logprob_start_len``.

        As in SGLang, the first entry has no log-prob, and ``sampling_params.temperature`` has no effect. The logits are
        divided by ``input_logprob_temperature`` (sgl-project/sglang#36213; default 1). The reply repeats this
        temperature.
        """
        begin, temperature = body.logprob_start_len, body.input_logprob_temperature
        if not body.return_logprob or not 0 <= begin < len(input_ids) - 1:
            raise ValueError(
                "max_new_tokens 0 scores the prompt: send return_logprob=true and a logprob_start_len that leaves at "
                f"least two of the {len(input_ids)} input_ids, not {begin}"
            )
        info = await self._engine.info()
        if not info.scores:
            raise ValueError(f"the {info.name} engine cannot score prompts")
        log_probs = (await self._engine.score(input_ids, begin + 1, temperature)).log_probs
        request = GenerateRequest(body.rid or uuid.uuid4().hex, input_ids, SamplingParams(0))
        nothing = GenerateResult(request.request_id, [], [], [], "length")
        reply = self._reply(body, request, nothing, info.weight_version)
        reply["meta_info"] |= {
            "input_logprob_temperature": temperature,
            "input_token_logprobs": _entries([None, *log_probs], input_ids[begin:]),
        }
        return reply

    def _reply(
        self, body: GenerateBody, request: GenerateRequest, result: GenerateResult, version: int
    ) -> dict[str, Any]:
        """SGLang's JSON reply. ``version``: the current weight version, used if the response has no token."""
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
        if body.return_logprob:
            meta["output_token_logprobs"] = _entries(result.log_probs, result.output_ids)
        if body.return_sampling_mask and result.kept is not None:
            meta["output_token_sampling_mask"] = result.kept.rows()
            meta["output_token_sampling_logprobs"] = result.log_probs
        if result.constrained is not None:
            meta[CONSTRAINED] = result.constrained.astype(int).tolist()
        text = self._decode(result.output_ids) if self._decode and result.output_ids else ""
        return {"text": text, "output_ids": result.output_ids, "meta_info": meta}


def _entries(log_probs: Sequence[float | None], ids: Sequence[int]) -> list[list[float | int | None]]:
    """SGLang's log-prob entries: (log-prob, token id, no text)."""
    return [[log_prob, token, None] for log_prob, token in zip(log_probs, ids, strict=True)]


def _spans(versions: Sequence[int]) -> list[dict[str, object]]:
    """SGLang's ``weight_versions``: for each run of tokens of one version, the version and the first token's index."""
    starts = [i for i, version in enumerate(versions) if not i or version != versions[i - 1]]
    return [{"version": str(versions[start]), "start": start} for start in starts]
