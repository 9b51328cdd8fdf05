"""Checks that every engine makes of requests, of stop strings, and of the weights in an update."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeGuard

import numpy as np

from slimelite.base.files import is_text
from slimelite.engines.protocol import Decode, GenerateRequest, SamplingParams
from slimelite.models.files import as_filed, load_config, saved_buffers

# logits divided by a lower temperature would overflow fp32; temperature 0 means greedy decoding
LOWEST_TEMPERATURE = 1e-6
LARGEST = 1e30
MOST_STOPS = 256
MOST_BIASES = 1024
INT32 = 2**31


def check_request(request: GenerateRequest, vocab_size: int, max_context_len: int) -> None:
    """Refuse a request that can never be served. Inside a batch, the failure of such a request would end the other
    requests too.

    Raises:
        ValueError: the request has tokens outside the vocabulary, no prompt, parameters of a wrong type or out of
            range, or more tokens than the context holds.
    """
    params, name, ids = request.params, f"request {request.request_id}", request.input_ids
    if not isinstance(request.request_id, str) or not request.request_id:
        raise ValueError(f"{name}: the request id must be text")
    check_tokens(ids, vocab_size, name)
    if not is_whole(request.position, 0, len(ids) - 1):
        raise ValueError(f"{name}: position must be from 0 to {len(ids) - 1}, not {request.position!r}")
    for problem in _problems(params, vocab_size):
        raise ValueError(f"{name}: {problem}")
    if len(ids) + params.max_new_tokens > max_context_len:
        raise ValueError(
            f"{name}: {len(ids)} input tokens and max_new_tokens {params.max_new_tokens} exceed the engine's "
            f"context of {max_context_len} tokens; shorten either, or raise --rollout-max-context-len"
        )


def check_tokens(ids: Sequence[int], vocab_size: int, name: str) -> None:
    """Check that ``ids`` is one sequence of the model's tokens.

    Raises:
        ValueError: ``ids`` is not such a sequence; the message begins with ``name``.
    """
    try:
        array = np.asarray(ids)
    except (ValueError, OverflowError):  # raised for lists of different lengths, and for numbers with more than 64 bits
        array = np.zeros(0)
    if array.ndim != 1 or array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= vocab_size:
        raise ValueError(f"{name}: input_ids must be tokens of the model: one or more ids from 0 to {vocab_size - 1}")


def check_score(
    input_ids: Sequence[int], start: int, temperature: float, top: int, vocab_size: int, max_context_len: int
) -> None:
    """Refuse what `Engine.score` cannot compute.

    Raises:
        ValueError: see `Engine.score`.
    """
    check_tokens(input_ids, vocab_size, "score")
    if not is_temperature(temperature, greedy=False):
        raise ValueError(f"score: temperature must be at least {LOWEST_TEMPERATURE:g}, not {temperature!r:.60}")
    if not is_whole(start, 1, len(input_ids) - 1):
        raise ValueError(f"score: start must be from 1 to {len(input_ids) - 1} for these input_ids, not {start!r:.60}")
    if not is_whole(top, 0, vocab_size):
        raise ValueError(f"score: top must be from 0 to {vocab_size} tokens, not {top!r:.60}")
    if len(input_ids) > max_context_len:
        raise ValueError(f"score: {len(input_ids)} tokens exceed the engine's context of {max_context_len}")


def is_whole(value: object, low: int, high: int) -> bool:
    """Whether ``value`` is an integer from ``low`` to ``high``."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and low <= int(value) <= high


def is_number(value: object) -> TypeGuard[float]:
    """Whether ``value`` is a finite number within the range of fp32."""
    if not isinstance(value, int | float | np.integer | np.floating) or isinstance(value, bool):
        return False
    return bool(-LARGEST <= value <= LARGEST)


def is_temperature(value: object, *, greedy: bool) -> bool:
    """Whether logits can be divided by ``value``. With ``greedy``, 0 is a valid temperature too."""
    return is_number(value) and (value >= LOWEST_TEMPERATURE or (greedy and value == 0))


def _problems(params: SamplingParams, vocab_size: int) -> Iterator[str]:
    if not is_whole(params.max_new_tokens, 1, INT32):
        yield f"max_new_tokens must be an integer of at least 1, not {params.max_new_tokens!r:.60}"
    if not is_whole(params.min_new_tokens, 0, params.max_new_tokens):
        yield f"min_new_tokens must be an integer from 0 to max_new_tokens, not {params.min_new_tokens!r:.60}"
    if not is_temperature(params.temperature, greedy=True):
        yield f"temperature must be 0, or at least {LOWEST_TEMPERATURE:g} and finite, not {params.temperature!r:.60}"
    if not is_number(params.top_p) or not 0 < params.top_p <= 1:
        yield f"top_p must be above 0 and at most 1, not {params.top_p!r:.60}"
    if not is_whole(params.top_k, -1, INT32):
        yield f"top_k must be an integer, -1 for all tokens, not {params.top_k!r:.60}"
    if not is_number(params.min_p) or not 0 <= params.min_p <= 1:
        yield f"min_p must be from 0 to 1, not {params.min_p!r:.60}"
    if not is_number(params.repetition_penalty) or not 0 < params.repetition_penalty <= 2:
        yield f"repetition_penalty must be above 0 and at most 2, not {params.repetition_penalty!r:.60}"
    for name in ("presence_penalty", "frequency_penalty"):
        if not is_number(value := getattr(params, name)) or not -2 <= value <= 2:
            yield f"{name} must be from -2 to 2, not {value!r:.60}"
    bias = params.logit_bias or {}
    if (
        not isinstance(bias, dict)
        or len(bias) > MOST_BIASES
        or not all(
            str(token).isdecimal() and int(token) < vocab_size and is_number(value) and abs(value) <= 100
            for token, value in bias.items()
        )
    ):
        yield f"logit_bias must map at most {MOST_BIASES} of the model's token ids to numbers from -100 to 100"
    if params.seed is not None and not is_whole(params.seed, -(2**63), 2**64):
        yield f"the seed (sampling_seed) must be an integer, not {params.seed!r:.60}"
    for switch in ("ignore_eos", "skip_special_tokens"):
        if not isinstance(getattr(params, switch), bool):
            yield f"{switch} must be true or false, not {getattr(params, switch)!r:.60}"
    if not all(is_text(stop) and stop for stop in params.stop) or len(params.stop) > MOST_STOPS:
        yield f"stop must be at most {MOST_STOPS} texts that are not empty, got {params.stop!r:.60}"
    ids = params.stop_token_ids
    if not all(is_whole(token, -INT32, INT32) for token in ids) or len(ids) > MOST_STOPS:
        yield f"stop_token_ids must be at most {MOST_STOPS} token ids, not {ids!r:.60}"


