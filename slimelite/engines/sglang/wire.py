"""Converts between the engine protocol and SGLang's ``/generate``: requests, answers, and weight updates."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np

from slimelite.engines.params import SamplingParams, names_at
from slimelite.engines.protocol import GenerateRequest, GenerateResult
from slimelite.samples.sample import CONSTRAINED, PerToken, kept_of, together

# number of tokens in one event of a stream
EVENT_TOKENS = 4
# These fields of a weight update protect a draft model, which would otherwise accept weights with the names of its own
# weights. SGLang 0.5.23 reads the first field, and SGLang 0.5.20 reads the second
TARGET = {"selector": "target", "disable_draft_model": True}


def version_of(stamp: str) -> int:
    """The weight version that a server reports as ``stamp``. The version is -1 for SGLang's "default", the stamp before
    the first update."""
    return int(stamp) if stamp.isdecimal() else -1


def request_body(
    request: GenerateRequest, done: GenerateResult, rid: str, eos: tuple[int, ...], seeds: bool
) -> dict[str, object]:
    """SGLang's JSON body that asks for the rest of the response to ``request``. ``done``: the tokens so far."""
    params = request.params.after(len(done.output_ids))
    own = {names[0]: getattr(params, field) for field, names in names_at("sglang").items()}
    sampling: dict[str, object] = {
        **{name: value for name, value in own.items() if value is not None},
        "stop": list(params.stop),
        "stop_token_ids": sorted({*params.stop_token_ids, *(() if params.ignore_eos else eos)}),
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
        # each event of a stream repeats all earlier tokens, so one event per token would send too much data
        "stream_interval": EVENT_TOKENS,
    }
    if params.tells and params.temperature == 0:
        sampling["top_k"] = 1
    elif not params.tells and params.top_k == 1 and params.temperature not in (0.0, 1.0):
        # if all running requests are greedy, SGLang reports log-probs without temperature. A top-p that keeps one token
        # is also greedy, but its log-probs always use the temperature
        sampling |= {"top_p": 1e-6, "top_k": -1}
    # SGLang's random stream depends on the position in the sequence, so a continued response also continues the stream
    if not seeds or params.seed is None:
        sampling.pop("sampling_seed", None)
    return {
        "rid": rid,
        "input_ids": [*request.input_ids, *done.output_ids],
        "sampling_params": sampling,
        "return_logprob": True,
        **({"return_sampling_mask": True} if params.tells else {}),
    }


def extend(result: GenerateResult, answer: dict[str, Any], params: SamplingParams) -> None:
    """Append the tokens of a ``/generate`` answer to ``result``. ``params``: the parameters of the request."""
    meta = answer["meta_info"]
    pairs = meta.get("output_token_logprobs") or []
    if not result.output_ids:
        result.cached_tokens = meta.get("cached_tokens", 0)
    log_probs: PerToken = [log_prob for log_prob, _, _ in pairs]
    kept = None
    if "output_token_sampling_mask" in meta:
        kept, log_probs = kept_of(meta, len(pairs), log_probs)
    result.kept = together(result.kept, result.length, kept, len(pairs))
    # SGLang does not report which tokens its grammar did not restrict, but slimelite's own fronts do
    if params.guided or params.shifts():
        known = np.zeros(result.length, np.bool_) if result.constrained is None else result.constrained
        new = np.array(meta.get(CONSTRAINED, [1] * len(pairs)), np.bool_)
        result.constrained = np.concatenate([known, new])
    result.output_ids += [token for _, token, _ in pairs]
    result.log_probs += list(log_probs)
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0}]
    for span, following in zip(spans, [*spans[1:], {"start": len(pairs)}], strict=True):
        result.weight_versions += [version_of(span["version"])] * (following["start"] - span["start"])
    if meta["finish_reason"] is not None:  # otherwise more tokens follow
        result.finish_reason = meta["finish_reason"]["type"]


def update_request(blobs: list[bytes]) -> bytes:
    """The JSON body with one pickle per rank. The request does not flush the cache, because `ServerSink.end` flushes it
    once for all requests."""
    # base64 needs no JSON escapes, and joining bytes makes one copy less per blob than json.dumps
    quoted = b",".join(b'"%b"' % base64.b64encode(blob) for blob in blobs)
    rest = json.dumps({"load_format": "flattened_bucket", "flush_cache": False, **TARGET}).encode()
    return b'{"serialized_named_tensors":[%b],%b' % (quoted, rest[1:])
