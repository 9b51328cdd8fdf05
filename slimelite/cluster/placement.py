"""Chooses the node of each rank and each engine of a run on Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slimelite.arguments import ClusterArgs
from slimelite.arguments.engines import EnginePlace


def beside_ranks(args: ClusterArgs, ranks: int, engines: Sequence[EnginePlace]) -> list[int]:
    """The widths [devices] of the units that need devices in addition to the ranks' devices. A unit is an engine, or
    one device that stays free beside the engines."""
    first, taken, widths = (0 if args.colocate else ranks), ranks, list[int]()
    for place in engines:
        begin, end = max(first + place.first_gpu, taken), first + place.first_gpu + place.width
        if end > taken:
            widths += [1] * (begin - taken) + [end - begin]
            taken = end
    total = max(ranks, first + args.rollout_num_gpus) if engines else ranks
    return widths + [1] * (total - taken)


def nodes_of_bundles(
    free: Mapping[str, int], *, first: str, nodes: int, ranks: int, widths: Sequence[int]
) -> list[str] | None:
    """The node of each rank, and then the node of each device of the engines. Returns None if the nodes have too few
    free devices.

    Ranks use exactly ``nodes`` nodes, with the same number of ranks on each. The ranks begin on node ``first``. Then
    the engines are placed, each inside one node. ``widths``: the number of devices of each engine. The widest engine is
    placed first, on the node with the most free devices. If some engines then do not fit, each engine is placed on the
    node with the fewest free devices that suffice. If some engines still do not fit, the ranks begin on a node other
    than ``first``.

    Args:
        free: node id -> number of free devices.
    """
    for front in (first, *sorted(free.keys() - {first})):
        for spread in (True, False):
            places = _placement(free, front, nodes, ranks // nodes, widths, spread=spread)
            if places is not None:
                return places
    return None


def _placement(
    free: Mapping[str, int], first: str, nodes: int, per_node: int, widths: Sequence[int], *, spread: bool
) -> list[str] | None:
    """See `nodes_of_bundles`. ``spread``: an engine takes the node with the most free devices. Without ``spread`` it
    takes the node with the smallest sufficient number of free devices."""
    left = dict(free)
    room = sorted((n for n in left if left[n] >= per_node), key=lambda n: (n != first, -left[n], n))[:nodes]
    if len(room) < nodes:
        return None
    places = [node for node in room for _ in range(per_node)]
    for node in places:
        left[node] -= 1
    of_engines = dict[int, str]()
    for number in sorted(range(len(widths)), key=lambda n: -widths[n]):
        enough = [node for node in left if left[node] >= widths[number]]
        if not enough:
            return None
        node = max(enough, key=lambda n: (left[n] if spread else -left[n], n == first, n))
        left[node] -= widths[number]
        of_engines[number] = node
    return places + [of_engines[number] for number, width in enumerate(widths) for _ in range(width)]
