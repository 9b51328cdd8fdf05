"""Rows of the caches of transformers: take some rows out of a cache, or join several caches into the cache of one
batch.

A cache is an object of transformers, or a list of `LayerCache`. The tensors of a cache may be nested in layers, lists
or dictionaries. The first dimension of each tensor is the row. Keys and values have a column for each token, and the
newest tokens are in the last columns. States of linear attention, state-space layers and convolutions have no columns
for tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

# name of a tensor with a column for each token -> the dimension of its columns, counted from the end
COLUMNS = {"keys": 2, "values": 2, "indexer_keys": 2, "key_cache": 2, "value_cache": 2}
# attributes of a layer that count the tokens that the layer has processed
COUNTS = ("cumulative_length",)


class LayerCache:
    """The cache of a layer that slimelite computes with its own code. The attributes of such a cache are tensors."""


def with_rows(cache: Any, rows: Tensor, width: int | None = None) -> Any:
    """A copy of the cache that has only the ``rows`` [n], in this order. A row may appear twice.

    ``width``: the number of columns of the longest row. Only the last ``width`` columns remain, because the others are
    padding.
    """

    def taken(name: str, parts: Sequence[Any]) -> Any:
        (part,) = parts
        if not isinstance(part, Tensor):
            return part if width is None else min(part, width)
        if (back := COLUMNS.get(name)) is not None and width is not None:
            columns = min(part.shape[-back], width)
            part = part.narrow(-back, part.shape[-back] - columns, columns)
        return part.index_select(0, rows)

    return _combined([cache], taken)


def joined(caches: Sequence[Any]) -> Any:
    """One cache with the rows of all caches, in order. Caches with fewer columns get padding in front."""

    def join(name: str, parts: Sequence[Any]) -> Any:
        if not isinstance(parts[0], Tensor):
            return max(parts)
        if (back := COLUMNS.get(name)) is not None:
            columns = max(part.shape[-back] for part in parts)
            parts = [F.pad(part, (0, 0) * (back - 1) + (columns - part.shape[-back], 0)) for part in parts]
        return torch.cat(list(parts))

    return caches[0] if len(caches) == 1 else _combined(caches, join)


def begun(cache: Any, columns: int) -> Any:
    """A copy of a cache with only its first ``columns`` columns. `is_cut` must be true for the cache."""

    def cut(name: str, parts: Sequence[Any]) -> Any:
        (part,) = parts
        return part.narrow(-COLUMNS[name], 0, columns).clone() if isinstance(part, Tensor) else part

    return _combined([cache], cut)


def is_cut(cache: Any, width: int) -> bool:
    """Whether a cache of ``width`` tokens can be cut after any token. This is possible if every tensor in the cache has
    a column for each token."""
    return all(name in COLUMNS and part.shape[-COLUMNS[name]] == width for name, part in tensors(cache))


def token_bytes(cache: Any, tokens: int) -> tuple[int, int]:
    """(bytes for each token, bytes for each row), measured on ``cache``. ``cache`` has one row of ``tokens`` tokens."""
    sizes = [(name in COLUMNS, part.numel() * part.element_size()) for name, part in tensors(cache)]
    return sum(size for grows, size in sizes if grows) // tokens, sum(size for grows, size in sizes if not grows)


def tensors(cache: Any) -> Iterator[tuple[str, Tensor]]:
    """(name of the attribute, tensor) for each tensor that has rows."""
    seen: list[tuple[str, Tensor]] = []

    def note(name: str, parts: Sequence[Any]) -> Any:
        if isinstance(parts[0], Tensor):
            seen.append((name, parts[0]))
        return parts[0]

    _combined([cache], note)
    return iter(seen)


def _combined(parts: Sequence[Any], leaf: Callable[[str, Sequence[Any]], Any], name: str = "") -> Any:
    """A copy of the structure of ``parts``. ``leaf`` computes each tensor and each count from the tensors and counts of
    the parts."""
    first = parts[0]
    if isinstance(first, Tensor):
        return leaf(name, parts) if first.ndim > 1 else first
    if name in COUNTS and isinstance(first, int):
        return leaf(name, parts)
    if isinstance(first, list | tuple):
        return type(first)([_combined(group, leaf, name) for group in zip(*parts, strict=True)])
    if isinstance(first, dict):
        return {key: _combined([part[key] for part in parts], leaf, name) for key in first}
    is_theirs = type(first).__module__.startswith("transformers.") and not isinstance(first, PretrainedConfig | type)
    if is_theirs or isinstance(first, LayerCache):
        twin = copy.copy(first)
        for field in vars(first):
            setattr(twin, field, _combined([vars(part)[field] for part in parts], leaf, field))
        return twin
    return first
