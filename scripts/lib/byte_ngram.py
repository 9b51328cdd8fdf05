"""A Kneser–Ney n-gram model of bytes. A neural language model should beat it.

It is interpolated, with one absolute discount for each order, n1 / (n1 + 2 n2) of its counts (Ney, Essen and Kneser
1994; Chen and Goodman 1999, section 2.7). The highest order counts occurrences. The other orders count the different
bytes that come before an n-gram.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

END = 0  # the byte that ends a document; texts with NUL are no documents
BITS = 8


class ByteNgram:
    """A model that is fitted on ``texts``. ``order``: bytes, including the predicted one, at most 7."""

    def __init__(self, texts: Sequence[bytes], order: int = 5) -> None:
        if not 1 <= order <= 7:
            raise ValueError(f"order {order}: an n-gram here has 1 to 7 bytes")
        self.order = order
        self._levels: list[_Level] = []
        grams, counts = np.unique(_grams(texts, order), return_counts=True)
        for length in range(order, 0, -1):
            self._levels.append(_Level(grams, counts))
            # the bytes that stand before a shorter one: as many as there are longer ones that end with it
            grams, counts = np.unique(grams & np.uint64((1 << BITS * (length - 1)) - 1), return_counts=True)
        self._levels.reverse()

    def probabilities(self, grams: np.ndarray) -> np.ndarray:
        """p(last byte | the bytes before it) of each of ``grams`` (uint64; the last byte is the lowest)."""
        result = np.full(len(grams), 1 / 256)
        for length, level in enumerate(self._levels, 1):
            result = level.interpolated(grams & np.uint64((1 << BITS * length) - 1), result)
        return result

    def bits(self, texts: Sequence[bytes]) -> float:
        """-log2 p of ``texts``, each with its end. At most 2^20 n-grams are computed at once."""
        grams = _grams(texts, self.order)
        parts = [grams[at : at + 2**20] for at in range(0, len(grams), 2**20)]
        return float(sum(-np.log2(self.probabilities(part)).sum() for part in parts))


class _Level:
    """Counts of n-grams of one length, and of their contexts."""

    def __init__(self, grams: np.ndarray, counts: np.ndarray) -> None:
        once, twice = int((counts == 1).sum()), int((counts == 2).sum())
        self._discount = once / (once + 2 * twice) if once else 0.5  # never 0: the lower order needs a part
        self._grams, self._counts = grams, counts
        self._contexts, first = np.unique(grams >> np.uint64(BITS), return_index=True)
        self._totals = np.add.reduceat(counts, first)  # grams are sorted, and so are their contexts
        self._followers = np.diff(np.append(first, len(grams)))

    def interpolated(self, grams: np.ndarray, lower: np.ndarray) -> np.ndarray:
        """p of ``grams``, given the p of the same n-grams without their first byte."""
        count = _found(self._grams, self._counts, grams)
        contexts = grams >> np.uint64(BITS)
        total, followers = (_found(self._contexts, each, contexts) for each in (self._totals, self._followers))
        known = np.maximum(total, 1)
        p = (np.maximum(count - self._discount, 0) + self._discount * followers * lower) / known
        return np.where(total > 0, p, lower)


def _found(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The value of each of ``wanted`` among sorted ``keys``; 0 if it is missing."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)


def _grams(texts: Sequence[bytes], order: int) -> np.ndarray:
    """For each byte of each text, and for its end: the byte and those before it, as one number. A text begins after
    ENDs."""
    several = []
    for text in texts:
        data = np.frombuffer(bytes(order - 1) + text + bytes([END]), np.uint8).astype(np.uint64)
        grams = np.zeros(len(text) + 1, np.uint64)
        for number in range(order):
            grams = (grams << np.uint64(BITS)) | data[number : number + len(text) + 1]
        several.append(grams)
    return np.concatenate(several)
