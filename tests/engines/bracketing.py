"""A small server that takes weights as SGLang 0.5.23 does: between two requests, pickled of torch's own parts.

It releases its memory as SGLang 0.5.20 and 0.5.23 do, and loses what these lose.
"""

from __future__ import annotations

import base64
import io
import json
import pickle
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
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
    """Takes tensors between begin_weight_update and end_weight_update alone; ``full``: updates before it fails.

    ``fields``: of SGLang's ServerArgs. With a ``model_path`` it has that model's weights, all of which are parameters.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.open = self.paused = False
        self.full = 1000
        self.version = "default"
        self.fields = fields
        self.model_path = fields.get("model_path", "")
        self.weights: dict[str, Tensor] = {}
        for file in sorted(Path(self.model_path).glob("*.safetensors")) if self.model_path else ():
            self.weights |= load_file(file)
        self.draft = {"draft": torch.ones(3)} if fields.get("speculative_algorithm") else {}
        self.tables = {"rotary": torch.ones(3)}
        self.adapters: dict[str, dict[str, Tensor]] = {}
        self.released: set[str] = set()

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
                for name, tensor in unpickled(blob).items():
                    self.weights[name] = tensor.to(self.weights.get(name, tensor).dtype)
                # SGLang gives a draft model what is not for the target alone: 0.5.23 by the one, 0.5.20 by the other
                if body.get("selector") != "target" or not body.get("disable_draft_model"):
                    self.draft = {name: torch.full_like(t, torch.nan) for name, t in self.draft.items()}
            case "/load_lora_adapter_from_tensors":
                blob = base64.b64decode(body["serialized_named_tensors"][0])
                self.adapters[body["lora_name"]] = unpickled(blob)
            case "/unload_lora_adapter":
                del self.adapters[body["lora_name"]]
            case "/release_memory_occupation":
                self.release(body["tags"])
            case "/resume_memory_occupation":
                assert self.released.issuperset(body["tags"]), "SGLang dies of resuming what is not released"
                self.released -= set(body["tags"])
            case "/pause_generation":
                self.paused = True
            case "/continue_generation":
                self.paused = False
            case "/update_weight_version":
                self.version = body["new_version"]
        return 200, "{}"

    def release(self, tags: list[str]) -> None:
        """Lose what has no copy in host memory; buffers that it computes, and the adapters' pool, stay."""
        self.released |= set(tags)
        if "weights" not in tags or not self.fields.get("enable_memory_saver"):
            return
        backed = bool(self.fields.get("enable_weights_cpu_backup"))
        draft = backed or bool(self.fields.get("enable_draft_weights_cpu_backup"))
        for tensors, kept in ((self.weights, backed), (self.draft, draft)):
            if not kept:
                tensors.update({n: torch.full_like(t, torch.nan) for n, t in tensors.items()})

    def lost(self) -> list[str]:
        """Names of what it has no content for."""
        everything = {**self.weights, **self.draft, **self.tables}
        return [name for name, tensor in everything.items() if not tensor.isfinite().all()]


def unpickled(blob: bytes) -> dict[str, Tensor]:
    """The tensors of a ``flattened_bucket``, by name."""
    got = Unpickler(io.BytesIO(blob)).load()
    pieces = {m.name: (m, got["flattened_tensor"][m.start_idx : m.end_idx]) for m in got["metadata"]}
    return {name: piece.view(m.dtype).reshape(m.shape) for name, (m, piece) in pieces.items()}


class Handler(BaseHTTPRequestHandler):
    server: Bracketing

    def do_GET(self) -> None:
        path, loaded = self.server.model_path, [{"id": name} for name in self.server.adapters]
        kind = json.loads((Path(path) / "config.json").read_text())["model_type"]
        model = {"model_path": path, "model_type": kind, "weight_version": self.server.version, "data": loaded}
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
def bracketing_server(fields: Mapping[str, Any] | None = None) -> Iterator[Bracketing]:
    server = Bracketing(fields or {})
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
