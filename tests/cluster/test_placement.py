"""Which bundle of the placement group a rank gets."""

from __future__ import annotations

from slimelite.cluster.ray_cluster import bundles_by_node


def test_ranks_of_a_node_are_neighbours_and_the_drivers_node_is_first() -> None:
    scattered = {0: "b", 1: "a", 2: "c", 3: "a", 4: "b", 5: "c"}
    assert bundles_by_node(scattered, first="c") == [2, 5, 1, 3, 0, 4]
    # a driver on a node without a bundle
    assert bundles_by_node(scattered, first="z") == [1, 3, 0, 4, 2, 5]
