"""Weight updates as SGLang 0.5.23 wants them: between two requests, and pickled of little but torch's own parts."""

from __future__ import annotations

import base64
import io
import json
import pickle
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch
from torch import Tensor

from slimelite.engines.protocol import WeightBucket
from slimelite.engines.sglang.control import Server
from slimelite.engines.sglang.weights import HttpSink, WeightSyncError

SHAPES = {"a": (2, 3), "b": (4,)}
# of what its unpickler admits, what weights need; it refuses numpy's arrays and torch.frombuffer
ADMITTED = {
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch.storage", "_load_from_bytes"),
    ("collections", "OrderedDict"),
    ("types", "SimpleNamespace"),
    ("torch", "Size"),
    ("torch", "float32"),
    ("torch", "bfloat16"),
}


class Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ADMITTED:
            raise pickle.UnpicklingError(f"Blocked unsafe global ({module}.{name})")
        return super().find_class(module, name)


class Bracketing(ThreadingHTTPServer):
    """Takes tensors between begin_weight_update and end_weight_update alone."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.open = self.paused = False
        self.full = 100  # updates that it takes before it fails
        self.version = "default"
        self.weights: dict[str, Tensor] = {}

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        match path.split("?")[0]:
            case "/begin_weight_update" if self.open:
                return 400, "a weight-update session is already open; call end_weight_update() first"
            case "/begin_weight_update":
                self.open = True
            case "/end_weight_update" | "/update_weights_from_tensor" if not self.open:
                return 400, "no weight-update session is open; call begin_weight_update() first"
            case "/end_weight_update":
                self.open = False
            case "/update_weights_from_tensor" if not self.full:
                return 400, "out of memory"
            case "/update_weights_from_tensor":
                self.full -= 1
                blob = base64.b64decode(body["serialized_named_tensors"][0])
                got = Unpickler(io.BytesIO(blob)).load()
                for m in got["metadata"]:
                    piece = got["flattened_tensor"][m.start_idx : m.end_idx]
                    self.weights[m.name] = piece.view(m.dtype).reshape(m.shape)
            case "/pause_generation":
                self.paused = True
            case "/continue_generation":
                self.paused = False
            case "/update_weight_version":
                self.version = body["new_version"]
        return 200, "{}"


class Handler(BaseHTTPRequestHandler):
    server: Bracketing

    def do_GET(self) -> None:
        self.reply(200, json.dumps({"paths": {"/begin_weight_update": {}}}))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.reply(*self.server.answer(self.path, json.loads(body)))

    def reply(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def bracketing() -> Iterator[Bracketing]:
    server = Bracketing()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def sink_of(server: Bracketing) -> HttpSink:
    return HttpSink([Server(f"http://127.0.0.1:{server.server_port}")], SHAPES)


def push(sink: HttpSink, version: int, weights: dict[str, Tensor]) -> None:
    sink.begin(version)
    for name, tensor in weights.items():
        sink.send(WeightBucket([name], [tuple(tensor.shape)], tensor.flatten()))
    sink.end()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_are_bracketed(bracketing: Bracketing, dtype: torch.dtype) -> None:
    sink = sink_of(bracketing)
    for version in (1, 2):
        weights = {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}
        push(sink, version, weights)
        assert all(torch.equal(bracketing.weights[name], tensor) for name, tensor in weights.items())
        assert (bracketing.version, bracketing.open, bracketing.paused) == (str(version), False, False)


def test_an_update_that_broke_off_is_repaired_by_the_next(bracketing: Bracketing) -> None:
    """Of the same run, which tries again, or of another one on the same server."""
    old, new = ({name: torch.full(shape, value) for name, shape in SHAPES.items()} for value in (1.0, 2.0))
    sink = sink_of(bracketing)
    for again in (sink, sink_of(bracketing)):
        push(sink, 1, old)
        bracketing.full = 1
        with pytest.raises(WeightSyncError, match="out of memory"):
            push(sink, 2, new)
        assert (bracketing.version, bracketing.open, bracketing.paused) == ("1", True, True)
        bracketing.full = 100
        push(again, 3, new)
        assert all(torch.equal(bracketing.weights[name], tensor) for name, tensor in new.items())
        assert (bracketing.version, bracketing.open, bracketing.paused) == ("3", False, False)
