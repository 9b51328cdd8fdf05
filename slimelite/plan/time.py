"""Seconds of each phase of a rollout, by the rates of a device (roofline), and the operations that they are made of."""

from __future__ import annotations

from slimelite.plan.shapes import Shapes
from slimelite.training.model import ForwardFlops


def forward_flops(shapes: Shapes) -> ForwardFlops:
    """Operations of a forward pass; the same as are counted from the weights of a model."""
    matrices = shapes.layers * shapes.active
    return ForwardFlops(2.0 * matrices, 2.0 * shapes.head, 4.0 * shapes.layers * shapes.query)
