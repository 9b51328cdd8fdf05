"""Chooses the node of each rank and each engine of a run on Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slimelite.arguments import ClusterArgs
from slimelite.arguments.engines import EnginePlace


def beside_ranks(args: ClusterArgs, ranks: int, engines: Sequence[EnginePlace]) -> list[int]:
    """The devices that a run needs besides the ranks' devices, as a list of widths. A width is either the number of
    these devices that one engine uses, or 1 for a device that stays free."""
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
    the engines are placed, the widest first, each inside one node. ``widths``: the number of devices of each engine.

    Three ways are tried, until all engines fit: (1) Each engine is placed on the node with the most free devices. (2)
    Of the nodes with enough free devices, each engine is placed on the node with the fewest. (3) The ranks begin on a
    node other than ``first``, and the engines are placed as in (1) or (2).

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
    """See `nodes_of_bundles`. Of the nodes with enough free devices, each engine is placed on the node with the most
    (``spread``) or the fewest (not ``spread``)."""
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