def check_ids(requests: Sequence[GenerateRequest], taken: Collection[str]) -> None:
    """Raise ValueError when two requests of a call share an id, or a request has the id of a running request."""
    ids = [request.request_id for request in requests]
    for index, request_id in enumerate(ids):
        if request_id in taken or request_id in ids[:index]:
            raise ValueError(f"request id {request_id} is already used by another request; ids must be unique")


def holds_stop(decode: Decode, response: Sequence[int] | np.ndarray, stops: Sequence[str]) -> bool:
    """Whether the last tokens of ``response`` contain one of ``stops``. If the response continues an earlier response,
    pass the tokens of both responses.

    The check runs after every token, so it decodes no more tokens than the longest stop string can have.
    """
    # a token has at least one byte, so a stop string has no more tokens than bytes. One more token is decoded in front,
    # because a decoder may treat the start of a text differently
    tail = max(len(stop.encode()) for stop in stops) + 1
    text = decode(np.asarray(response[-tail:]).tolist())
    return any(stop in text for stop in stops)


def model_shapes(model_path: str) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in the files of the model at ``model_path``. Buffers such as the biases of routers
    are included, and tied weights appear once.
    """
    import torch  # the HTTP fronts check requests without torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(model_path))
        filed = as_filed(model, {**dict(model.named_parameters()), **saved_buffers(model)})
    return {name: tuple(weight.shape) for name, weight in filed.items()}


class WeightUpdate:
    """Checks that the weights of an update have the model's names and shapes, and that no weight is missing at the end.

    ``shapes`` has the shape of each weight by name. ``aliases`` maps the second name of a tied weight to its first
    name, for example ``lm_head.weight`` to ``model.embed_tokens.weight``. ``version`` is the version of the current
    update, or None. ``received`` has the names that this update has brought so far. ``complete`` is true after an
    update has brought every weight. After such an update, later updates may bring only the changed weights.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], aliases: Mapping[str, str] | None = None) -> None:
        self.shapes = shapes
        self.aliases = aliases or {}
        self.version: int | None = None
        self.received: set[str] = set()
        self.complete = False
        self._awaited: frozenset[str] = frozenset(shapes)

    def begin(self, version: int, changed: Collection[str] | None = None) -> bool:
        """Start the update to ``version``, and forget the weights of an unfinished update; see
        `Engine.begin_weight_update`.
        """
        self.version = version
        self.received.clear()
        partial = changed is not None and self.complete
        self._awaited = frozenset(self.aliases.get(n, n) for n in changed or ()) if partial else frozenset(self.shapes)
        return partial

    @contextmanager
    def taking(self, weights: Iterable[tuple[str, Sequence[int]]]) -> Iterator[None]:
        """A context in which the caller copies ``weights``, (name, shape) pairs. They are checked when the context
        begins. When the context ends without an error, they are marked as received.

        Raises:
            ValueError: no update is under way, the model has no weight of that name, or its shape differs.
        """
        if self.version is None:
            raise ValueError("no weight update is under way; call begin_weight_update first")
        names = []
        for name, shape in weights:
            name = self.aliases.get(name, name)
            if name not in self.shapes:
                raise ValueError(f"{name} is not a weight of the model that the engine was started with")
            if tuple(shape) != self.shapes[name]:
                raise ValueError(f"{name} was sent with shape {tuple(shape)}, but the model needs {self.shapes[name]}")
            names.append(name)
        yield
        self.received.update(names)

    def missing(self) -> list[str]:
        """Names of the weights of this update that were not received yet."""
        return [name for name in self.shapes if name in self._awaited and name not in self.received]

    def whole(self) -> int:
        """The version of the current update, if all its weights have arrived. Call `end` afterwards.

        Raises:
            ValueError: no update is under way, or weights are missing. If weights are missing, the update stays open.
        """
        if self.version is None:
            raise ValueError("no weight update is under way; call begin_weight_update first")
        if missing := self.missing():
            names = ", ".join(missing[:4]) + (", …" if len(missing) > 4 else "")
            raise ValueError(
                f"weight version {self.version} lacks {len(missing)} weights ({names}); send them, then call "
                "end_weight_update again"
            )
        return self.version

    def end(self) -> None:
        """Finish the update. Raises the same errors as `whole`."""
        self.whole()
        self.complete = self.complete or len(self._awaited) == len(self.shapes)
        self.version = None
