"""Bin packing, which packs samples into micro-batches, and documents into sequences."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable


def best_fit(sizes: Iterable[int], capacity: int) -> list[list[int]]:
    """Pack pieces into bins. Returns the indices of the pieces in each bin.

    A piece goes into the bin where it leaves the least free space, or into a new bin if it fits nowhere. Pieces are
    taken in the given order. If the pieces are sorted from the largest to the smallest, the method is best-fit
    decreasing. A piece that is larger than ``capacity`` gets its own bin.
    """
    bins: list[list[int]] = []
    # the bins with free space, sorted by their free space
    room: list[tuple[int, int]] = []
    for piece, size in enumerate(sizes):
        at = bisect_left(room, (size, -1))
        if at < len(room):
            left, number = room.pop(at)
            bins[number].append(piece)
        else:
            left, number = capacity, len(bins)
            bins.append([piece])
        if left - size > 0:
            insort(room, (left - size, number))
    return bins
