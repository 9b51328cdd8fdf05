"""The prediction of a GPU's step counts the kernels and bytes of a graph that can be counted by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts" / "lab"))
from predict_mfu import Cost, Recorder, at, cost


def test_connected_operators_are_one_kernel_when_compiled() -> None:
    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (((x * 2).relu() + 1) @ weight).exp()

    torch._dynamo.reset()
    record = Recorder()
    with torch.no_grad():
        record.compiled(function)(torch.ones(3, 5), torch.ones(5, 7))
    small, large, product = 4 * 15, 4 * 21, 2.0 * 3 * 5 * 7
    assert cost(record.graphs, fused=False) == Cost(product, 3 * 2 * small + 2 * large, 5)
    assert cost(record.graphs, fused=True) == Cost(product, 2 * small + 2 * large, 3)


def test_costs_grow_with_the_tokens() -> None:
    assert at(192, Cost(10, 100, 3), Cost(20, 150, 3)) == Cost(30, 200, 3)
