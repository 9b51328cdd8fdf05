"""Words of the command line to typed values."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from slimelite.arguments.flags import Flag


def read_flag(flag: Flag, words: Sequence[str]) -> Any:
    """The value that ``words`` give to a flag other than a switch.

    Raises:
        ValueError: they do not fit the flag; the message does not repeat its name.
    """
    values = read_words(flag.kind, words, many=flag.many)
    if flag.choices:
        for value in values if flag.many else [values]:
            if value not in flag.choices:
                raise ValueError(f"is one of {', '.join(flag.choices)}, not {value!r}")
    if flag.kind is dict and not isinstance(values, dict):
        raise ValueError(f"takes a JSON object, not {words[0]!r}")
    return values


def read_yaml(flag: Flag, value: Any) -> Any:
    """The value that a YAML file gives to a flag.

    Raises:
        ValueError: it does not fit the flag; the message does not repeat its name.
    """
    if flag.kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"is true or false, not {value!r}")
        return value
    return [] if flag.many and value == [] else read_flag(flag, as_words(value))


def read_words(kind: type, words: Sequence[str], *, many: bool) -> Any:
    """``words`` as one value of ``kind``, or as a list of them; ``dict`` stands for any JSON.

    Raises:
        ValueError: wrong number or wrong kind of words.
    """
    if not words:
        raise ValueError("needs a value")
    if not many and len(words) > 1:
        raise ValueError(f"takes one value, not {len(words)}: {' '.join(words)}")
    values = [_read_word(kind, word) for word in words]
    return values if many else values[0]


def _read_word(kind: type, word: str) -> Any:
    if kind is str:
        return word
    if kind is dict:
        try:
            return json.loads(word)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"takes JSON, and {word!r:.200} is not: {error}") from None
    try:
        value = kind(word)
    except ValueError:
        raise ValueError(f"takes {'a whole number' if kind is int else 'a number'}, not {word!r}") from None
    if isinstance(value, float) and math.isnan(value):
        raise ValueError(f"takes a number, not {word}")
    return value


def as_words(value: Any) -> list[str]:
    """A value of a YAML file as the words that say the same on a command line; true is a switch, without words."""
    if value is True:
        return []
    if isinstance(value, dict):
        return [json.dumps(value, default=str)]
    if isinstance(value, list):
        return [word for item in value for word in as_words(item)]
    return [str(value)]
