"""What the bodies of requests have in common: checked fields, sampling parameters, errors with a status."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

from slimelite.base.http_server import RequestError
from slimelite.base.text import is_text
from slimelite.engines.checks import is_number, is_whole
from slimelite.engines.protocol import SamplingParams

# most responses to one request
MOST_CHOICES = 128
# most alternatives of a token that a request may ask for
MOST_ALTERNATIVES = 20
LARGEST = 2**63


class Anything:
    """The values of a field that does not change the answer: all."""

    def __contains__(self, value: object) -> bool:
        return True


@dataclass(frozen=True)
class Kind:
    """A type of field in a request: what it is called in messages, and the test for it."""

    name: str
    holds: Callable[[object], bool]


NUMBER = Kind("a number", is_number)
WHOLE = Kind("an integer", lambda value: is_whole(value, -LARGEST, LARGEST))
COUNT = Kind("an integer of at least 1", lambda value: is_whole(value, 1, LARGEST))
SWITCH = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("text", is_text)
TEXTS = Kind("a text or a list of texts", lambda value: is_text(value) or _all(value, is_text))
IDS = Kind("a list of token ids", lambda value: _all(value, WHOLE.holds))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
OBJECTS = Kind("a list of objects", lambda value: _all(value, lambda one: isinstance(one, dict)))
CHOICES = Kind(f"an integer from 1 to {MOST_CHOICES}", lambda value: is_whole(value, 1, MOST_CHOICES))
ALTERNATIVES = Kind(f"an integer from 0 to {MOST_ALTERNATIVES}", lambda value: is_whole(value, 0, MOST_ALTERNATIVES))
ANYTHING = Kind("anything", lambda _: True)

# names of sampling parameters in requests of all dialects -> their type, and their name here
SAMPLING: dict[str, tuple[Kind, str]] = {
    "temperature": (NUMBER, "temperature"),
    "top_p": (NUMBER, "top_p"),
    "top_k": (WHOLE, "top_k"),
    "seed": (WHOLE, "seed"),
    "min_tokens": (WHOLE, "min_new_tokens"),
    "max_tokens": (COUNT, "max_new_tokens"),
    "max_completion_tokens": (COUNT, "max_new_tokens"),
    "stop": (TEXTS, "stop"),
    "stop_sequences": (TEXTS, "stop"),
    "stop_token_ids": (IDS, "stop_token_ids"),
    "ignore_eos": (SWITCH, "ignore_eos"),
}


def check_fields(
    body: Mapping[str, object], known: Mapping[str, Kind], neutral: Mapping[str, Container[object]]
) -> None:
    """Refuse fields that nobody reads, since the answer would not be what was asked for; null is no value.

    ``neutral``: fields that are read by nobody, and the values that ask for nothing.

    Raises:
        RequestError: a field is unknown, has another type, or asks for something that is not supported.
    """
    for name, value in body.items():
        if value is None:
            continue
        if name in known:
            if not known[name].holds(value):
                raise RequestError(f"{name} must be {known[name].name}, not {value!r:.60}", param=name)
        elif name not in neutral:
            raise RequestError(f"unknown parameter {name}", param=name, code="unknown_parameter")
        elif value not in neutral[name]:
            raise RequestError(f"{name}={value!r:.60} is not supported", param=name, code="unsupported_parameter")


def sampling(body: Mapping[str, object], defaults: SamplingParams) -> SamplingParams:
    """``defaults`` with the sampling parameters of a checked ``body``."""
    values: dict[str, Any] = {}
    for name, (_, field) in SAMPLING.items():
        if (value := body.get(name)) is not None:
            values[field] = value
    for field in ("stop", "stop_token_ids"):
        if field in values:
            values[field] = (values[field],) if isinstance(values[field], str) else tuple(values[field])
    return replace(defaults, **values)


def _all(values: object, holds: Callable[[object], bool]) -> bool:
    return isinstance(values, list) and all(holds(value) for value in values)
