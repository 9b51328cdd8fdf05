"""Attributes with a value for each token: kept as arrays of a few bytes a token, seen as the lists that plugins use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

# what an attribute holds: an engine gives arrays, and plugins and JSON give lists
PerToken = Sequence[object] | np.ndarray


class Listed:
    """An attribute that turns an array into a list when it is first read, and holds that list from then on.

    So ``sample.tokens += [5]`` and ``sample.loss_mask[0] = 0`` work as on any list, and a response that nobody looks at
    token by token never becomes Python objects, which take 32 bytes a token and more. `held` reads it as it is.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: object | None, kind: type) -> object:
        if owner is None:
            return None
        values = vars(owner)
        found = values[self._name]
        if isinstance(found, np.ndarray):
            found = values[self._name] = found.tolist()
        return found

    def __set__(self, owner: object, value: object) -> None:
        vars(owner)[self._name] = value


def listed(kind: type, names: Sequence[str]) -> None:
    """Make the fields ``names`` of the dataclass ``kind``, which has no slots, such attributes."""
    for name in names:
        setattr(kind, name, Listed(name))


def held(owner: object, name: str) -> Any:
    """The attribute ``name`` of ``owner`` as it is, array or list; None if there is none."""
    values = vars(owner)
    return values[name] if name in values else getattr(owner, name, None)


def joined(before: PerToken | None, added: PerToken) -> Any:
    """A new list of ``before`` and ``added``, or an array if ``added`` is one and ``before`` is one too or is empty."""
    if isinstance(added, np.ndarray) and (isinstance(before, np.ndarray) or not before):
        return np.concatenate([before, added]) if isinstance(before, np.ndarray) else added.copy()
    return [*_plain([] if before is None else before), *_plain(added)]


def _plain(values: PerToken) -> Sequence[object]:
    return values.tolist() if isinstance(values, np.ndarray) else values
