"""Which node a rank and an engine get."""

from __future__ import annotations

import pytest

from slimelite.arguments import ClusterArgs
from slimelite.arguments.engines import EnginePlace
from slimelite.cluster.placement import beside_ranks, nodes_of_bundles

ROOM = {"a": 4, "b": 8, "c": 4}


def test_ranks_are_on_as_many_nodes_as_were_asked_for_the_drivers_in_front() -> None:
    assert nodes_of_bundles(ROOM, first="c", nodes=2, ranks=2, widths=()) == ["c", "b"]
    assert nodes_of_bundles(ROOM, first="c", nodes=3, ranks=6, widths=()) == ["c", "c", "b", "b", "a", "a"]
    # a driver on a node that has no room, or is none of these
    assert nodes_of_bundles(ROOM, first="a", nodes=1, ranks=8, widths=()) == ["b"] * 8
    assert nodes_of_bundles(ROOM, first="z", nodes=1, ranks=2, widths=()) == ["b", "b"]


def test_too_few_nodes_with_room_are_no_place_even_if_there_are_enough_devices() -> None:
    assert nodes_of_bundles({"a": 16}, first="a", nodes=2, ranks=2, widths=()) is None
    assert nodes_of_bundles(ROOM, first="a", nodes=2, ranks=10, widths=()) is None
    assert nodes_of_bundles(ROOM, first="a", nodes=3, ranks=12, widths=(2, 2, 1)) is None


def test_engines_are_spread_and_stay_within_a_node() -> None:
    assert nodes_of_bundles({"a": 4, "b": 4}, first="a", nodes=2, ranks=2, widths=(1, 1)) == ["a", "b", "a", "b"]
    # the wide one finds room, though a narrow one comes first in the order of the bundles
    assert nodes_of_bundles({"a": 4, "b": 3}, first="a", nodes=1, ranks=0, widths=(1, 4)) == ["b", *"aaaa"]
    assert nodes_of_bundles({"a": 3, "b": 3}, first="a", nodes=1, ranks=0, widths=(4,)) is None


@pytest.mark.parametrize(
    ("colocate", "gpus", "places", "widths"),
    [
        (False, 4, [(0, 2), (2, 2)], [2, 2]),
        (False, 6, [(0, 1), (3, 2)], [1, 1, 1, 2, 1]),  # the rest stays free
        (True, 2, [(0, 1), (1, 1)], []),
        (True, 4, [(0, 1), (1, 3)], [2]),  # more engines than ranks
        (False, 4, [], []),
    ],
)
def test_devices_beside_those_of_the_ranks(
    colocate: bool, gpus: int, places: list[tuple[int, int]], widths: list[int]
) -> None:
    args = ClusterArgs(colocate=colocate, rollout_num_gpus=gpus)
    assert beside_ranks(args, 2, [EnginePlace(first, width, {}) for first, width in places]) == widths


def test_what_fits_in_another_order_is_found() -> None:
    placed = nodes_of_bundles({"a": 8, "b": 4}, first="a", nodes=1, ranks=4, widths=(8,))
    assert placed == [*"bbbb", *"aaaaaaaa"], "an engine of 8 needs the driver's node"
    assert nodes_of_bundles({"a": 4, "b": 3}, first="a", nodes=1, ranks=0, widths=(3, 2, 2)) == [*"bbb", *"aaaa"]
