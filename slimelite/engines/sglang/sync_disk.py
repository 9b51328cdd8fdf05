"""Weights through a folder that trainer and servers both see."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from slimelite.engines.protocol import WeightBucket
from slimelite.engines.sglang.control import Server, each
from slimelite.engines.sglang.weights import ServerSink, Shapes, pause, resume
from slimelite.model_files import write_weights

CONFIG = "config.json"


class DiskSink(ServerSink):
    """A Hugging Face folder for each version, which the servers then load; they decode while it is written.

    Args:
        servers, shapes: see `ServerSink`.
        directory: the folders go here, ``weights_0000007``.
        config: path of the model's config.json.
        keep: leave the folders of earlier versions where they are.
    """

    def __init__(self, servers: Sequence[Server], shapes: Shapes, directory: Path, config: Path, keep: bool) -> None:
        super().__init__(servers, shapes)
        self.directory = directory.absolute()
        self.config = config
        self.keep = keep
        self._written: list[Path] = []
        self._files: dict[str, str] = {}

    def _open(self) -> None:
        self._files.clear()
        self._folder = self.directory / f"weights_{self.version:07d}"
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)

    def _transfer(self, bucket: WeightBucket) -> None:
        file = f"model-{len(set(self._files.values())):05d}.safetensors"
        host = WeightBucket(bucket.names, bucket.shapes, bucket.flat.cpu())
        write_weights(dict(host.tensors()), self._folder / file)
        self._files |= dict.fromkeys(bucket.names, file)

    def _finish(self) -> None:
        size = sum(file.stat().st_size for file in self._folder.iterdir())
        index = {"metadata": {"total_size": size}, "weight_map": self._files}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(index))
        shutil.copy(self.config, self._folder / CONFIG)
        each(self.servers, self._load)
        if not self.keep:
            for folder in self._written:
                shutil.rmtree(folder, ignore_errors=True)
            self._written.clear()
        self._written.append(self._folder)

    def _load(self, server: Server) -> None:
        pause(server)
        server.post("/update_weights_from_disk", {"model_path": str(self._folder), "flush_cache": False})
        resume(server, self.version)
