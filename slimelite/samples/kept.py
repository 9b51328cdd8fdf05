"""The token ids that top-p, top-k and min-p left of the vocabulary when an engine drew each token of a response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """What a trainer renormalises log-probs over.

    ``ids``: [sum of counts] int32, those of the first token, then those of the second, and so on. ``counts``: [tokens]
    int32; 0: the token was drawn from the whole vocabulary, or not drawn at all, such as a tool's.
    """

    ids: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[Sequence[int] | np.ndarray]) -> Kept:
        """From the ids of each token."""
        counts = np.array([len(row) for row in rows], np.int32)
        ids = np.concatenate([np.asarray(row, np.int32) for row in rows]) if len(rows) else np.zeros(0, np.int32)
        return cls(ids, counts)

    @classmethod
    def nothing(cls, tokens: int) -> Kept:
        """So many tokens without ids."""
        return cls(np.zeros(0, np.int32), np.zeros(tokens, np.int32))

    @property
    def offsets(self) -> np.ndarray:
        """[tokens + 1] int64, where the ids of each token begin, and the end."""
        return np.concatenate([[0], np.cumsum(self.counts, dtype=np.int64)])

    def rows(self) -> list[list[int]]:
        """The ids of each token."""
        ends = self.offsets.tolist()
        ids = self.ids.tolist()
        return [ids[begin:end] for begin, end in pairwise(ends)]

    def first(self, tokens: int) -> Kept:
        """Those of the first ``tokens``."""
        counts = self.counts[:tokens]
        return Kept(self.ids[: int(counts.sum())], counts)


def together(before: Kept | None, tokens: int, added: Kept | None, more: int) -> Kept | None:
    """The ids of ``tokens`` tokens and of ``more`` after them, of which either may have none; None if neither has."""
    if before is None and added is None:
        return None
    first, second = before or Kept.nothing(tokens), added or Kept.nothing(more)
    return Kept(np.concatenate([first.ids, second.ids]), np.concatenate([first.counts, second.counts]))
