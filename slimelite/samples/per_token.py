"""Attributes with a value for each token: kept as arrays of a few bytes a token, seen as the lists that plugins use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar, overload

import numpy as np

# what is read: list[int], list[float], or one of these or None
L = TypeVar("L")
# what an attribute holds: an engine gives arrays, and plugins and JSON give lists
PerToken = Sequence[Any] | np.ndarray


class Listed(Generic[L]):
    """An attribute that turns an array into a list when it is first read, and holds that list from then on.

    So ``sample.tokens += [5]`` and ``sample.loss_mask[0] = 0`` work as on any list, and a response that nobody looks at
    token by token never becomes Python objects, which take 32 bytes a token and more. ``vars(sample)`` has what it
    holds. ``default``: of the field of a dataclass.
    """

    def __init__(self, default: tuple[()] | None = None) -> None:
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, owner: None, kind: type) -> Any: ...
    @overload
    def __get__(self, owner: object, kind: type) -> L: ...
    def __get__(self, owner: object | None, kind: type) -> Any:
        if owner is None:
            return self._default
        values = vars(owner)
        value = values[self._name]
        if isinstance(value, np.ndarray):
            value = values[self._name] = value.tolist()
        return value

    def __set__(self, owner: object, value: PerToken | None) -> None:
        vars(owner)[self._name] = list(value) if isinstance(value, tuple) else value


def joined(before: PerToken | None, added: PerToken) -> PerToken:
    """A new list of ``before`` and ``added``, or an array if ``added`` is one and ``before`` is one too or is empty."""
    if isinstance(added, np.ndarray) and (isinstance(before, np.ndarray) or not before):
        return np.concatenate([before, added]) if isinstance(before, np.ndarray) else added.copy()
    return [*_plain([] if before is None else before), *_plain(added)]


def _plain(values: PerToken) -> Sequence[object]:
    return values.tolist() if isinstance(values, np.ndarray) else values
