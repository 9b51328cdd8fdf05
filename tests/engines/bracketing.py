"""A small server that takes weights as SGLang 0.5.23 does: between two requests, pickled of torch's own parts."""

from __future__ import annotations

import base64
import io
import json
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from torch import Tensor

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
    """Takes tensors between begin_weight_update and end_weight_update alone; ``full``: updates before it fails."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.open = self.paused = False
        self.full = 1000
        self.version = "default"
        self.model_path = ""
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
        model = {"model_path": self.server.model_path, "model_type": "qwen2", "weight_version": self.server.version}
        self.reply(200, json.dumps({"paths": {"/begin_weight_update": {}}, **model}))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.reply(*self.server.answer(self.path, json.loads(body)))

    def reply(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@contextmanager
def bracketing_server() -> Iterator[Bracketing]:
    server = Bracketing()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
