"""Weight updates as SGLang 0.5.23 wants them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slimelite.engines.protocol import SyncSetup, WeightBucket, WeightSyncError
from slimelite.engines.sglang.server import Server
from slimelite.engines.sglang.sync import HttpSink, ServerSink
from tests.engines.bracketing import Bracketing, bracketing_server
from tests.engines.tiny_models import build_model


@pytest.fixture
def bracketing(tmp_path: Path) -> Iterator[Bracketing]:
    build_model(tmp_path)
    with bracketing_server() as server:
        server.model_path = str(tmp_path)
        yield server


def sink_of(server: Bracketing) -> ServerSink:
    return HttpSink(SyncSetup(server.model_path, "http", torch.device("cpu"), server.url)).to([Server(server.url)])


def push(sink: ServerSink, version: int, weights: dict[str, Tensor]) -> None:
    sink.begin(version)
    for name, tensor in weights.items():
        sink.send(WeightBucket([name], [tuple(tensor.shape)], tensor.flatten()))
    sink.end()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_are_bracketed(bracketing: Bracketing, dtype: torch.dtype) -> None:
    sink = sink_of(bracketing)
    for version in (1, 2):
        weights = {name: torch.randn(shape).to(dtype) for name, shape in sink.update.shapes.items()}
        push(sink, version, weights)
        assert all(torch.equal(bracketing.weights[name], tensor) for name, tensor in weights.items())
        assert (bracketing.version, bracketing.open, bracketing.paused) == (str(version), False, False)


def test_an_update_that_broke_off_is_repaired_by_the_next(bracketing: Bracketing) -> None:
    """Of the same run, which tries again, or of another one on the same server."""
    sink = sink_of(bracketing)
    shapes = sink.update.shapes
    old, new = ({name: torch.full(shape, value) for name, shape in shapes.items()} for value in (1.0, 2.0))
    for again in (sink, sink_of(bracketing)):
        push(sink, 1, old)
        bracketing.full = 1
        with pytest.raises(WeightSyncError, match="out of memory"):
            push(sink, 2, new)
        assert (bracketing.version, bracketing.open, bracketing.paused) == ("1", True, True)
        bracketing.full = 1000
        push(again, 3, new)
        assert all(torch.equal(bracketing.weights[name], tensor) for name, tensor in new.items())
        assert (bracketing.version, bracketing.open, bracketing.paused) == ("3", False, False)
